"""NCCL's expert-parallel library, low-latency algorithm: rows by source rank, the layout that TensorRT-LLM takes."""

from typing import TYPE_CHECKING, Any

from epcross.harness.backends import vendor
from epcross.harness.backends.base import ContractShape
from epcross.harness.backends.nccl_ep import NcclEP
from epcross.harness.point import Point

if TYPE_CHECKING:
    from torch import Tensor

LL_HIDDEN = 512
"""What rows of LL are a multiple of: two 16-byte vectors of each lane of a warp (asserted by device/ll_ep.cuh of 0.1.0,
which does not compile for others; with them the library's buffers need not begin at a multiple of 16 bytes either)."""

LL_WARPS = 32  # of a block
LL_GROUPS = 14
"""Most experts of a block of LL (kLlDispatchMaxWarpGroups)."""


class NcclEPLowLatency(NcclEP):
    """LL, rows by source rank; the layout that TensorRT-LLM takes."""

    name = "nccl_ep"
    algorithm, layout, landed_ids = "LOW_LATENCY", "RANK_MAJOR", "int32"
    bf16_multiple = LL_HIDDEN
    contract_shape = ContractShape(hidden=LL_HIDDEN, format_hidden=LL_HIDDEN)

    def limits(self, point: Point) -> list[str]:
        """See `NcclEP`. A block has a group of warps for each of its experts, and of all warps together one that
        controls and one for each choice of a token; of combine, one that fetches and one for each 512 values."""
        problems = []
        sms = max(1, self.most_sms(point) or vendor.LEAST_SMS)
        groups = -(-point.placement.num_slots // sms)
        if groups > LL_GROUPS:
            return [f"{self.name} takes {LL_GROUPS} experts for each of {sms} SMs, not {point.placement.num_slots}"]
        workers = LL_WARPS // groups * groups - 1
        if point.model.top_k > workers:
            problems.append(f"{self.name} takes top_k up to {workers}, not {point.model.top_k}")
        if point.model.hidden > workers * LL_HIDDEN:
            problems.append(f"{self.name} takes hidden up to {workers * LL_HIDDEN}, not {point.model.hidden}")
        return problems

    def landing_shape(self, point: Point) -> tuple[int, ...]:
        """See `NcclEP`."""
        return point.ep_size, self.room(point)

    def _landing_info(self) -> Any:
        kind = self._ep.ExpertIdKind.LOCAL
        return self._ep.LayoutInfo(src_rank_counters=self._counter, recv_topk_idx_kind=kind)

    def _arrived(self) -> "tuple[Tensor, Tensor | None]":
        import torch

        counts = self._counts.long()
        source = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        within = torch.arange(len(source), device=counts.device) - first[source]
        return source * self._most + within, source
