"""FlashInfer's fused layers on compute capability 9: FP4 weights with fp8 activations, in one kernel.

The library takes codes in Marlin's order and scales in the range that its decoder has; what lies outside goes into one
factor for each expert. All of that is moving bits and adding exponents: the weights stay what they are.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Description
from epcross.harness.backends.fused_layer import FusedLayer
from epcross.harness.backends.layer import layer_boundaries
from epcross.harness.errors import EpcrossError
from epcross.harness.point import Point
from epcross.harness.terms import Boundary
from epcross.kernels.experts.formats import FP8_BLOCK, Arithmetic, WeightFormat
from epcross.kernels.experts.quantise import quantise_rows
from epcross.kernels.experts.weights import WeightCopy
from epcross.kernels.extras import Extra
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = Extra.FLASHINFER.install
NO_CLAMP = 65504.0
"""The library clamps gate and up; at this value nothing is."""

_LOWEST, _HIGHEST = 122, 133  # e8m0 of 2**-5 and 2**6: the scales that its decoder has


class Transformed(NamedTuple):
    """Both matrices in the library's layout, and a factor for each expert."""

    first: Any
    second: Any
    first_factor: Any
    second_factor: Any


class MegaMoEMxfp4(FusedLayer):
    """`mxfp4_mega_moe`: weights in e2m1 with an e8m0 scale for each 32."""

    name = "megamoe_mxfp4"
    formats = frozenset({(RowFormat.FP8, WeightFormat.FP4)})
    multiple = 256
    kernel = "mxfp4"
    boundary = layer_boundaries(
        frozenset({Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER}),
        frozenset({Boundary.TRANSFER, Boundary.REDUCE}),
        apart=False,
    )

    def unavailable(self) -> str | None:
        """Another GPU than one of compute capability 9, or no library with these kernels."""
        if reason := vendor.no_gpu((9, 0)):
            return reason
        import torch

        if (found := torch.cuda.get_device_capability())[0] != 9:
            return f"its kernels are for compute capability 9 and this GPU has {found[0]}.{found[1]}"
        return vendor.no_module("flashinfer", REMEDY) or vendor.no_module("flashinfer.megamoe", REMEDY)

    def limits(self, point: Point) -> list[str]:
        """Ranks that the kernel is written for."""
        ranks = point.ep_size
        if ranks > 32 or ranks & (ranks - 1):
            return [f"{self.name} takes a power of two of ranks up to 32, not {ranks}"]
        return []

    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """See `LayerBackend`. A scale covers 64 or 128 values of the intermediate, by the tile that is chosen."""
        return [
            Arithmetic(
                intermediate=RowFormat.FP8,
                scale_block=block,
                power_of_two_scales=True,
                weight_first=True,
                output_rounded=True,
            )
            for block in (128, 64)
        ]

    def make(self, torch_group: Any, buffers: int) -> None:
        """See `FusedLayer`."""
        import torch
        from flashinfer.megamoe import MegaMoESymmBuffer  # type: ignore[import-not-found]

        point = self._point
        self._buffers = [
            MegaMoESymmBuffer(
                torch_group,
                point.placement.num_slots,
                max(1, point.max_tokens_per_rank),
                point.model.top_k,
                point.model.hidden,
                point.model.intermediate,
                activation_clamp=NO_CLAMP,
            )
            for _ in range(buffers)
        ]
        tokens, hidden = point.tokens[self._rank], point.model.hidden
        self._rows = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn, device=self._device)
        self._scales = torch.zeros(tokens, hidden // FP8_BLOCK, dtype=torch.float32, device=self._device)

    def transformed(self, copy: WeightCopy) -> Transformed:
        """See `FusedLayer`."""
        from flashinfer import megamoe  # type: ignore[import-not-found]

        assert copy.gate_up_scales is not None
        assert copy.down_scales is not None
        first, first_factor = _in_range(copy.gate_up_scales)
        second, second_factor = _in_range(copy.down_scales)
        transform = getattr(megamoe, f"transform_{self.kernel}_weights_for_mega_moe")
        packed, again = transform(
            (marlin(copy.gate_up), self.library_scales(first)), (marlin(copy.down), self.library_scales(second))
        )
        return Transformed(first=packed, second=again, first_factor=first_factor, second_factor=second_factor)

    def library_scales(self, scales: "Tensor") -> "Tensor":
        """e8m0 bytes of 32 values, as the kernel takes scales."""
        return scales

    def stage_set(self, set_index: int) -> None:
        """See `FusedLayer`. Quantised by the same kernel as other layers' rows, then the library's own copies."""
        inputs = self._inputs[set_index]
        quantise_rows(inputs.hidden, self._rows, self._scales)
        buffer = self._buffers[self.buffer_of(set_index)]
        buffer.stage(self._rows, self._scales, inputs.ids, inputs.weights)

    def compute_set(self, set_index: int, weights: Transformed) -> None:
        """See `FusedLayer`."""
        from flashinfer import megamoe  # type: ignore[import-not-found]

        out = self._inputs[set_index].out
        getattr(megamoe, f"{self.kernel}_mega_moe")(
            out,
            weights.first,
            weights.second,
            self._buffers[self.buffer_of(set_index)],
            len(out),
            l1_global_scales=weights.first_factor,
            l2_global_scales=weights.second_factor,
        )

    def describe(self) -> Description:
        """See `Backend`."""
        import torch

        found = vendor.version_of("flashinfer-python")
        return Description(
            version=found,
            transport="nvlink, symmetric memory",
            algorithm=f"{self.kernel}, one kernel",
            workspace_bytes=sum(buffer.buffer.numel() for buffer in self._buffers),
            libraries={"flashinfer": found, "torch": torch.__version__, **vendor.loaded_nccl()},
        )

    def release(self) -> None:
        """See `FusedLayer`."""
        for buffer in self._buffers:
            buffer.destroy()
        self._buffers = []


class MegaMoENvfp4(MegaMoEMxfp4):
    """`nvfp4_mega_moe`, given the same weights: a scale of 32 values twice, as e4m3, which has all powers needed."""

    name = "megamoe_nvfp4"
    kernel = "nvfp4"

    def limits(self, point: Point) -> list[str]:
        """See `MegaMoEMxfp4`."""
        return [] if point.ep_size in (4, 8) else [f"{self.name} takes 4 or 8 ranks, not {point.ep_size}"]

    def library_scales(self, scales: "Tensor") -> "Tensor":
        """e4m3 bytes of 16 values: 2**(e - 7), from 2**-5 to 2**6."""
        return ((scales - 127 + 7) << 3).repeat_interleave(2, dim=-1)


def marlin(packed: "Tensor") -> "Tensor":
    """Codes with value 2 i in the low bits of byte i, in the order that the kernels take: of each four bytes, byte b
    has value b in its high bits and value b + 4 in its low ones."""
    import torch

    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).unflatten(-1, (-1, 8))
    return (codes[..., :4] << 4 | codes[..., 4:]).flatten(-2).contiguous()


def _in_range(scales: "Tensor") -> "tuple[Tensor, Tensor]":
    """e8m0 bytes that the decoder has, and the factor [E] by which an expert's values are then too small.

    Raises:
        EpcrossError: the scales of an expert lie further apart than the decoder reaches.
    """
    import torch

    lowest = scales.flatten(1).amin(dim=1).int()
    highest = scales.flatten(1).amax(dim=1).int()
    reach = _HIGHEST - _LOWEST
    if bool((highest - lowest > reach).any()):
        raise EpcrossError(
            f"scales of an expert are more than 2**{reach} apart, which FlashInfer's kernel cannot decode"
        )
    shifted = scales.int() - (lowest - _LOWEST)[:, None, None]
    return shifted.to(torch.uint8), torch.exp2((lowest - _LOWEST).float())
