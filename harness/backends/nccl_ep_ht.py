"""NCCL's expert-parallel library, throughput algorithm: rows in one sequence, which does not tell their source."""

import math
from typing import TYPE_CHECKING, Any

from epcross.harness.backends.base import ContractShape
from epcross.harness.backends.nccl_ep import NcclEP, stream
from epcross.harness.point import Point

if TYPE_CHECKING:
    from torch import Tensor

HT_TOKENS = 8192
HT_EXPERTS = 4
"""What the experts of a host are a multiple of: a token's probabilities travel in units of 16 bytes."""

_MAP_UNIT_BYTES = 16


class NcclEPHighThroughput(NcclEP):
    """HT, flat, worst-case receive tensors."""

    name = "nccl_ep_ht"
    algorithm, layout, landed_ids = "HIGH_THROUGHPUT", "FLAT", "int64"
    bf16_multiple = 8
    contract_shape = ContractShape(format_hidden=512, slots_multiple=HT_EXPERTS)
    default_sms = 16  # NCCL_EP_HT_DFLT_NUM_SMS of nccl_ep/device/ht_ep_configs.cuh in nccl-extensions 0.1.0
    ordered = False  # it routes by a dense map, from which ids come back ascending and without gaps

    def limits(self, point: Point) -> list[str]:
        """See `NcclEP`."""
        problems = []
        if point.max_tokens_per_rank > HT_TOKENS:
            problems.append(f"{self.name} takes {HT_TOKENS} tokens per rank, not {point.max_tokens_per_rank}")
        if point.placement.num_slots % HT_EXPERTS:
            problems.append(f"{self.name} takes a multiple of {HT_EXPERTS} experts, not {point.placement.num_slots}")
        return problems

    def room(self, point: Point) -> int:
        """See `NcclEP`. Ranks gather each other's routing as bitmaps, a row of whole bytes for each token. Where a
        rank's bitmap was an odd number of bytes, dispatch aborted (0.1.0, 8 experts, capacities 1, 5 and 19, not 6 and
        10): it is made whole units of 16 bytes, as with 128 or 256 experts any capacity makes it."""
        row_bytes = -(-point.placement.num_slots // 8)
        step = _MAP_UNIT_BYTES // math.gcd(_MAP_UNIT_BYTES, row_bytes)
        return -(-super().room(point) // step) * step

    def landing_shape(self, point: Point) -> tuple[int, ...]:
        """See `NcclEP`."""
        return (self.room(point) * point.ep_size,)

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
