"""`all_to_all_single` with equal splits: every rank sends every other as many records as it may hold tokens, so that no
size depends on the routing, the host knows all of them beforehand, and the pair can be captured in a CUDA graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.collective import Collective, partial_bytes, record_bytes
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, GraphSupport

if TYPE_CHECKING:
    from torch import Tensor


class NcclAllToAllPadded(Collective):
    """Slot (source, token) of every rank's landing buffer is that token's, wanted or not; ids say which are."""

    name = "nccl_a2a_padded"
    boundary: ClassVar = vendor.boundaries(
        {Boundary.PACK, Boundary.TRANSFER}, {Boundary.LAYOUT, Boundary.TRANSFER, Boundary.REDUCE}
    )
    host_sync = False
    graph = GraphSupport.YES
    collectives = "all_to_all_single, equal splits"

    def workspace_bytes(self, point: Point) -> int:
        """Send and landing buffers of every token for every rank, both ways."""
        slots = max(1, point.max_tokens_per_rank) * point.ep_size
        return 2 * slots * (record_bytes(point) + partial_bytes(point))

    def allocate(self, sets: int) -> None:
        """See `Collective`."""
        shape = (self._ranks, self._capacity)
        width = partial_bytes(self._point)
        self._send, self._landed = self._bytes(*shape, self._record), self._bytes(*shape, self._record)
        self._partials = [self._bytes(*shape, width).fill_(0xFF) for _ in range(sets)]  # NaN where nobody stages
        self._returned = self._bytes(*shape, width)

    def buffers(self) -> "Sequence[Tensor]":
        """See `Collective`."""
        return self._send, self._landed, self._returned

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        import torch.distributed as dist

        records = self._records[set_index]
        self._send.copy_(records.expand_as(self._send))
        dist.all_to_all_single(self._landed, self._send, group=self._group)

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`."""
        vendor.synchronize()
        self._present = self.present(self._landed)
        source, _ = self._present
        return [self.received_records(self._landed[self._present], source)]

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`."""
        import torch

        self._partials[set_index].view(torch.bfloat16)[self._present] = partials[0]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        import torch
        import torch.distributed as dist

        dist.all_to_all_single(self._returned, self._partials[set_index], group=self._group)
        returned = self._returned.view(torch.bfloat16)
        wanted = self.wanted(set_index)
        total = torch.zeros(self._capacity, self._hidden, device=self._device)
        for rank in range(self._ranks):  # ascending; what was not asked for is not added, whatever it is
            total += torch.where(wanted[rank][:, None], returned[rank], 0).float()
        self._out[set_index].copy_(total)

    def protocol_bytes(self) -> int:
        """See `Collective`: records and partials of pairs that nobody wanted count here."""
        unwanted = self._ranks * self._capacity - self.pairs()
        point = self._point
        return round(unwanted * (record_bytes(point) + partial_bytes(point)))
