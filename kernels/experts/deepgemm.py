"""DeepGEMM's grouped GEMMs, with what an engine puts around them: rows brought to their experts and sums brought back.

    expert-major   masked GEMM on rows in place, SwiGLU and re-quantisation, masked GEMM into `out`
    rank-major     rows copied to their experts, GEMM, SwiGLU and re-quantisation, GEMM, weighted sums to `out`:
                   masked, with room for every row at each expert, or contiguous, each expert padded to the alignment

The library compiles a kernel for each shape when it is first called; `prepare` leaves that to the first `run`.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.kernels.experts.capability import major_capability
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather.index import on, triton_missing
from epcross.kernels.experts.gather.permute import Permutation
from epcross.kernels.experts.rows import ExpertMajorRows, ExpertRows
from epcross.kernels.experts.weights import ExpertWeights
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_MASKED_BYTES = 8 << 30  # of memory that room for every row at each expert is worth: see `rank_major_form`
_FORMS = ("auto", "masked", "contiguous")
_PROGRAMS_PER_SM = 8  # of SwiGLU

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
        self._programs, experts = _PROGRAMS_PER_SM * sms, shape.num_local_experts
        form = "masked" if layout is Layout.EXPERT_MAJOR else self._form
        if form == "auto":
            form = rank_major_form(shape)
        self._masked, self._permutation, self._align = form == "masked", None, 1
        self._room = shape.capacity_rows
        if layout is Layout.RANK_MAJOR:
            self._room = _masked_room(shape) if self._masked else 0
            if not self._masked:
                self._align = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
            self._permutation = Permutation(shape, self._room, self._align, device)
        places = (experts, self._room)
        if self._permutation is not None and not self._masked:
            places = (self._permutation.places,)
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
        permutation = self._permutation
        assert permutation is not None
        assert self._x is not None
        assert self._x_scale is not None
        assert self._y is not None
        counts = permutation.expert_rows
        permutation.bring(rows, self._x, self._x_scale, self._group)
        self._product(self._x, self._x_scale, gate_up, self._gate_up, counts)
        self._swiglu(counts)
        self._product(self._h, self._h_scale, down, self._y, counts)
        permutation.back(rows, self._y)

    def describe(self) -> ComputeDescription:
        """The library, and which of its kernels."""
        form = "masked" if self._masked else "contiguous"
        kind = "fp8" if self._fp8 else "bf16"
        around = back = ()
        if self._layout is Layout.RANK_MAJOR:
            around = ("place_kernel",) if self._masked else ("place_kernel", "bring_kernel")
            back = ("return_kernel",)
        product = f"m_grouped_{kind}_gemm_nt_{form}"
        version = f"deep_gemm {getattr(self._library, '__version__', 'unknown')}"
        kernels = (*around, product, "swiglu_kernel", product, *back)
        return ComputeDescription(version=version, kernels=kernels, options={"form": form})

    @property
    def workspace_bytes(self) -> int:
        """Rows at their experts, both products, the intermediate."""
        buffers = (self._gate_up, self._h, self._h_scale, self._x, self._x_scale, self._y, self._group)
        around = 0 if self._permutation is None else self._permutation.nbytes
        return around + sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def release(self) -> None:
        """Lets go of all of that."""
        self._weights, self._permutation = [], None
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

    def _swiglu(self, counts: "torch.Tensor") -> None:
        """From GEMM1's bf16 to what GEMM2 reads."""
        import triton

        from epcross.kernels.experts.gather.swiglu_kernel import swiglu_kernel

        permutation, shape = self._permutation, self._shape
        listed = (counts, counts) if permutation is None else (permutation.listed_count, permutation.taken_count)
        on(swiglu_kernel, self._programs)(
            self._gate_up, counts, *listed, self._h, self._h_scale,
            self._h_scale.stride(0) if self._masked else 0, self._h_scale.stride(-1), self._room, self._places,
            I=shape.intermediate, BLOCKS_PAD=triton.next_power_of_2(shape.intermediate // 128),
            E=shape.num_local_experts, E_PAD=triton.next_power_of_2(shape.num_local_experts), BLOCK_T=self._align,
            FP8=self._fp8, POWER_OF_TWO=shape.power_of_two_scales, MASKED=self._masked,
            LISTED=permutation is not None, num_warps=4,
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
