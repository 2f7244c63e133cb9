"""Grouped GEMMs that read rank-major rows in place, in Triton (gather/): the host side."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.kernels.errors import DoesNotFit
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather.index import PairIndex, apart, epoch_of, interpreted, on, triton_missing
from epcross.kernels.experts.gather.specialised import SpecialisedProducts, bulk_blocks, specialised_missing
from epcross.kernels.experts.gather.tiles import ALLOWED, Tiles, chosen_tiles, tile_problem
from epcross.kernels.experts.rows import ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import ExpertWeights
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_PAIRS = {(RowFormat.BF16, WeightFormat.BF16), (RowFormat.FP8, WeightFormat.FP8)}


class GatherGemm(ExpertCompute):
    """bf16 rows and weights, or fp8 rows and weights; rank-major."""

    name: ClassVar[str] = "gather_gemm"

    def __init__(
        self, block_t: int = 0, block_n: int = 0, stages: int = 0, warps: int = 0, per_sm: int = 0,
        down_block_n: int = 0, down_stages: int = 0, down_warps: int = 0, down_per_sm: int = 0,
        prefetch: int = 0, balance: int = 0, regs: int = 0, down_regs: int = 0, tall: int = 0, in_turn: int = 0,
        down_tall: int = 0, late: int = 0, alone: int = 0, down_pair: int = 0, ahead: int = 0,
        finish_per_sm: int = 0, finish_block_n: int = 0, rounded: int = 0, early: int = 0, specialised: int = 0,
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
        if found := tile_problem(shape, self._asked):
            return found
        if self._asked.get("specialised") and (found := specialised_missing()):
            return f"specialised=1 cannot be had: {found}; leave it out"
        if shape.capacity_rows * max(shape.top_k, shape.num_local_experts, shape.hidden // 2) >= 1 << 31:
            return f"capacity_rows={shape.capacity_rows} is more than its 32-bit index holds"
        return None

    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Rounds the intermediate and the weighted sum; with `rounded` the weighted output of each expert, too, and
        nothing else."""
        return Arithmetic(
            intermediate=shape.row_format,
            power_of_two_scales=shape.power_of_two_scales,
            output_rounded=bool(self._chosen(shape).rounded),
        )

    def _chosen(self, shape: ExpertShape) -> Tiles:
        return chosen_tiles(shape, self._asked, specialised=specialised_missing() is None)

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
        self._arrivals = torch.zeros(4 * self._units, dtype=torch.int32, device=device)
        kept = torch.bfloat16 if tiles.rounded else torch.float32
        self._down_part = torch.empty((places, hidden), dtype=kept, device=device)

        def described(tensor: "torch.Tensor", block_rows: int) -> Any:
            if tiles.specialised:
                return bulk_blocks(tensor, block_rows)
            return TensorDescriptor.from_tensor(tensor, [block_rows, width])

        self._h_desc = described(self._h, tiles.block_t)
        self._specialised = (
            SpecialisedProducts(
                shape, self._index, h=self._h, h_scale=self._h_scale, sum_parts=self._gate_up_part,
                arrivals=self._arrivals, row_parts=self._down_part, programs=self._sms,
            )
            if tiles.specialised
            else None
        )  # fmt: skip
        self._copies = [
            (
                described(copy.gate_up.view(experts * 2 * inter, hidden), tiles.block_n),
                copy.gate_up.view(torch.uint8),
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
        w1, w1_bytes, w1_scale, w2, w2_bytes, w2_scale = self._copies[weights_copy % len(self._copies)]
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
        index.fill(rows, pdl=dependent, early=dependent and bool(tiles.early))
        if self._specialised is not None:
            self._specialised.launch(
                w1, w1_scale, w2, w2_scale, x, x_delta, x_scale, apart(first.scales, second.scales) // 4,
                first.weights, apart(first.weights, second.weights), epoch, rows.out, num_rows=num_rows,
                two_sets=len(rows.sets) == 2,
            )  # fmt: skip
        else:
            on(gate_up_kernel, self._units)(
                w1, w1_bytes, w1_scale, x, x_delta, x.stride(0), x_scale, apart(first.scales, second.scales) // 4,
                x_scale.stride(0), epoch, index.pairs, num_rows, index.schedule, index.tile, index.max_tiles, self._h,
                self._h_scale, self._gate_up_part, self._arrivals,
                POWER_OF_TWO=shape.power_of_two_scales, BLOCK_N=tiles.block_n, TALL=bool(tiles.tall),
                IN_TURN=bool(tiles.in_turn), LATE=bool(tiles.late), ALONE=bool(tiles.alone), AHEAD=tiles.ahead,
                # both for AHEAD alone: without it one compiled kernel serves any number of experts
                BALANCE=tiles.balance if tiles.ahead else 0, E=shape.num_local_experts if tiles.ahead else 0,
                num_warps=tiles.warps, num_stages=tiles.stages, **_at_most(tiles.regs), **product,
            )  # fmt: skip
            on(down_kernel, self._sms * tiles.down_per_sm)(
                w2, w2_bytes, w2_scale, self._h_desc, self._h_scale, first.weights,
                apart(first.weights, second.weights), first.weights.stride(0), epoch, index.pairs, num_rows,
                index.schedule, index.expert_rows, index.tile, index.max_tiles, rows.out, rows.out.stride(0),
                self._down_part,
                PREFETCH=tiles.prefetch, BLOCK_N=tiles.down_block_n, TALL=bool(tiles.down_tall),
                PAIR=bool(tiles.down_pair), num_warps=tiles.down_warps, num_stages=tiles.down_stages,
                **_at_most(tiles.down_regs), **product,
            )  # fmt: skip
        on(finish_kernel, self._sms * tiles.finish_per_sm)(
            index.shared, index.place, index.expert_tile, index.schedule, num_rows, self._down_part, rows.out,
            rows.out.stride(0), index.max_tiles, BLOCK_N=tiles.finish_block_n,
            num_warps=4 if tiles.finish_block_n < 4096 else 8, **same,
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
        form = "_specialised" if self._tiles.specialised else ""
        names = ("index_kernel", f"gate_up{form}_kernel", f"down{form}_kernel", "finish_kernel")
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
        del (
            self._index,
            self._specialised,
            self._h_desc,
            self._h,
            self._h_scale,
            self._gate_up_part,
            self._arrivals,
            self._down_part,
        )


def _at_most(registers: int) -> dict[str, int]:
    """The launch option that bounds a thread's registers."""
    return {"maxnreg": registers} if registers else {}
