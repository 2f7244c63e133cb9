"""DeepGEMM's MegaMoE: dispatch, both products, activation and combine in one kernel over symmetric memory.

Which kernel follows from formats and GPU: fp8 x fp8 on compute capability 9 (of the rebuild `sgl-deep-gemm`), mxfp8 x
fp4 and bf16 x bf16 on 10. Weights are applied to the intermediate, before it is quantised; each selection's output goes
back in BF16, and the token's rank adds them.
"""

import sys
from collections.abc import Sequence
from typing import Any

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Description
from epcross.harness.backends.fused_layer import FusedLayer
from epcross.harness.backends.layer import layer_boundaries
from epcross.harness.point import Point
from epcross.harness.terms import Boundary
from epcross.kernels.experts.formats import Arithmetic, RowScaling, WeightFormat
from epcross.kernels.experts.weights import WeightCopy
from epcross.kernels.formats import RowFormat

REBUILDS = ("deep-gemm", "sgl-deep-gemm", "tokenspeed-deepgemm")
"""Names that the library, or a rebuild of its sources by others, is distributed under."""

REMEDY = "make env-deepgemm builds its environment"

_SM90 = (RowFormat.FP8, WeightFormat.FP8)
_SM100 = {(RowFormat.MXFP8, WeightFormat.FP4): "fp8xfp4", (RowFormat.BF16, WeightFormat.BF16): "bf16xbf16"}
_KERNELS = {RowFormat.FP8: "fp8_mega_moe", RowFormat.BF16: "bf16_mega_moe", RowFormat.MXFP8: "fp8_fp4_mega_moe"}


