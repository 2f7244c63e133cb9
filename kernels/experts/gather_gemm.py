"""Grouped GEMMs that read rank-major rows in place, in Triton (gather/): the host side."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.kernels.errors import DoesNotFit
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.rows import ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import ExpertWeights
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_PAIRS = {(RowFormat.BF16, WeightFormat.BF16), (RowFormat.FP8, WeightFormat.FP8)}
_INDEX_ROWS = 64  # rows of a block of the index kernel
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the work is cut. `per_sm` programs of a kernel share a multiprocessor."""

    block_t: int  # pairs of a tile, in both products
    block_n: int = 128  # GEMM1: columns of the intermediate, each of gate and up
    stages: int = 3
    warps: int = 4
    per_sm: int = 2
    down_block_n: int = 128  # GEMM2: columns of the output
    down_stages: int = 5
    down_warps: int = 4
    down_per_sm: int = 2


def default_tiles(shape: ExpertShape) -> Tiles:
    """By how many pairs an expert is expected to have: a tile that holds them, so that weights are read once."""
    expected = shape.expected_rows_per_expert or max(1, shape.selections_bound // (4 * shape.num_local_experts))
    if expected <= 10:
        return Tiles(block_t=16)
    if expected <= 24:
        return Tiles(block_t=32)
    return Tiles(block_t=64, warps=8, per_sm=1, down_stages=4, down_warps=8, down_per_sm=1)


class GatherGemm(ExpertCompute):
    """bf16 rows and weights, or fp8 rows and weights; rank-major."""

    name: ClassVar[str] = "gather_gemm"

    def __init__(self, tiles: Tiles | None = None) -> None:
        self._wanted = tiles

    def unavailable(self) -> str | None:
        """Needs Triton and compute capability 9.0."""
        try:
            import torch
            import triton
        except ImportError as error:
            return f"{error.name} is not installed; install epcross[gpu]"
        if triton.knobs.runtime.interpret:
            return None
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        if torch.cuda.get_device_capability() < (9, 0):
            return "needs compute capability 9.0 or newer, for bulk copies of tiles"
        return None

    def unsupported(self, shape: ExpertShape, layout: Layout) -> str | None:
        """Rank-major rows of two formats; sizes that tiles divide."""
        if found := shape.problems():
            return found[0]
        if layout is not Layout.RANK_MAJOR:
            return f"reads rank-major rows in place, not {layout} ones"
        if (shape.row_format, shape.weight_format) not in _PAIRS:
            return (
                f"serves bf16 rows with bf16 weights and fp8 with fp8, not {shape.row_format} rows with"
                f" {shape.weight_format} weights"
            )
        wrong = [name for name in ("hidden", "intermediate") if getattr(shape, name) % 128]
        if wrong:
            return f"{wrong[0]}={getattr(shape, wrong[0])} is not a multiple of 128, the width of a tile"
        if shape.capacity_rows * max(shape.top_k, shape.num_local_experts) >= 1 << 30:
            return f"capacity_rows={shape.capacity_rows} is more than its 32-bit index holds"
        return None

    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Rounds the intermediate and the weighted sum, nothing else."""
        return Arithmetic(intermediate=shape.row_format)

    def prepare(self, shape: ExpertShape, layout: Layout, weights: ExpertWeights) -> None:
        """Takes workspaces and describes the weights to the copy engine; kernels are compiled by the first run."""
        import torch
        import triton
        from triton.tools.tensor_descriptor import TensorDescriptor

        self._shape, self._tiles = shape, self._wanted or default_tiles(shape)
        tiles, device = self._tiles, weights.copies[0].gate_up.device
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self._fp8 = shape.weight_format is WeightFormat.FP8
        self._version = f"triton {triton.__version__}"
        width = 128 if self._fp8 else 64  # one swizzle of shared memory
        self._block_k = width
        experts, hidden, inter = shape.num_local_experts, shape.hidden, shape.intermediate
        bound = shape.selections_bound
        self._max_tiles = bound // tiles.block_t + min(experts, bound)
        self._units = self._sms * tiles.per_sm

        def empty(*size: int, dtype: "torch.dtype" = torch.int32) -> "torch.Tensor":
            return torch.empty(size, dtype=dtype, device=device)

        element = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        places = self._max_tiles * tiles.block_t
        part = 2 * tiles.block_n * tiles.block_t
        self._buffers = {
            "index": empty(experts, shape.capacity_rows),
            "place": empty(shape.capacity_rows, shape.top_k),
            "shared": empty(shape.capacity_rows),
            "counters": torch.zeros(experts + 2, dtype=torch.int32, device=device),
            "schedule": torch.zeros(4, dtype=torch.int32, device=device),
            "expert_rows": empty(experts),
            "expert_tile": empty(experts),
            "tile": empty(2, self._max_tiles),
            "h": torch.zeros((places, inter), dtype=element, device=device),
            "h_scale": empty(places, inter // 128 if self._fp8 else 1, dtype=torch.float32),
            "gate_up_part": empty(2 * self._units, part, dtype=torch.float32),
            "arrivals": torch.zeros(2 * self._units, dtype=torch.int32, device=device),
            "down_part": empty(places, hidden, dtype=torch.float32),
        }

        def described(tensor: "torch.Tensor", block_rows: int) -> Any:
            return TensorDescriptor.from_tensor(tensor, [block_rows, width])

        self._h_desc = described(self._buffers["h"], tiles.block_t)
        self._copies = [
            (
                described(copy.gate_up.view(experts * 2 * inter, hidden), tiles.block_n),
                copy.gate_up if copy.gate_up_scales is None else copy.gate_up_scales,
                described(copy.down.view(experts * hidden, inter), tiles.down_block_n),
                copy.down if copy.down_scales is None else copy.down_scales,
            )
            for copy in weights.copies
        ]

    def run(self, rows: ExpertRows, weights_copy: int = 0) -> None:
        """See `ExpertCompute`."""
        import torch
        import triton

        from epcross.kernels.experts.gather.gemm_kernels import down_kernel, finish_kernel, gate_up_kernel
        from epcross.kernels.experts.gather.index_kernel import index_kernel

        assert isinstance(rows, RankMajorRows)
        shape, tiles, at, first = self._shape, self._tiles, self._buffers, rows.sets[0]
        second = rows.sets[-1]
        num_rows, experts = rows.capacity_rows, shape.num_local_experts
        pdl = not self._interpreted
        dependent: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        two_sets = len(rows.sets) == 2
        element = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        epoch = at["schedule"] if rows.epoch is None else rows.epoch
        headers = first.headers
        sources, per_source = (1, num_rows) if headers is None else headers.shape
        strides = (0, 0) if headers is None else headers.stride()
        w1, w1_scale, w2, w2_scale = self._copies[weights_copy % len(self._copies)]
        x, x_scale = first.rows.view(element), first.scales.view(torch.float32) if self._fp8 else at["h_scale"]
        index_kernel[(triton.cdiv(num_rows, _INDEX_ROWS),)](
            first.ids, _apart(first.ids, second.ids), first.ids.stride(0),
            at["schedule"] if headers is None else headers,
            0 if headers is None or second.headers is None else _apart(headers, second.headers), *strides, per_source,
            epoch, at["schedule"] if rows.count is None else rows.count, num_rows, shape.first_slot,
            at["index"], at["place"], at["shared"], at["counters"], at["schedule"], at["expert_rows"],
            at["expert_tile"], at["tile"], self._max_tiles, self._units,
            E=experts, E_PAD=triton.next_power_of_2(experts), K=shape.top_k,
            K_PAD=triton.next_power_of_2(shape.top_k), ROWS=_INDEX_ROWS, BLOCK_T=tiles.block_t,
            COLUMN_BLOCKS=shape.intermediate // tiles.block_n, MAX_SPLITS=_MAX_SPLITS, TWO_SETS=two_sets,
            HAS_HEADERS=headers is not None, HAS_LIMIT=rows.count is not None, PDL=pdl, num_warps=4,
        )  # fmt: skip
        gate_up_kernel[(self._units,)](
            w1, w1_scale, x, _apart(first.rows, second.rows) // element.itemsize, x.stride(0), x_scale,
            _apart(first.scales, second.scales) // 4, x_scale.stride(0), epoch, at["index"], num_rows,
            at["schedule"], at["expert_rows"], at["tile"], self._max_tiles, at["h"], at["h_scale"],
            at["gate_up_part"], at["arrivals"],
            H=shape.hidden, I=shape.intermediate, K=shape.top_k, FP8=self._fp8, BLOCK_N=tiles.block_n,
            BLOCK_T=tiles.block_t, BLOCK_K=self._block_k, TWO_SETS=two_sets, PDL=pdl,
            num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
        )  # fmt: skip
        down_kernel[(self._sms * tiles.down_per_sm,)](
            w2, w2_scale, self._h_desc, at["h_scale"], first.weights, _apart(first.weights, second.weights),
            first.weights.stride(0), epoch, at["index"], num_rows, at["schedule"], at["expert_rows"], at["tile"],
            self._max_tiles, rows.out, rows.out.stride(0), at["down_part"],
            H=shape.hidden, I=shape.intermediate, K=shape.top_k, FP8=self._fp8, BLOCK_N=tiles.down_block_n,
            BLOCK_T=tiles.block_t, BLOCK_K=self._block_k, TWO_SETS=two_sets, PDL=pdl,
            num_warps=tiles.down_warps, num_stages=tiles.down_stages, **dependent,
        )  # fmt: skip
        finish_kernel[(self._sms * 4,)](
            at["shared"], at["place"], at["expert_tile"], at["schedule"], num_rows, at["down_part"], rows.out,
            rows.out.stride(0), self._max_tiles,
            H=shape.hidden, K=shape.top_k, BLOCK_T=tiles.block_t, BLOCK_N=1024, PDL=pdl, num_warps=4, **dependent,
        )  # fmt: skip

    def check(self) -> None:
        """Wait for the device, and see that everything had a place.

        Raises:
            DoesNotFit: a run had more selections than `max_selections` of the shape promised.
        """
        if dropped := int(self._buffers["schedule"][3]):
            raise DoesNotFit(
                f"{dropped} tiles of {self._tiles.block_t} selections found no place: more than"
                f" max_selections={self._shape.selections_bound} came; raise it, or leave it out"
            )

    def describe(self) -> ComputeDescription:
        """Triton, and how the work is cut."""
        names = ("index_kernel", "gate_up_kernel", "down_kernel", "finish_kernel")
        options = {name: str(value) for name, value in asdict(self._tiles).items()}
        return ComputeDescription(version=self._version, kernels=names, options=options)

    @property
    def workspace_bytes(self) -> int:
        """Index, intermediate, and sums that are not finished."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def release(self) -> None:
        """Lets go of workspaces and weights."""
        self._buffers, self._copies = {}, []
        del self._h_desc


def _apart(first: "torch.Tensor", second: "torch.Tensor") -> int:
    """Elements from one tensor to another."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()
