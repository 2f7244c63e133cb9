"""All-gather and reduce-scatter: every rank receives every token, and adds up what all ranks' experts made of it.

The default of vLLM (`allgather_reducescatter`). It moves `ep_size - 1` copies of each token whatever the routing, and
partials are added on the way, in bf16: a rank that holds none of a token's experts sends zeros.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Reduction
from epcross.harness.backends.collective import Collective, partial_bytes, record_bytes
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, GraphSupport

if TYPE_CHECKING:
    from torch import Tensor


class AllGatherReduceScatter(Collective):
    """Equal shares: a rank with fewer tokens than the capacity pads its own."""

    name = "ag_rs"
    boundary: ClassVar = vendor.boundaries({Boundary.TRANSFER}, {Boundary.TRANSFER, Boundary.REDUCE})
    host_sync = False
    graph = GraphSupport.YES
    reduction = Reduction(order="unordered", accumulate="bf16", exact=False)  # NCCL chooses how partial sums travel
    collectives = "all_gather_into_tensor, reduce_scatter_tensor"

    def workspace_bytes(self, point: Point) -> int:
        """Gathered records, and the partials that are scattered."""
        return max(1, point.max_tokens_per_rank) * point.ep_size * (record_bytes(point) + partial_bytes(point))

    def allocate(self, sets: int) -> None:
        """See `Collective`."""
        import torch

        shape = (self._ranks, self._capacity)
        self._landed = self._bytes(*shape, self._record)
        self._partials = [
            torch.zeros(*shape, self._hidden, dtype=torch.bfloat16, device=self._device) for _ in range(sets)
        ]

    def buffers(self) -> "Sequence[Tensor]":
        """See `Collective`."""
        return (self._landed,)

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        import torch.distributed as dist

        dist.all_gather_into_tensor(self._landed.flatten(0, 1), self._records[set_index], group=self._group)

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`."""
        vendor.synchronize()
        self._present = self.present(self._landed)
        source, _ = self._present
        return [self.received_records(self._landed[self._present], source)]

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. Each set has its own, as which of them are zero follows from the routing."""
        self._partials[set_index].zero_()
        self._partials[set_index][self._present] = partials[0]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        import torch.distributed as dist

        dist.reduce_scatter_tensor(self._out[set_index], self._partials[set_index].flatten(0, 1), group=self._group)

    def protocol_bytes(self) -> int:
        """See `Collective`: what crosses for pairs that nobody wanted counts here."""
        unwanted = self._ranks * self._capacity - self.pairs()
        return round(unwanted * (record_bytes(self._point) + partial_bytes(self._point)))
