"""NCCL's expert-parallel library, throughput algorithm: rows in one sequence, which does not tell their source."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from epcross.harness.backends.base import ContractShape, Description
from epcross.harness.backends.nccl_ep import NcclEP, stream
from epcross.harness.point import Point

if TYPE_CHECKING:
    from torch import Tensor

HT_TOKENS = 8192
HT_EXPERTS = 4
"""What the experts of a host are a multiple of: a token's probabilities travel in units of 16 bytes."""

MAP_UNIT = 4
"""What ranks times room for tokens are a multiple of: integers in 16 bytes."""


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
        """See `NcclEP`. A row of the map that says where tokens go has an int32 for each rank of the domain, and is
        fetched as many rows at once as there is room for, in units of 16 bytes: dispatch aborts the process where the
        whole map is none of those (dispatch_impl of device/ht_ep_adapter.cu, asserted of max_dispatch_tokens_per_rank
        and not of the tokens that a step has). So up to 3 tokens more are told, and none is sent."""
        step = MAP_UNIT // math.gcd(MAP_UNIT, point.ep_size)
        return -(-super().room(point) // step) * step

    def describe(self) -> Description:
        """See `Backend`. Room that no token of the point can fill is told."""
        found = super().describe()
        if self._most == super().room(self._point):
            return found
        return replace(found, algorithm=f"{found.algorithm}, room for {self._most} tokens per rank")

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
