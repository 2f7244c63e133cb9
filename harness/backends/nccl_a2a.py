"""`all_to_all_single` with real split sizes: only what is wanted crosses, and the host must know how much that is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.collective import Collective, beside_row_bytes, partial_bytes, record_bytes
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, GraphSupport

if TYPE_CHECKING:
    from torch import Tensor

COUNT_BYTES = 8  # one int64 for each destination


class NcclAllToAll(Collective):
    """Two calls a dispatch: counts, which the host reads, then records. A token crosses once to each rank."""

    name = "nccl_a2a"
    boundary: ClassVar = vendor.boundaries(
        {Boundary.LAYOUT, Boundary.PACK, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER},
        {Boundary.TRANSFER, Boundary.REDUCE},
    )
    host_sync = True  # split sizes are arguments of a call on the host
    graph = GraphSupport.NO
    collectives = "all_to_all_single, counts first"

    def workspace_bytes(self, point: Point) -> int:
        """Send and landing buffers for the worst routing, both ways; the same pure formula everywhere."""
        most = max(1, point.max_tokens_per_rank)
        sent, landed = most * min(point.ep_size, point.model.top_k), most * point.ep_size
        return (sent + landed) * (record_bytes(point) + partial_bytes(point)) + 2 * COUNT_BYTES * point.ep_size

    def allocate(self, sets: int) -> None:
        """See `Collective`."""
        import torch

        sent, landed = self._capacity * min(self._ranks, self._top_k), self._capacity * self._ranks
        self._send, self._landed = self._bytes(sent, self._record), self._bytes(landed, self._record)
        width = partial_bytes(self._point)
        self._partials = [self._bytes(landed, width) for _ in range(sets)]
        self._returned = self._bytes(sent, width)
        self._send_counts = torch.zeros(self._ranks, dtype=torch.int64, device=self._device)
        self._landed_counts = torch.zeros(self._ranks, dtype=torch.int64, device=self._device)
        self._sums = torch.zeros(self._capacity, self._hidden, device=self._device)
        self._sent_tokens = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._sent_to, self._landed_from = [0] * self._ranks, [0] * self._ranks

    def buffers(self) -> "Sequence[Tensor]":
        """See `Collective`."""
        return self._send, self._landed, self._returned

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        import torch
        import torch.distributed as dist

        wanted = self.wanted(set_index)
        self._send_counts.copy_(wanted.sum(dim=1))
        dist.all_to_all_single(self._landed_counts, self._send_counts, group=self._group)
        self._sent_tokens = wanted.nonzero()[:, 1]  # ranks ascending, and tokens within a rank
        self._sent_to, self._landed_from = self._send_counts.tolist(), self._landed_counts.tolist()
        send = self._send[: len(self._sent_tokens)]
        torch.index_select(self._records[set_index], 0, self._sent_tokens, out=send)
        self._exchange(self._landed, self._landed_from, send, self._sent_to)

    def _exchange(self, into: "Tensor", into_rows: list[int], source: "Tensor", source_rows: list[int]) -> None:
        import torch.distributed as dist

        into, source = into[: sum(into_rows)], source[: sum(source_rows)]
        dist.all_to_all_single(into, source, into_rows, source_rows, group=self._group)

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`."""
        import torch

        vendor.synchronize()
        counts = torch.tensor(self._landed_from, device=self._device)
        source = torch.arange(self._ranks, device=self._device).repeat_interleave(counts)
        return [self.received_records(self._landed[: sum(self._landed_from)], source)]

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`."""
        import torch

        self._partials[set_index].view(torch.bfloat16)[: len(partials[0])] = partials[0]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        import torch

        self._exchange(self._returned, self._sent_to, self._partials[set_index], self._landed_from)
        returned = self._returned.view(torch.bfloat16)
        self._sums.zero_()
        begin = 0
        for rows in self._sent_to:  # a token is at most once in each, so the order of its sum is that of ranks
            end = begin + rows
            self._sums.index_add_(0, self._sent_tokens[begin:end], returned[begin:end].float())
            begin = end
        self._out[set_index].copy_(self._sums)

    def protocol_bytes(self) -> int:
        """See `Collective`."""
        return COUNT_BYTES * self._ranks + round(beside_row_bytes(self._point) * self.pairs())
