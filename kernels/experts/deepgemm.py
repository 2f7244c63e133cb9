"""DeepGEMM's grouped GEMMs, with what an engine puts around them: rows brought to their experts and sums brought back.

    expert-major   masked GEMM on rows in place, SwiGLU and re-quantisation, masked GEMM into `out`
    rank-major     index, rows copied to their experts, GEMM, SwiGLU and re-quantisation, GEMM, weighted sums to `out`:
                   masked, with room for every row at each expert, or contiguous, each expert padded to the alignment

The library compiles a kernel for each shape when it is first called; `prepare` leaves that to the first `run`.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.kernels.experts.capability import major_capability
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather.index import PairIndex, apart, epoch_of, on, triton_missing
from epcross.kernels.experts.rows import ExpertMajorRows, ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import ExpertWeights
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_MASKED_BYTES = 8 << 30  # of memory that room for every row at each expert is worth: see `rank_major_form`
_FORMS = ("auto", "masked", "contiguous")
_BLOCK_T = 16  # of the index, where tiles are only units of work

MASKED_ROWS_MULTIPLE = 128
"""The masked products store whole tiles, of 64 or 128 rows, at an expert's first row and on: an expert's room must end
on a tile, or a tile's empty rows overwrite those of the next expert."""


class DeepGemm(ExpertCompute):
    """fp8 or bf16, both layouts; fp8 rows with fp4 weights on compute capability 10."""

    name: ClassVar[str] = "deepgemm"

    def __init__(self, form: str = "auto") -> None:
        """`form` of the products for rank-major rows: masked, contiguous, or auto."""
        self._form = form

    def option_problems(self) -> list[str]:
        """See `ExpertCompute`."""
        known = self._form in _FORMS
        return [] if known else [f"form={self._form} must be {', '.join(_FORMS[:-1])} or {_FORMS[-1]}"]

    def unavailable(self) -> str | None:
        """Needs deep_gemm, which needs a CUDA toolkit at run time, and Triton."""
        if reason := triton_missing():
            return reason
        try:
            import deep_gemm  # noqa: F401
        except ImportError as error:
            return f"deep_gemm is not usable ({error}); install sgl-deep-gemm or tokenspeed-deepgemm"
        except (AssertionError, OSError, RuntimeError) as error:
            return f"deep_gemm does not start ({type(error).__name__}: {error}); it needs a CUDA toolkit with nvcc"
        return None

    def unsupported(self, shape: ExpertShape, layout: Layout) -> str | None:
        """What the architecture's kernels read; asks the device only where there is one."""
        if found := shape.problems():
            return found[0]
        pair = (shape.row_format, shape.weight_format)
        if found := self.option_problems():
            return found[0]
        if layout is Layout.EXPERT_MAJOR and shape.capacity_rows % MASKED_ROWS_MULTIPLE:
            return (
                f"capacity_rows={shape.capacity_rows} of each expert is not a multiple of {MASKED_ROWS_MULTIPLE}: its"
                " masked products store whole tiles, over the next expert's rows"
            )
        if shape.hidden % 128 or shape.intermediate % 128:
            return f"hidden={shape.hidden} and intermediate={shape.intermediate} must be multiples of 128"
        if pair == (RowFormat.BF16, WeightFormat.BF16):
            return None
        if shape.row_format is not RowFormat.FP8 or shape.weight_format is WeightFormat.BF16:
            return f"multiplies bf16 with bf16, fp8 with fp8 or fp4, not {pair[0]} rows with {pair[1]} weights"
        major = major_capability()
        if shape.weight_format is WeightFormat.FP4 and major is not None and major < 10:
            return f"fp8 x fp4 needs compute capability 10.0, and this is {major}"
        if major is not None and major >= 10 and not shape.power_of_two_scales:
            return "its kernels for compute capability 10 read scales that are powers of two, and these are not"
        return None

    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Every product is stored in bf16."""
        return Arithmetic(
            intermediate=shape.row_format,
            power_of_two_scales=shape.power_of_two_scales,
            gate_up_rounded=True,
            output_rounded=True,
        )

    def prepare(self, shape: ExpertShape, layout: Layout, weights: ExpertWeights) -> None:
        """Takes buffers; the weights are read as they are."""
        import deep_gemm
        import torch

        self._shape, self._layout, self._library = shape, layout, deep_gemm
        self._fp8 = shape.row_format is RowFormat.FP8
        device = weights.copies[0].gate_up.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        experts = shape.num_local_experts
        self._programs = -(-4 * sms // experts) * experts  # each expert has as many
        form = "masked" if layout is Layout.EXPERT_MAJOR else self._form
        if form == "auto":
            form = rank_major_form(shape)
        self._masked, self._index = form == "masked", None
        if layout is Layout.RANK_MAJOR:
            align = _BLOCK_T if self._masked else int(deep_gemm.get_mk_alignment_for_contiguous_layout())
            self._index = PairIndex(shape, align, device)
            self._capacity = _masked_room(shape)
            places = (experts, self._capacity) if self._masked else (self._index.max_tiles * align,)
        else:
            self._capacity = shape.capacity_rows
            places = (experts, self._capacity)
        self._places = math.prod(places)
        element = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        hidden, inter = shape.hidden, shape.intermediate

        def values(columns: int, dtype: "torch.dtype") -> "torch.Tensor":
            return torch.zeros((*places, columns), dtype=dtype, device=device)

        def scales(columns: int) -> "torch.Tensor":
            """[..., places, columns] in memory by columns, as the kernels load it."""
            height = -(-places[-1] // 4) * 4
            whole = torch.ones((*places[:-1], columns, height), dtype=torch.float32, device=device)
            return whole.transpose(-1, -2)[..., : places[-1], :]

        self._gate_up = values(2 * inter, torch.bfloat16)
        self._h, self._h_scale = values(inter, element), scales(inter // 128 if self._fp8 else 1)
        self._x = self._x_scale = self._y = self._group = None
        if layout is Layout.RANK_MAJOR:
            self._x, self._y = values(hidden, element), values(hidden, torch.bfloat16)
            self._x_scale = scales(hidden // 128 if self._fp8 else 1)
            if not self._masked:
                self._group = torch.full(places, -1, dtype=torch.int32, device=device)
        self._weights = [_operands(shape, copy) for copy in weights.copies]

    def run(self, rows: ExpertRows, weights_copy: int = 0) -> None:
        """See `ExpertCompute`."""
        gate_up, down = self._weights[weights_copy % len(self._weights)]
        if isinstance(rows, ExpertMajorRows):
            x = rows.rows.view(self._h.dtype)
            self._product(x, rows.scales, gate_up, self._gate_up, rows.counts)
            self._swiglu(rows.counts)
            self._product(self._h, self._h_scale, down, rows.out, rows.counts)
            return
        index = self._index
        assert index is not None
        index.fill(rows, pdl=False)
        self._bring(rows)
        self._product(self._x, self._x_scale, gate_up, self._gate_up, index.expert_rows)
        self._swiglu(index.expert_rows)
        self._product(self._h, self._h_scale, down, self._y, index.expert_rows)
        self._return(rows)

    def describe(self) -> ComputeDescription:
        """The library, and which of its kernels."""
        form = "masked" if self._masked else "contiguous"
        kind = "fp8" if self._fp8 else "bf16"
        around = ("index_kernel", "bring_kernel") if self._layout is Layout.RANK_MAJOR else ()
        back = ("return_kernel",) if self._layout is Layout.RANK_MAJOR else ()
        product = f"m_grouped_{kind}_gemm_nt_{form}"
        version = f"deep_gemm {getattr(self._library, '__version__', 'unknown')}"
        kernels = (*around, product, "swiglu_kernel", product, *back)
        return ComputeDescription(version=version, kernels=kernels, options={"form": form})

    @property
    def workspace_bytes(self) -> int:
        """Rows at their experts, both products, the intermediate."""
        buffers = (self._gate_up, self._h, self._h_scale, self._x, self._x_scale, self._y, self._group)
        index = 0 if self._index is None else self._index.nbytes
        return index + sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def release(self) -> None:
        """Lets go of all of that."""
        self._weights, self._index = [], None
        del self._gate_up, self._h, self._h_scale, self._x, self._x_scale, self._y, self._group

    def _product(self, a: Any, a_scale: Any, b: Any, out: Any, counts: "torch.Tensor") -> None:
        """One of the library's grouped products."""
        library, shape = self._library, self._shape
        left = (a, a_scale) if self._fp8 else a
        recipe = {"recipe_a": (1, 128), "recipe_b": (1, 32)} if shape.weight_format is WeightFormat.FP4 else {}
        kind = "fp8" if self._fp8 else "bf16"
        if recipe:
            kind = "fp8_fp4"
        if self._masked:
            expected = shape.expected_rows_per_expert or max(1, shape.capacity_rows // 4)
            getattr(library, f"m_grouped_{kind}_gemm_nt_masked")(left, b, out, counts, expected, **recipe)
        else:
            getattr(library, f"m_grouped_{kind}_gemm_nt_contiguous")(left, b, out, self._group, **recipe)

    def _bring(self, rows: RankMajorRows) -> None:
        """Copy rows to their experts."""
        import triton

        from epcross.kernels.experts.gather.permute_kernels import bring_kernel

        index, shape, first, second = self._index, self._shape, rows.sets[0], rows.sets[-1]
        assert index is not None
        assert self._x is not None
        assert self._x_scale is not None
        x = first.rows.view(self._h.dtype)
        scale = first.scales.view(self._h_scale.dtype) if self._fp8 else self._h_scale
        scale_delta, scale_stride = (apart(first.scales, second.scales) // 4, scale.stride(0)) if self._fp8 else (0, 0)
        on(bring_kernel, self._programs)(
            x, apart(first.rows, second.rows) // x.element_size(), x.stride(0), scale, scale_delta, scale_stride,
            epoch_of(rows, index.schedule), index.pairs, rows.capacity_rows, index.schedule, index.expert_rows,
            index.expert_tile, index.tile, index.max_tiles, self._x, self._x_scale,
            self._x_scale.stride(0) if self._masked else 0, self._x_scale.stride(-1),
            index.schedule if self._group is None else self._group, self._capacity, self._places,
            H=shape.hidden, H_PAD=triton.next_power_of_2(shape.hidden),
            SCALES_PAD=triton.next_power_of_2(shape.hidden // 128), K=shape.top_k, E=shape.num_local_experts,
            BLOCK_T=index.block_t, FP8=self._fp8, MASKED=self._masked, TWO_SETS=len(rows.sets) == 2, num_warps=4,
        )  # fmt: skip

    def _swiglu(self, counts: "torch.Tensor") -> None:
        """From GEMM1's bf16 to what GEMM2 reads."""
        import triton

        from epcross.kernels.experts.gather.permute_kernels import swiglu_kernel

        index, shape = self._index, self._shape
        on(swiglu_kernel, self._programs)(
            self._gate_up, counts, counts if index is None else index.expert_tile, self._h, self._h_scale,
            self._h_scale.stride(0) if self._masked else 0, self._h_scale.stride(-1), self._capacity, self._places,
            I=shape.intermediate, BLOCKS_PAD=triton.next_power_of_2(shape.intermediate // 128),
            E=shape.num_local_experts, BLOCK_T=_BLOCK_T if index is None else index.block_t, FP8=self._fp8,
            POWER_OF_TWO=shape.power_of_two_scales, MASKED=self._masked, num_warps=4,
        )  # fmt: skip

    def _return(self, rows: RankMajorRows) -> None:
        """Weighted sums to where the combine reads."""
        from epcross.kernels.experts.gather.permute_kernels import return_kernel

        index, shape, first, second = self._index, self._shape, rows.sets[0], rows.sets[-1]
        assert index is not None
        assert self._y is not None
        on(return_kernel, self._programs)(
            self._y, index.place, first.weights, apart(first.weights, second.weights), first.weights.stride(0),
            epoch_of(rows, index.schedule), index.expert_tile, rows.capacity_rows, self._places,
            rows.out, rows.out.stride(0), self._capacity,
            H=shape.hidden, K=shape.top_k, BLOCK_T=index.block_t, BLOCK_N=1024, MASKED=self._masked,
            TWO_SETS=len(rows.sets) == 2, num_warps=4,
        )  # fmt: skip


def rank_major_form(shape: ExpertShape) -> str:
    """masked, where its buffers take no more than 8 GiB, else contiguous.

    The masked products take as long as the rows that came, the contiguous ones as long as those that there is room for:
    on an H200, with 1024 and 2048 rows, twice and four times as long a layer (kernels/README.md).
    """
    width = 1 if shape.row_format is RowFormat.FP8 else 2
    place = shape.hidden * (width + 2) + shape.intermediate * (4 + width)  # rows, outputs; GEMM1's bf16, intermediate
    return "masked" if shape.num_local_experts * _masked_room(shape) * place <= _MASKED_BYTES else "contiguous"


def _masked_room(shape: ExpertShape) -> int:
    """Places of an expert with room for every row."""
    return -(-shape.capacity_rows // MASKED_ROWS_MULTIPLE) * MASKED_ROWS_MULTIPLE


def _operands(shape: ExpertShape, copy: Any) -> tuple[Any, Any]:
    """Weights as the products take them: with their scales, fp4 as signed bytes and its scales as fp32."""
    import torch

    if shape.weight_format is WeightFormat.BF16:
        return copy.gate_up, copy.down
    if shape.weight_format is WeightFormat.FP8:
        return (copy.gate_up, copy.gate_up_scales), (copy.down, copy.down_scales)
    return tuple(  # type: ignore[return-value]
        (values.view(torch.int8), torch.exp2(scales.float() - 127))
        for values, scales in ((copy.gate_up, copy.gate_up_scales), (copy.down, copy.down_scales))
    )
