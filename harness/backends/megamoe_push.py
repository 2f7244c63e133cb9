"""FlashInfer's BF16 layer on compute capability 9 that pushes rows: several kernels that only work together.

Its staging is its dispatch: rows go straight from the hidden states to the ranks of their experts, so that there is
nothing to leave out of the window.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Description
from epcross.harness.backends.fused_layer import FusedLayer
from epcross.harness.backends.layer import layer_boundaries
from epcross.harness.backends.megamoe_flashinfer import REMEDY
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary
from epcross.kernels.experts.formats import Arithmetic, WeightFormat
from epcross.kernels.experts.weights import WeightCopy
from epcross.kernels.formats import RowFormat

CONFIG = "Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig"
TOP_K = (1, 2, 4, 6, 8)


class MegaMoEPush(FusedLayer):
    """One `MoEEpLayer` for each copy of the weights."""

    name = "megamoe_push"
    formats = frozenset({(RowFormat.BF16, WeightFormat.BF16)})
    ids_type = "int32"
    _layers: "Sequence[Any]" = ()
    multiple = 256
    stages = frozenset()
    boundary = layer_boundaries(
        frozenset({Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER, Boundary.COPY_OUT}),
        frozenset({Boundary.TRANSFER, Boundary.REDUCE}),
        apart=False,
    )

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`staging`: see the module; only true."""
        return {"staging": True}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        return [] if options["staging"] else ["staging=false must be true: it stages by dispatching"]

    def unavailable(self) -> str | None:
        """Another GPU than one of compute capability 9, or no library with this kernel."""
        if reason := vendor.no_gpu((9, 0)) or vendor.no_module("flashinfer", REMEDY):
            return reason
        import torch

        if (found := torch.cuda.get_device_capability())[0] != 9:
            return f"its kernels are for compute capability 9 and this GPU has {found[0]}.{found[1]}"
        if reason := vendor.no_module("flashinfer.moe_ep", REMEDY):
            return reason
        from flashinfer import moe_ep  # type: ignore[import-not-found]

        return None if hasattr(moe_ep, CONFIG) else f"{vendor.version_of('flashinfer-python')} has no {CONFIG}"

    def limits(self, point: Point) -> list[str]:
        """What the kernels are written for."""
        found = []
        if point.model.top_k not in TOP_K:
            found.append(f"{self.name} takes top_k {', '.join(map(str, TOP_K))}, not {point.model.top_k}")
        if point.ep_size > 32:
            found.append(f"{self.name} takes at most 32 ranks, not {point.ep_size}")
        return found

    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """See `LayerBackend`. Up to 8 tokens of capacity each selection goes back weighted; above, a rank's sum."""
        return [Arithmetic(intermediate=RowFormat.BF16, output_rounded=rounded) for rounded in (False, True)]

    def make(self, torch_group: Any, buffers: int) -> None:
        """See `FusedLayer`."""
        self._torch_group, self._layers = torch_group, []

    def transformed(self, copy: WeightCopy) -> Any:
        """See `FusedLayer`: a layer of the library with these weights. Collective."""
        import torch
        from flashinfer import moe_ep  # type: ignore[import-not-found]

        point = self._point
        layer = moe_ep.MoEEpLayer(
            moe_ep.BootstrapConfig(
                world_size=point.ep_size,
                rank=self._rank,
                device=torch.cuda.current_device() if torch.cuda.is_available() else None,
                process_group=self._torch_group,
            ),
            moe_ep.FleetParams(
                num_experts=point.placement.num_slots,
                max_tokens_per_rank=max(1, point.max_tokens_per_rank),
                token_hidden_size=point.model.hidden,
            ),
            moe_ep.MoEWeightPack(copy.gate_up, copy.down),
            backend=moe_ep.MegaConfig(
                megakernel=getattr(moe_ep, CONFIG)(intermediate_size=point.model.intermediate, top_k=point.model.top_k)
            ),
        )
        self._layers = [*self._layers, layer]
        layer.warmup(self._tensors(0))
        return layer

    def _tensors(self, set_index: int) -> Any:
        from flashinfer import moe_ep  # type: ignore[import-not-found]

        inputs = self._inputs[set_index]
        return moe_ep.MoEEpTensors(
            hidden_states=inputs.hidden, topk_ids=inputs.ids, topk_weights=inputs.weights, output=inputs.out
        )

    def stage_set(self, set_index: int) -> None:
        """See `FusedLayer`."""
        self._weights[self._next_copy].stage_inputs(self._tensors(set_index))

    def compute_set(self, set_index: int, weights: Any) -> None:
        """See `FusedLayer`."""
        weights.compute_staged(output=self._inputs[set_index].out)

    def describe(self) -> Description:
        """See `Backend`."""
        import torch

        found = vendor.version_of("flashinfer-python")
        return Description(
            version=found,
            transport="nvlink, symmetric memory",
            algorithm="push, bf16",
            libraries={"flashinfer": found, "torch": torch.__version__, **vendor.loaded_nccl()},
        )

    def release(self) -> None:
        """See `FusedLayer`."""
        for layer in self._layers:
            layer.destroy()
        self._layers = []
