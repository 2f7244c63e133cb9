"""Grouped GEMMs that read rank-major rows in place, in Triton (gather/): the host side."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.kernels.errors import DoesNotFit
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather.index import PairIndex, apart, epoch_of, interpreted, on, triton_missing
from epcross.kernels.experts.rows import ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import ExpertWeights
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_PAIRS = {(RowFormat.BF16, WeightFormat.BF16), (RowFormat.FP8, WeightFormat.FP8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the work is cut. `per_sm` programs of a kernel share a multiprocessor, if its shared memory and its 65536
    registers suffice; else some of them wait for others to end."""

    block_t: int  # pairs of a tile, in both products
    block_n: int = 128  # GEMM1: columns of the intermediate, each of gate and up
    stages: int = 3
    warps: int = 4
    per_sm: int = 2
    down_block_n: int = 128  # GEMM2: columns of the output
    down_stages: int = 5
    down_warps: int = 4
    down_per_sm: int = 2
    prefetch: int = 0  # bytes of each row of GEMM2's first weights that a program fetches while GEMM1 ends
    balance: int = 0  # 1: GEMM1's sums are shared so that the last turn of the programs is full, not by powers of two;
    # 2: those of the last turn are, and others are not shared
    regs: int = 0  # registers that a thread of GEMM1 may take; 0 or 255: as many as the compiler likes
    down_regs: int = 0  # likewise of GEMM2
    tall: int = 0  # 1: tokens are the tall operand of GEMM1, not the wide one; from tiles of 64 pairs on
    in_turn: int = 0  # 1: GEMM1 sums all of gate, then all of up: a stage without one of its two blocks of weights; fp8
    down_tall: int = 0  # as `tall`, of GEMM2
    late: int = 0  # 1: GEMM1 scales products of up a step later, and tensor cores do not wait for that; fp8


_BLOCKS, _WARPS, _COUNTS, _REGISTERS = (16, 32, 64, 128), (4, 8, 16), tuple(range(1, 17)), (64, 80, 96, 128, 168, 255)
_TALLEST = 64  # rows of the tensor cores' product, of the tall operand
_STAGE_ROW_BYTES = 128  # one swizzle of shared memory, in either format
_BLOCK_BYTES = 227 * 1024  # compute capability 9.0 and 10.0; CUDA Programming Guide, technical specifications
ALLOWED: dict[str, tuple[int, ...]] = {
    "block_t": _BLOCKS, "block_n": _BLOCKS, "stages": _COUNTS, "warps": _WARPS, "per_sm": _COUNTS,
    "down_block_n": _BLOCKS, "down_stages": _COUNTS, "down_warps": _WARPS, "down_per_sm": _COUNTS,
    "prefetch": (128, 256, 512, 1024, 2048), "balance": (1, 2), "regs": _REGISTERS, "down_regs": _REGISTERS,
    "tall": (1,), "in_turn": (1,), "down_tall": (1,), "late": (1,),
}  # fmt: skip
"""What each field of `Tiles` may be, beside 0, its default: tiles divide 128, and warps in fours make a product."""


