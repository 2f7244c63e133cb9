"""What the adapters of FlashInfer share: `flashinfer.moe_ep` of 0.7.4, whose backends have one interface.

Rows lie by source, `tokens` of them for each, in an order that the library does not promise, and carry ids and weights
but not their token: the adapter finds that by the row's contents, outside the window. Experts apply weights.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Group, Reduction, Shard
from epcross.harness.backends.device_inputs import DeviceInputs, device_inputs
from epcross.harness.backends.gpu import DeviceReceived, GpuBackend
from epcross.harness.backends.landing import as_identified, local_ids
from epcross.harness.point import Point
from epcross.harness.terms import Domain, GraphSupport, RowFormat
from epcross.kernels.extras import Extra

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = Extra.FLASHINFER.install
MAX_RANKS = 64
FORMATS = {RowFormat.BF16: 8, RowFormat.FP8: 128, RowFormat.MXFP8: 32, RowFormat.NVFP4: 32}
"""Row formats, and what rows must be a multiple of."""

_FORMAT_NAMES = {RowFormat.FP8: "DeepSeekFp8", RowFormat.MXFP8: "MXFP8", RowFormat.NVFP4: "NVFP4"}
_INVALID = -1
_DISPATCH_TAKES = (
    *("hidden_states", "topk_ids", "topk_weights", "hidden_states_scale", "runtime_max_tokens_per_rank"),
)


class FlashInfer(GpuBackend):
    """One communication object for a point."""

    domains = frozenset({Domain.NVLINK, Domain.SHARED_GPU})
    host_sync = False
    graph = GraphSupport.YES
    reduction = Reduction(order="unordered", accumulate="fp32", exact=False)
    stable_order = False
    library: ClassVar[str]  # the class of `flashinfer.moe_ep` behind the adapter
    least_capability: ClassVar[tuple[int, int]] = (9, 0)

    _communication: Any = None

    def unavailable(self) -> str | None:
        """No GPU, no library, one whose interface is another, or a GPU that the library does not take."""
        if reason := vendor.no_gpu(self.least_capability) or vendor.no_module("flashinfer", REMEDY):
            return reason
        module = "flashinfer.moe_ep.core.comm.communication"
        found = vendor.version_of("flashinfer-python")
        if reason := vendor.no_module(module, f"{found} has not the interface of 0.7.4; {REMEDY}"):
            return reason
        from flashinfer import moe_ep  # type: ignore[import-not-found]

        made = getattr(moe_ep, self.library, None)
        if made is None:
            return f"{found} has no {self.library}; {REMEDY}"
        return (
            vendor.lacks(f"{self.library}.dispatch", made.dispatch, *_DISPATCH_TAKES) or self.differs() or _no_nvlink()
        )

    @abstractmethod
    def differs(self) -> str | None:
        """How the installed version's configuration differs from what the adapter sets; None if it does not."""

    @abstractmethod
    def configuration(self) -> Any:
        """What `create_communication` chooses the backend by."""

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `GpuBackend`."""
        import torch
        from flashinfer.moe_ep.config import BootstrapConfig  # type: ignore[import-not-found]
        from flashinfer.moe_ep.core.comm.communication import (  # type: ignore[import-not-found]
            MoEEpCommParams,
            create_communication,
        )

        (shard,) = shards
        self._point, self._rank, self._group = point, shard.rank, group
        self._tokens, self._device = point.tokens[shard.rank], vendor.device()
        self._most = max(1, *point.tokens)  # of this step on any rank, the same on all
        dropped = self.dropped_id(point)
        self._inputs: list[DeviceInputs] = device_inputs(point, shard, self._device, torch.int32, dropped)
        self._out = [
            torch.zeros(self._tokens, point.model.hidden, dtype=torch.bfloat16, device=self._device)
            for _ in self._inputs
        ]
        bootstrap = BootstrapConfig(
            world_size=point.ep_size,
            rank=shard.rank,
            device=torch.cuda.current_device() if torch.cuda.is_available() else None,
            process_group=vendor.torch_group(group, "gloo"),
        )
        params = MoEEpCommParams(
            num_experts=point.placement.num_slots,
            top_k=point.model.top_k,
            max_tokens_per_rank=max(1, point.max_tokens_per_rank),
            hidden_size=point.model.hidden,
            dtype=torch.bfloat16,
            dispatch_format=_quant_format(point.dispatch_format),
            invalid_expert_id=_INVALID,
        )
        self._communication = create_communication(bootstrap, params, self.configuration())
        vendor.synchronize()

    def dropped_id(self, point: Point) -> int:
        """The id of a selection that goes nowhere."""
        return _INVALID

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `GpuBackend`."""
        (batch,) = batches
        self._inputs[set_index].refill(batch)

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        inputs = self._inputs[set_index]
        self._landed = self._communication.dispatch(
            inputs.values,
            inputs.ids,
            inputs.weights,
            hidden_states_scale=inputs.factors,
            runtime_max_tokens_per_rank=self._most,
        )

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. Collective: who sent what is asked of the ranks."""
        vendor.synchronize()
        landed, point = self._landed, self._point
        self._at = (local_ids(point, self._rank, landed.topk_ids) >= 0).any(dim=1).nonzero()[:, 0]
        source = self.sources(landed.tokens_per_rank)
        ids, weights = landed.topk_ids[self._at], landed.topk_weights[self._at]
        rows = landed.hidden_states[self._at]
        scales = None if landed.hidden_states_scale is None else landed.hidden_states_scale[self._at]
        inputs = self._inputs[set_index]
        return [
            as_identified(
                point,
                self._rank,
                self._group,
                inputs,
                source=source,
                ids=ids,
                weights=weights,
                rows=rows,
                scales=scales,
            )
        ]

    def sources(self, tokens_per_rank: int) -> "Tensor | None":
        """Who sent the rows at `self._at`, [N]; None where the place of a row does not tell."""
        return self._at.div(tokens_per_rank, rounding_mode="floor")

    def combined_ranks(self, set_index: int) -> "list[Tensor]":
        """See `GpuBackend`."""
        vendor.synchronize()
        return [self._out[set_index]]

    def poison(self) -> None:
        """See `Backend`."""
        for out in self._out:
            out.fill_(float("nan"))

    def libraries(self) -> dict[str, str]:
        """Versions as loaded."""
        import torch

        found = vendor.version_of("flashinfer-python")
        return {"flashinfer": found, "torch": torch.__version__, **vendor.loaded_nccl()}

    def close(self) -> None:
        """See `Backend`. All ranks have combined before any lets its memory go."""
        communication, self._communication = self._communication, None
        if communication is not None:
            vendor.synchronize()
            self._group.barrier()
            communication.destroy()


def _no_nvlink() -> str | None:
    """Why the library does not take this GPU, by its own test, which it makes where ranks share a GPU as well."""
    from flashinfer.comm.mnnvl import MnnvlMemory  # type: ignore[import-not-found]

    try:
        taken = MnnvlMemory.supports_mnnvl()
    except Exception as error:  # NVML's own, or torch's
        return f"FlashInfer cannot ask for this GPU's NVLinks: {type(error).__name__}: {error}"
    if taken:
        return None
    return (
        "FlashInfer takes GPUs whose NVLinks are all up, also for ranks that share one; this GPU has none that reach"
        " another, or some are down: nvidia-smi nvlink --status"
    )


def _quant_format(row_format: RowFormat) -> Any:
    """The library's word for a row format; None is unquantised."""
    if row_format is RowFormat.BF16:
        return None
    from flashinfer.fused_moe.api import QuantFormat  # type: ignore[import-not-found]

    return getattr(QuantFormat, _FORMAT_NAMES[row_format])