class MegaMoE(FusedLayer):
    """See the module."""

    name = "megamoe"
    formats = frozenset({_SM90, *_SM100})
    ids_type = "int32"  # staging widens them
    row_scaling = RowScaling.RECIPROCAL  # its impls/sm90_mega_moe_pre_dispatch.cuh; by powers of two all are the same
    boundary = layer_boundaries(
        frozenset({Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER}),
        frozenset({Boundary.TRANSFER, Boundary.REDUCE}),
        apart=False,
    )

    def unavailable(self) -> str | None:
        """No GPU that it has kernels for, or no library with them."""
        if reason := vendor.no_gpu((9, 0)) or vendor.no_module("deep_gemm", REMEDY):
            return reason
        import deep_gemm  # type: ignore[import-not-found]

        # the ring buffer came with bf16_mega_moe, and with it the calls that are made here
        needed = "fp8_mega_moe" if _capability() == 9 else "bf16_mega_moe"
        for name in ("get_symm_buffer_for_mega_moe", needed):
            if not hasattr(deep_gemm, name):
                return f"{vendor.version_of(*REBUILDS)} has no {name}; {REMEDY}"
        return None

    def limits(self, point: Point) -> list[str]:
        """The formats of the GPU at hand, once one is in use."""
        capability = _capability()
        if capability is None:
            return []
        sm90 = (point.dispatch_format, point.weight_format) == _SM90
        if sm90 != (capability == 9):
            known = f"{_SM90[0]} x {_SM90[1]}" if capability == 9 else "mxfp8 x fp4 and bf16 x bf16"
            return [f"{self.name} has {known} on compute capability {capability}"]
        return []

    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """See `LayerBackend`. On capability 9 a scale covers 64 or 128 values of the intermediate, by the tile that
        the library chooses. On 10 gate and up are rounded to bf16 first, and a scale covers 32 and is the least power
        of two with which none saturates (its impls/sm100_fp8_fp4_mega_moe.cuh and sm100_bf16_mega_moe.cuh)."""
        common: dict[str, Any] = {"weight_first": True, "output_rounded": True}
        if point.dispatch_format is RowFormat.FP8:
            return [Arithmetic(intermediate=RowFormat.FP8, scale_block=block, **common) for block in (64, 128)]
        common["gate_up_rounded"] = True
        if point.dispatch_format is RowFormat.BF16:
            return [Arithmetic(intermediate=RowFormat.BF16, **common)]
        return [Arithmetic(intermediate=RowFormat.FP8, scale_block=32, power_of_two_scales=True, **common)]

    def make(self, torch_group: Any, buffers: int) -> None:
        """See `FusedLayer`."""
        import deep_gemm  # type: ignore[import-not-found]

        point = self._point
        formats = (point.dispatch_format, point.weight_format)
        assert point.weight_format is not None
        mma = {} if formats == _SM90 else {"mma_type": _SM100[point.dispatch_format, point.weight_format]}
        self._buffers = [
            deep_gemm.get_symm_buffer_for_mega_moe(
                torch_group,
                point.placement.num_slots,
                max(1, point.max_tokens_per_rank),
                point.model.top_k,
                point.model.hidden,
                point.model.intermediate,
                **mma,
            )
            for _ in range(buffers)
        ]

    def transformed(self, copy: WeightCopy) -> Any:
        """See `FusedLayer`."""
        import deep_gemm  # type: ignore[import-not-found]
        import torch

        if self._point.dispatch_format is RowFormat.FP8:
            first, second = (copy.gate_up, copy.gate_up_scales), (copy.down, copy.down_scales)
            return deep_gemm.transform_weights_for_mega_moe_sm90(first, second)
        if self._point.dispatch_format is RowFormat.BF16:
            return deep_gemm.transform_weights_for_mega_moe(copy.gate_up, copy.down)
        return deep_gemm.transform_weights_for_mega_moe(
            *(
                (
                    values.view(torch.int8),
                    _packed_scales(deep_gemm, scales, values.shape[1], 2 * values.shape[2]),
                )
                for values, scales in ((copy.gate_up, copy.gate_up_scales), (copy.down, copy.down_scales))
            )
        )

    def stage_set(self, set_index: int) -> None:
        """See `FusedLayer`. The library's own kernel quantises and copies; BF16 is copied."""
        import deep_gemm  # type: ignore[import-not-found]

        inputs, buffer = self._inputs[set_index], self._buffers[self.buffer_of(set_index)]
        tokens = len(inputs.hidden)
        given = (inputs.hidden, inputs.ids, inputs.weights)
        if self._point.dispatch_format is RowFormat.BF16:
            buffer.x[:tokens].copy_(inputs.hidden)
            buffer.topk_idx[:tokens].copy_(inputs.ids)
            buffer.topk_weights[:tokens].copy_(inputs.weights)
            return
        into = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        if self._point.dispatch_format is RowFormat.FP8:
            deep_gemm.mega_moe_pre_dispatch_sm90(*given, *into, num_tokens=tokens, group_size=128)
        else:
            deep_gemm.mega_moe_pre_dispatch(*given, *into, num_tokens=tokens, group_size=32)

    def compute_set(self, set_index: int, weights: Any) -> None:
        """See `FusedLayer`."""
        import deep_gemm  # type: ignore[import-not-found]

        first, second = weights
        run = getattr(deep_gemm, _KERNELS[self._point.dispatch_format])
        run(self._inputs[set_index].out, first, second, self._buffers[self.buffer_of(set_index)])

    def describe(self) -> Description:
        """See `Backend`."""
        import torch

        return Description(
            version=vendor.version_of(*REBUILDS),
            transport="nvlink, symmetric memory",
            algorithm=f"one kernel, {self._point.dispatch_format} x {self._point.weight_format}",
            workspace_bytes=sum(buffer.buffer.numel() for buffer in self._buffers),
            libraries={"deep_gemm": vendor.version_of(*REBUILDS), "torch": torch.__version__, **vendor.loaded_nccl()},
        )

    def release(self) -> None:
        """See `FusedLayer`."""
        for buffer in self._buffers:
            buffer.destroy()
        self._buffers = []


def _packed_scales(deep_gemm: Any, scales: Any, rows: int, columns: int) -> Any:
    """e8m0 bytes [E, rows, columns / 32] in the layout that the library's kernels read."""
    import torch

    values = torch.exp2(scales.float() - 127)
    return deep_gemm.transform_sf_into_required_layout(values, rows, columns, (1, 32), len(scales))


def _capability() -> int | None:
    """Major compute capability of the GPU in use; None where none is."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_capability()[0]
