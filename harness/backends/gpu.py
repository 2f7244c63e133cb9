"""The contract of a backend whose buffers are on a GPU: the life of `base.Backend`, with torch tensors.

A process holds V consecutive ranks of the group, all on its current CUDA device. V is 1, or the whole group where one
launch serves every rank of a GPU (`Sharing.ONE_LAUNCH`). Every sequence below has one entry for each of them, in order.

`dispatch`, `experts` and `combine` enqueue on torch's current stream for all V ranks. They are captured in a CUDA graph
unless `graph` says no: inputs are then read by address, and `refill_ranks` changes them in place.

`experts` need not write anything: landing buffers are device memory. Before a timed series the harness stages partials
for each set that depend on nothing but (rank, source, token). A backend whose combine reads one buffer at (source,
token) then holds the right partials of every set at once; one whose buffer follows the routing keeps one per set.
Where rows come in no stable order (`stable_order`), partials depend on the rank alone, so that any order is checked.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from epcross.harness.backends.base import Backend, Batch, BF16Bits, Group, Received, Shard
from epcross.harness.point import Point

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReceived:
    """`Received` as tensors on the GPU. They may be views, valid until the next dispatch."""

    source: "torch.Tensor"  # int32 [N]
    token: "torch.Tensor"  # int32 [N]
    ids: "torch.Tensor"  # int32 [N, top_k]
    weights: "torch.Tensor"  # float32 [N, top_k]
    rows: "torch.Tensor"  # uint8 [N, padded_row_bytes]
    scales: "torch.Tensor"  # uint8 [N, padded_scale_bytes]

    def to_host(self) -> Received:
        """The same as numpy arrays of their own."""
        return Received(**{name: _array(getattr(self, name)) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What a dispatch left where it landed: C places for each source rank, by token. Garbage where nothing came."""

    present: "torch.Tensor"  # bool [ep_size, C]: what came
    rows: "torch.Tensor"  # uint8 [ep_size, C, padded_row_bytes]
    scales: "torch.Tensor"  # uint8 [ep_size, C, padded_scale_bytes]
    ids: "torch.Tensor"  # int32 [ep_size, C, top_k], as they travel: those of other ranks may be among them
    weights: "torch.Tensor"  # float32 [ep_size, C, top_k], likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Where outputs lie, for checks that are enqueued behind a call and captured with it: nothing here waits.

    Addresses stay the same as long as the backend is prepared.
    """

    landed: "Callable[[], Sequence[Landed]]"  # of the last dispatch; enqueues at most, and is called before combine
    partials: "Sequence[torch.Tensor]"  # bf16 [ep_size, C, hidden] of each rank: where combine reads
    sums: "Sequence[Sequence[torch.Tensor]]"  # bf16 [T, hidden] of each set, and each rank


class GpuBackend(Backend):
    """A baseline on a GPU. What `Backend` asks for in numpy follows from the methods here, for one rank a process."""

    @abstractmethod
    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """As `Backend.prepare`, for the ranks of this process; `group` is one of processes."""

    @abstractmethod
    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """As `Backend.refill`. In place: a captured graph reads the same addresses."""

    @abstractmethod
    def received_ranks(self, set_index: int) -> Sequence[DeviceReceived]:
        """As `Backend.received`. Waits for the device; raises `WaitExpired` if a bounded wait of a kernel ran out."""

    @abstractmethod
    def stage_ranks(self, set_index: int, partials: "Sequence[torch.Tensor]") -> None:
        """As `Backend.stage`: bf16 [N, hidden] for each rank, in the order that `received_ranks` returned."""

    @abstractmethod
    def combined_ranks(self, set_index: int) -> "Sequence[torch.Tensor]":
        """As `Backend.combined`: bf16 [T, hidden] for each rank, possibly views. Waits and raises as above."""

    def in_place(self) -> InPlace | None:
        """Where outputs lie, if places are fixed and known without the host; else None. Valid after `prepare_ranks`."""
        return None

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        """See `Backend`."""
        self.prepare_ranks(point, (shard,), group)

    def refill(self, set_index: int, batch: Batch) -> None:
        """See `Backend`."""
        self.refill_ranks(set_index, (batch,))

    def received(self, set_index: int) -> Received:
        """See `Backend`."""
        (received,) = self.received_ranks(set_index)
        return received.to_host()

    def stage(self, set_index: int, partials: BF16Bits) -> None:
        """See `Backend`."""
        import torch

        bits = torch.from_numpy(np.ascontiguousarray(partials).view(np.int16))
        self.stage_ranks(set_index, (bits.view(torch.bfloat16),))

    def experts(self, set_index: int) -> None:
        """See `Backend`. Nothing, unless a backend says otherwise and declares it."""
        return

    def combined(self, set_index: int) -> BF16Bits:
        """See `Backend`."""
        import torch

        (sums,) = self.combined_ranks(set_index)
        return _array(sums.contiguous().view(torch.int16)).view(np.uint16)


def _array(tensor: Any) -> Any:
    return np.array(tensor.detach().cpu().numpy(), copy=True)
