"""What a user gets from `torch.distributed` on NCCL without writing a kernel: the part that its three forms share.

A token travels as one record, so that one collective moves all of it:

    | row, padded | scale row, padded | token, ids[top_k], weights[top_k], zeros to 16 bytes |

Where torch has no CUDA device the same code runs on the CPU over gloo; that is how it is tested.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Description, Group, Reduction, Shard
from epcross.harness.backends.gpu import DeviceReceived, GpuBackend
from epcross.harness.backends.landing import as_received
from epcross.harness.point import Point
from epcross.harness.terms import Domain, RowFormat
from epcross.kernels.formats import padded, row_size

if TYPE_CHECKING:
    from torch import Tensor


class Collective(GpuBackend):
    """Records in, records out; how they cross is what the forms differ in."""

    domains = frozenset({Domain.NVLINK, Domain.SHARED_GPU})
    reduction: ClassVar[Reduction] = Reduction()
    collectives: ClassVar[str]  # what `describe` calls the algorithm

    _group: Any = None
    _partials: "list[Tensor]"  # of each set, where `combine` reads

    def unavailable(self) -> str | None:
        """No GPU, or a torch without NCCL."""
        if reason := vendor.no_gpu():
            return reason
        import torch.distributed as dist

        return None if dist.is_nccl_available() else "this torch is built without NCCL; install torch for CUDA"

    def unsupported(self, point: Point) -> str | None:
        """One launch for all ranks; sums that are not bf16."""
        return "; ".join(vendor.format_problems(self.name, point, dict.fromkeys(RowFormat, 1))) or None

    def refused_here(self, point: Point) -> str | None:
        """Several ranks on a GPU, where the NCCL that is loaded does not take them."""
        return vendor.nccl_refuses_sharing(point)

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `GpuBackend`."""
        import torch

        (shard,) = shards
        size = row_size(point.dispatch_format, point.model.hidden)
        self._point, self._rank, self._ranks = point, shard.rank, point.ep_size
        self._tokens, self._capacity = point.tokens[shard.rank], max(1, point.max_tokens_per_rank)
        self._hidden, self._top_k = point.model.hidden, point.model.top_k
        self._row, self._scale = size.padded_row_bytes, size.padded_scale_bytes
        self._record = record_bytes(point)
        self._device = vendor.device()
        self._group = vendor.torch_group(group)
        self._slot_rank = torch.tensor([*shard.slot_rank.tolist(), -1], dtype=torch.int32, device=self._device)
        # a record beyond this rank's tokens chooses nothing
        self._records = [self._bytes(self._capacity, self._record) for _ in shard.batches]
        self._ids = [self._integers(records)[:, 1 : 1 + self._top_k] for records in self._records]
        self._out = [
            torch.zeros(self._capacity, self._hidden, dtype=torch.bfloat16, device=self._device) for _ in shard.batches
        ]
        for index, batch in enumerate(shard.batches):
            self._ids[index].fill_(-1)
            self.refill_ranks(index, [batch])
        self.allocate(len(shard.batches))

    @abstractmethod
    def allocate(self, sets: int) -> None:
        """Make the buffers of this form."""

    @abstractmethod
    def buffers(self) -> "Sequence[Tensor]":
        """All of them, for their size and to be poisoned; not the partials."""

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `GpuBackend`."""
        import torch

        (batch,) = batches
        held = self._records[set_index][: self._tokens]
        held[:, : self._row] = torch.from_numpy(batch.rows)
        held[:, self._row : self._row + self._scale] = torch.from_numpy(batch.scales)
        meta = self._integers(held)
        meta[:, 0] = torch.arange(self._tokens, device=self._device)
        meta[:, 1 : 1 + self._top_k] = torch.from_numpy(batch.ids)
        meta[:, 1 + self._top_k : 1 + 2 * self._top_k] = torch.from_numpy(batch.weights).view(torch.int32)

    def combined_ranks(self, set_index: int) -> "list[Tensor]":
        """See `GpuBackend`."""
        vendor.synchronize()
        return [self._out[set_index][: self._tokens]]

    def poison(self) -> None:
        """See `Backend`. All ones: no valid token or id, and a NaN in bf16."""
        for out in self._out:
            out.fill_(float("nan"))
        for buffer in self.buffers():
            buffer.fill_(0xFF)

    def describe(self) -> Description:
        """See `Backend`. NCCL tells nobody how many SMs it takes."""
        import torch

        return Description(
            version=f"torch {torch.__version__}",
            transport="nccl" if self._device != "cpu" else "gloo tcp",
            algorithm=self.collectives,
            workspace_bytes=sum(buffer.nbytes for buffer in (*self.buffers(), self._partials[0])),
            protocol_bytes=self.protocol_bytes(),
            libraries={"torch": torch.__version__, **vendor.loaded_nccl()},
        )

    @abstractmethod
    def protocol_bytes(self) -> int:
        """Bytes that this rank sends in a pair beside the rows, scales, ids, weights and partials of its pairs."""

    def close(self) -> None:
        """See `Backend`. The torch group outlives a point."""
        if self._group is not None:
            vendor.synchronize()
            self._group = None

    def received_records(self, records: "Tensor", source: "Tensor") -> DeviceReceived:
        """Records of this rank's rows [N, record], each with its source."""
        import torch

        meta = self._integers(records)
        rows = records[:, : self._row].contiguous()
        size = row_size(self._point.dispatch_format, self._hidden)
        return as_received(
            self._point,
            self._rank,
            source=source,
            token=meta[:, 0],
            ids=meta[:, 1 : 1 + self._top_k],
            weights=meta[:, 1 + self._top_k : 1 + 2 * self._top_k].contiguous().view(torch.float32),
            rows=rows[:, : size.row_bytes],
            scales=records[:, self._row : self._row + size.scale_bytes],
        )

    def pairs(self) -> float:
        """(token, other rank) pairs that this rank sends, mean over sets."""
        counts = [int(self.wanted(index).sum()) for index in range(len(self._ids))]
        return sum(counts) / len(counts)

    def wanted(self, set_index: int) -> "Tensor":
        """Which token goes to which rank: bool [ep_size, capacity]."""
        import torch

        places = self._slot_rank[self._ids[set_index].long()]  # -1 finds the last entry, which is no rank
        ranks = torch.arange(self._ranks, dtype=torch.int32, device=self._device)
        return (places[None] == ranks[:, None, None]).any(dim=2)

    def present(self, landed: "Tensor") -> "tuple[Tensor, Tensor]":
        """Source and token of the records in [ep_size, capacity, record] that chose a slot of this rank."""
        ids = self._integers(landed)[..., 1 : 1 + self._top_k]
        places = self._slot_rank[ids.clamp(min=-1, max=len(self._slot_rank) - 2).long()]
        source, token = (places == self._rank).any(dim=2).nonzero(as_tuple=True)
        return source, token

    def _integers(self, records: "Tensor") -> "Tensor":
        import torch

        return records[..., self._row + self._scale :].view(torch.int32)

    def _bytes(self, *shape: int) -> "Tensor":
        import torch

        return torch.zeros(*shape, dtype=torch.uint8, device=self._device)


def record_bytes(point: Point) -> int:
    """What one token occupies on its way."""
    size = row_size(point.dispatch_format, point.model.hidden)
    return size.padded_bytes + padded(4 * (1 + 2 * point.model.top_k))


def beside_row_bytes(point: Point) -> int:
    """Of those, what is neither row, scale, id nor weight."""
    size = row_size(point.dispatch_format, point.model.hidden)
    return record_bytes(point) - size.row_bytes - size.scale_bytes - 8 * point.model.top_k


def partial_bytes(point: Point) -> int:
    """What one partial occupies."""
    return 2 * point.model.hidden