def default_tiles(shape: ExpertShape) -> Tiles:
    """By how many pairs an expert is expected to have: a tile that holds them, so that weights are read once.

    What each choice brought is in kernels/README.md.
    """
    expected = shape.expected_rows_per_expert or max(1, shape.selections_bound // (4 * shape.num_local_experts))
    fp8 = shape.weight_format is WeightFormat.FP8
    if expected <= 10:
        tiles = Tiles(block_t=16)
        if fp8 and expected <= 4:  # some experts are not hit: sums are shared so that the last turn is full
            tiles = replace(tiles, warps=8, balance=1)
        elif fp8:  # about every expert is hit: turns of one program a multiprocessor are full
            tiles = replace(tiles, stages=6, per_sm=1)
    elif expected <= 24:
        tiles = Tiles(block_t=32, stages=4, warps=8, per_sm=1)
    else:
        tiles = Tiles(block_t=64, stages=4, warps=8, per_sm=1, down_stages=4)
        if fp8:  # so many scales for each tile that tokens are the tall operand
            return replace(tiles, tall=1, late=1, balance=2, down_tall=1, down_regs=255)
        # of four warps bf16 was not measured yet
        return replace(tiles, down_warps=8, down_per_sm=1)
    # GEMM2's units are short: while one of four programs begins or ends its own, the others read
    return replace(tiles, down_stages=2, down_per_sm=4, down_regs=128) if fp8 else tiles


def _stage_bytes(tiles: Tiles) -> dict[str, int]:
    """Shared memory of one stage of GEMM1 and of GEMM2: 128 bytes of each row of a tile's operands."""
    gate_up_rows = tiles.block_n * (1 if tiles.in_turn else 2) + tiles.block_t
    rows = {"stages": gate_up_rows, "down_stages": tiles.down_block_n + tiles.block_t}
    return {name: _STAGE_ROW_BYTES * count for name, count in rows.items()}


def _too_deep(tiles: Tiles) -> str | None:
    """Which product needs more shared memory than a block can have."""
    for name, stage_bytes in _stage_bytes(tiles).items():
        stages = getattr(tiles, name)
        if stages * stage_bytes > _BLOCK_BYTES:
            return (
                f"{name}={stages} of {stage_bytes} bytes take {stages * stage_bytes} bytes of shared memory, more than"
                f" the {_BLOCK_BYTES} of a block: take {_BLOCK_BYTES // stage_bytes} at most, or smaller tiles"
            )
    return None


class GatherGemm(ExpertCompute):
    """bf16 rows and weights, or fp8 rows and weights; rank-major."""

    name: ClassVar[str] = "gather_gemm"

    def __init__(
        self, block_t: int = 0, block_n: int = 0, stages: int = 0, warps: int = 0, per_sm: int = 0,
        down_block_n: int = 0, down_stages: int = 0, down_warps: int = 0, down_per_sm: int = 0,
        prefetch: int = 0, balance: int = 0, regs: int = 0, down_regs: int = 0, tall: int = 0, in_turn: int = 0,
        down_tall: int = 0, late: int = 0,
    ) -> None:  # fmt: skip
        """Fields of `Tiles`; 0 leaves one to `default_tiles`."""
        given = {name: value for name, value in locals().items() if name in Tiles.__slots__}
        self._asked = {name: int(value) for name, value in given.items() if value}

    def option_problems(self) -> list[str]:
        """See `ExpertCompute`."""
        found = []
        for name, value in self._asked.items():
            if value not in ALLOWED[name]:
                several = "one of " if len(ALLOWED[name]) > 1 else ""
                words = ", ".join(map(str, ALLOWED[name]))
                found.append(f"{name}={value} must be {several}{words}, or 0 for its default")
        return found

    def unavailable(self) -> str | None:
        """Needs Triton and compute capability 9.0."""
        return triton_missing()

    def unsupported(self, shape: ExpertShape, layout: Layout) -> str | None:
        """Rank-major rows of two formats; sizes that tiles divide."""
        if found := shape.problems():
            return found[0]
        if layout is not Layout.RANK_MAJOR:
            return f"reads rank-major rows in place, not {layout} ones"
        if found := self.option_problems():
            return found[0]
        if (shape.row_format, shape.weight_format) not in _PAIRS:
            return (
                f"serves bf16 rows with bf16 weights and fp8 with fp8, not {shape.row_format} rows with"
                f" {shape.weight_format} weights"
            )
        if shape.row_format is RowFormat.FP8 and self._asked.get("block_n", 128) != 128:
            return f"block_n={self._asked['block_n']} must be 128 for fp8: the columns that share a scale"
        fp8_alone = [name for name in ("in_turn", "late") if name in self._asked]
        if shape.row_format is not RowFormat.FP8 and fp8_alone:
            return f"{fp8_alone[0]}=1 is for fp8 alone: leave it out"
        if len(fp8_alone) == 2:
            return "in_turn=1 has no step in which up could be late: leave it out, or late=1"
        tiles = self._chosen(shape)
        for name, asked in (("tall", tiles.tall), ("down_tall", tiles.down_tall)):
            if asked and tiles.block_t < _TALLEST:
                return f"{name}=1 needs block_t={_TALLEST} or more, the rows of a product, and it is {tiles.block_t}"
        if too_deep := _too_deep(tiles):
            return too_deep
        sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate}
        if wrong := [f"{name}={size}" for name, size in sizes.items() if size % 128]:
            many = "is not a multiple" if len(wrong) == 1 else "are not multiples"
            return f"{' and '.join(wrong)} {many} of 128, the width of a tile"
        if shape.capacity_rows * max(shape.top_k, shape.num_local_experts, shape.hidden // 2) >= 1 << 31:
            return f"capacity_rows={shape.capacity_rows} is more than its 32-bit index holds"
        return None

    def _chosen(self, shape: ExpertShape) -> Tiles:
        """What is asked for; of the rest the defaults, without forms that were chosen for tiles of other sizes or that
        exclude what is asked for, and with no more stages than fit."""
        usual = default_tiles(shape)
        if self._asked.get("block_t", usual.block_t) != usual.block_t:
            usual = replace(usual, tall=0, late=0, balance=0, down_tall=0)
        if "in_turn" in self._asked:
            usual = replace(usual, late=0)
        tiles = replace(usual, **self._asked)
        most = {name: min(getattr(tiles, name), _BLOCK_BYTES // size) for name, size in _stage_bytes(tiles).items()}
        return replace(tiles, **{name: stages for name, stages in most.items() if name not in self._asked})

    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Rounds the intermediate and the weighted sum, nothing else."""
        return Arithmetic(intermediate=shape.row_format, power_of_two_scales=shape.power_of_two_scales)

    def prepare(self, shape: ExpertShape, layout: Layout, weights: ExpertWeights) -> None:
        """Takes workspaces and describes the weights to the copy engine; kernels are compiled by the first run."""
        import torch
        import triton
        from triton.tools.tensor_descriptor import TensorDescriptor

        self._shape, self._tiles = shape, self._chosen(shape)
        tiles, device = self._tiles, weights.copies[0].gate_up.device
        self._version = f"triton {triton.__version__}"
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self._fp8 = shape.weight_format is WeightFormat.FP8
        self._element = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        self._block_k = width = 128 if self._fp8 else 64  # one swizzle of shared memory
        experts, hidden, inter = shape.num_local_experts, shape.hidden, shape.intermediate
        self._units = self._sms * tiles.per_sm
        self._index = PairIndex(
            shape, tiles.block_t, device, column_blocks=inter // tiles.block_n, units=self._units,
            balance=tiles.balance,
        )  # fmt: skip
        places = self._index.max_tiles * tiles.block_t
        floats = {"dtype": torch.float32, "device": device}
        self._h = torch.zeros((places, inter), dtype=self._element, device=device)
        self._h_scale = torch.zeros((inter // 128 if self._fp8 else 1, places), **floats)
        self._gate_up_part = torch.empty((2 * self._units, 2 * tiles.block_n * tiles.block_t), **floats)
        self._arrivals = torch.zeros(2 * self._units, dtype=torch.int32, device=device)
        self._down_part = torch.empty((places, hidden), **floats)

        def described(tensor: "torch.Tensor", block_rows: int) -> Any:
            return TensorDescriptor.from_tensor(tensor, [block_rows, width])

        self._h_desc = described(self._h, tiles.block_t)
        self._copies = [
            (
                described(copy.gate_up.view(experts * 2 * inter, hidden), tiles.block_n),
                copy.gate_up if copy.gate_up_scales is None else copy.gate_up_scales,
                described(copy.down.view(experts * hidden, inter), tiles.down_block_n),
                copy.down.view(torch.uint8),
                copy.down if copy.down_scales is None else copy.down_scales,
            )
            for copy in weights.copies
        ]

    def run(self, rows: ExpertRows, weights_copy: int = 0) -> None:
        """See `ExpertCompute`."""
        from epcross.kernels.experts.gather.gemm_kernels import down_kernel, finish_kernel, gate_up_kernel

        assert isinstance(rows, RankMajorRows)
        shape, tiles, index = self._shape, self._tiles, self._index
        first, second = rows.sets[0], rows.sets[-1]
        w1, w1_scale, w2, w2_bytes, w2_scale = self._copies[weights_copy % len(self._copies)]
        x = first.rows.view(self._element)
        x_delta = apart(first.rows, second.rows) // self._element.itemsize
        x_scale = first.scales.view(self._h_scale.dtype) if self._fp8 else self._h_scale
        epoch, num_rows = epoch_of(rows, index.schedule), rows.capacity_rows
        dependent = not interpreted()  # a kernel is brought up while the one before it ends
        launch: dict[str, Any] = {"launch_pdl": True} if dependent else {}
        same: dict[str, Any] = {
            "H": shape.hidden, "K": shape.top_k, "BLOCK_T": tiles.block_t, "PDL": dependent, **launch,
        }  # fmt: skip
        product = {
            **same, "I": shape.intermediate, "FP8": self._fp8, "BLOCK_K": self._block_k,
            "TWO_SETS": len(rows.sets) == 2,
        }  # fmt: skip
        index.fill(rows, pdl=dependent)
        on(gate_up_kernel, self._units)(
            w1, w1_scale, x, x_delta, x.stride(0), x_scale, apart(first.scales, second.scales) // 4, x_scale.stride(0),
            epoch, index.pairs, num_rows, index.schedule, index.expert_rows, index.expert_tile, index.tile,
            index.max_tiles, self._h, self._h_scale, self._gate_up_part, self._arrivals,
            POWER_OF_TWO=shape.power_of_two_scales, BLOCK_N=tiles.block_n, TALL=bool(tiles.tall),
            IN_TURN=bool(tiles.in_turn), LATE=bool(tiles.late), num_warps=tiles.warps, num_stages=tiles.stages,
            **_at_most(tiles.regs), **product,
        )  # fmt: skip
        on(down_kernel, self._sms * tiles.down_per_sm)(
            w2, w2_bytes, w2_scale, self._h_desc, self._h_scale, first.weights, apart(first.weights, second.weights),
            first.weights.stride(0), epoch, index.pairs, num_rows, index.schedule, index.expert_rows, index.tile,
            index.max_tiles, rows.out, rows.out.stride(0), self._down_part,
            PREFETCH=tiles.prefetch, BLOCK_N=tiles.down_block_n, TALL=bool(tiles.down_tall),
            num_warps=tiles.down_warps, num_stages=tiles.down_stages, **_at_most(tiles.down_regs), **product,
        )  # fmt: skip
        on(finish_kernel, self._sms * 4)(
            index.shared, index.place, index.expert_tile, index.schedule, num_rows, self._down_part, rows.out,
            rows.out.stride(0), index.max_tiles, BLOCK_N=1024, num_warps=4, **same,
        )  # fmt: skip

    def check(self) -> None:
        """Wait for the device, and see that everything had a place.

        Raises:
            DoesNotFit: a run had more selections than `max_selections` of the shape promised.
        """
        if dropped := self._index.dropped():
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
        buffers = (self._h, self._h_scale, self._gate_up_part, self._arrivals, self._down_part)
        return self._index.nbytes + sum(buffer.nbytes for buffer in buffers)

    def release(self) -> None:
        """Lets go of workspaces and weights."""
        self._copies = []
        del self._index, self._h_desc, self._h, self._h_scale, self._gate_up_part, self._arrivals, self._down_part


def _at_most(registers: int) -> dict[str, int]:
    """The launch option that bounds a thread's registers."""
    return {"maxnreg": registers} if registers else {}
