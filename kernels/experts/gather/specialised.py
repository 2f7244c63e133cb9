"""`gather_gemm`'s products in warps that each do one thing (warp specialisation): where they can be had, their launch.

They are fp8's alone, in tiles of 128 pairs, for Hopper: the groups that multiply use its tensor cores' instructions.
"""

from typing import TYPE_CHECKING, Any

from epcross.kernels.experts.capability import major_capability
from epcross.kernels.experts.formats import ExpertShape
from epcross.kernels.experts.gather.index import PairIndex, interpreted, on

if TYPE_CHECKING:
    import torch

HALF, BLOCK, STAGES = 64, 128, 4
"""Pairs of a group's half of a tile; columns of a block of weights, and values of a step; steps whose operands shared
memory holds: 48 KB each, beside 16 to 32 for what leaves."""


def specialised_missing() -> str | None:
    """Why they cannot be had here, or None; None as well where there is no GPU to ask, as where a plan is made."""
    if interpreted():
        return "Triton's interpreter knows no Gluon"
    if (major := major_capability()) not in (None, 9):
        return f"they are for compute capability 9, and this GPU has {major}"
    try:
        from triton.experimental.gluon import language
    except ImportError:
        return "this Triton has no Gluon: install 3.6"
    if not hasattr(language, "thread_barrier"):
        return "the Gluon of this Triton is not that of 3.6: install that"
    return None


def bulk_blocks(tensor: "torch.Tensor", rows: int) -> Any:
    """What a bulk copy of `rows` by 128 values of a matrix is told, in the layout that tensor cores read."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize, rank=2)
    return TensorDescriptor.from_tensor(tensor, [rows, BLOCK], layout)


class SpecialisedProducts:
    """Both products, over workspaces that outlive them."""

    def __init__(
        self, shape: ExpertShape, index: PairIndex, *, h: "torch.Tensor", h_scale: "torch.Tensor",
        sum_parts: "torch.Tensor", arrivals: "torch.Tensor", row_parts: "torch.Tensor", programs: int,
    ) -> None:  # fmt: skip
        """Describe the workspaces to the copy engine.

        Args:
            shape: of the experts.
            index: of 128 pairs a tile.
            h: e4m3 [places, intermediate], what GEMM1 makes.
            h_scale: fp32 [intermediate / 128, places].
            sum_parts: fp32, at least [parts, 2, 128, 128]: GEMM1's sums that several programs share.
            arrivals: int32, two for each of those; 0, and 0 again after each run.
            row_parts: bf16 [places, hidden], of pairs whose row has others here.
            programs: of each kernel, one for each multiprocessor.
        """
        self._shape, self._index, self._programs = shape, index, programs
        self._h_scale, self._sum_parts, self._arrivals = h_scale, sum_parts, arrivals
        self._h, self._h_out, self._rows_out = bulk_blocks(h, BLOCK), bulk_blocks(h, HALF), bulk_blocks(row_parts, HALF)

    def launch(
        self, gate_up: Any, gate_up_scale: Any, down: Any, down_scale: Any, x: Any, x_delta: int, x_scale: Any,
        x_scale_delta: int, weights: Any, weights_delta: int, epoch: Any, out: Any, *, num_rows: int, two_sets: bool,
    ) -> None:  # fmt: skip
        """Enqueue both kernels; arguments as `gate_up_kernel` and `down_kernel` have them, matrices of weights by
        `bulk_blocks`."""
        from epcross.kernels.experts.gather.specialised_down_kernels import down_specialised_kernel
        from epcross.kernels.experts.gather.specialised_kernels import gate_up_specialised_kernel

        index, shape = self._index, self._shape
        same: dict[str, Any] = {
            "H": shape.hidden, "I": shape.intermediate, "K": shape.top_k, "STAGES": STAGES, "TWO_SETS": two_sets,
            "PDL": True, "launch_pdl": True, "num_warps": 4,
        }  # fmt: skip
        on(gate_up_specialised_kernel, self._programs)(
            gate_up, gate_up_scale, x, x_delta, x.stride(0), x_scale, x_scale_delta, x_scale.stride(0), epoch,
            index.pairs, num_rows, index.schedule, index.tile, index.max_tiles, self._h_out, self._h_scale,
            self._sum_parts, self._arrivals, POWER_OF_TWO=shape.power_of_two_scales, **same,
        )  # fmt: skip
        on(down_specialised_kernel, self._programs)(
            down, down_scale, self._h, self._h_scale, weights, weights_delta, weights.stride(0), epoch, index.pairs,
            num_rows, index.schedule, index.tile, index.max_tiles, out, out.stride(0), self._rows_out, **same,
        )  # fmt: skip
