"""NCCL's expert-parallel library, throughput algorithm: rows in one sequence, which does not tell their source."""

from typing import TYPE_CHECKING, Any

from epcross.harness.backends.nccl_ep import NcclEP, stream
from epcross.harness.point import Point

if TYPE_CHECKING:
    from torch import Tensor

HT_TOKENS = 8192


class NcclEPHighThroughput(NcclEP):
    """HT, flat, worst-case receive tensors."""

    name = "nccl_ep_ht"
    algorithm, layout, landed_ids = "HIGH_THROUGHPUT", "FLAT", "int64"
    default_sms = 16  # NCCL_EP_HT_DFLT_NUM_SMS of nccl_ep/device/ht_ep_configs.cuh in nccl-extensions 0.1.0
    ordered = False  # it routes by a dense map, from which ids come back ascending and without gaps

    def limits(self, point: Point) -> list[str]:
        """See `NcclEP`."""
        if point.max_tokens_per_rank > HT_TOKENS:
            return [f"{self.name} takes {HT_TOKENS} tokens per rank, not {point.max_tokens_per_rank}"]
        return []

    def landing_shape(self, point: Point) -> tuple[int, ...]:
        """See `NcclEP`."""
        return (max(1, point.max_tokens_per_rank) * point.ep_size,)

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        super().combine(set_index)
        self._handle.complete(stream=stream())

    def _routing_info(self) -> Any:
        kind = self._ep.ExpertIdKind.LOCAL
        return self._ep.LayoutInfo(recv_total_counter=self._counter, recv_topk_idx_kind=kind)

    def _arrived(self) -> "tuple[Tensor, Tensor | None]":
        import torch

        return torch.arange(int(self._counts[0]), device=self._counts.device), None
