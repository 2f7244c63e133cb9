"""The ranks of the group that this process holds, and the checks of what they receive.

One on the CPU, and one for a GPU of its own; all of them where one launch serves the ranks of a GPU. A unit knows only
these calls, so it is the same for every domain.
"""

from collections.abc import Sequence
from typing import Protocol

from epcross.harness.backends.base import Backend, Group, Shard
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.backends.layer import LayerBackend
from epcross.harness.errors import EpcrossError
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind
from epcross.harness.verification.verify import Checker, Mismatch
from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.placement import Slots


class LocalRanks(Protocol):
    """What a unit asks of the ranks of its process. Everything but the constructor's end is for all of them at once."""

    def prepare(self, timed: Sequence[GroupBatch]) -> None:
        """Have the backend prepare itself with these sets. Collective."""
        ...

    def expect(self, batches: Sequence[GroupBatch]) -> None:
        """These are the next whose outputs will be looked at: what checks of them share may be computed once."""
        ...

    def refill(self, set_index: int, batch: GroupBatch) -> None:
        """Replace the inputs of one set."""
        ...

    def check_received(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """Compare what the last dispatch brought; if it is right, stage what experts make of it."""
        ...

    def check_combined(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """Compare the sums of the last combine."""
        ...

    def stage_timed(self, timed: Sequence[GroupBatch]) -> None:
        """Before a timed series: have the partials of every set where `combine` or `experts` will read. Collective."""
        ...

    def check_timed(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """Compare the sums that the last pair of a timed series left, where the backend's order allows that."""
        ...


def local_ranks(backend: Backend, point: Point, group: Group, slots: Slots) -> LocalRanks:
    """The ranks of this process: `ep_size` of them shared out evenly over the processes of `group`.

    Raises:
        EpcrossError: this process would hold several, and the backend is not made for that.
    """
    count = point.ep_size // group.size
    if isinstance(backend, LayerBackend):
        from epcross.harness.verification.layer_ranks import LayerRanks

        if backend.kind is BackendKind.EXPERTS:
            from epcross.harness.verification.experts_ranks import ExpertsRanks

            return ExpertsRanks(backend, point, group, slots, count)
        return LayerRanks(backend, point, group, slots, count)
    if isinstance(backend, GpuBackend):
        from epcross.harness.verification.device_ranks import DeviceRanks

        return DeviceRanks(backend, point, group, slots, count)
    if count != 1:
        raise EpcrossError(
            f"{point.backend} holds one rank in each process and cannot serve EP {point.ep_size} by one launch; use "
            "device=cuda, or a backend made for it (a subclass of harness.backends.gpu.GpuBackend)"
        )
    return HostRank(backend, point, group, slots)


class HostRank:
    """One rank whose outputs are numpy arrays."""

    def __init__(self, backend: Backend, point: Point, group: Group, slots: Slots) -> None:
        self.backend, self.point, self.group, self.slots = backend, point, group, slots
        self.checker = Checker(point, group.rank, slots, backend.weights_by, backend.reduction)

    def prepare(self, timed: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`."""
        self.backend.prepare(self.point, shard(self.point, self.slots, self.group.rank, timed), self.group)

    def expect(self, batches: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`. They share nothing."""

    def refill(self, set_index: int, batch: GroupBatch) -> None:
        """See `LocalRanks`."""
        self.backend.refill(set_index, batch.batch(self.group.rank))

    def check_received(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        received = self.backend.received(set_index)
        wrong = self.checker.check_received(batch, received)
        if wrong is None:
            self.backend.stage(set_index, self.checker.partials(batch, received))
        return wrong

    def check_combined(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        return self.checker.check_combined(batch, self.backend.combined(set_index))

    def stage_timed(self, timed: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`. Each set's were staged when it was verified, and `experts` writes them again."""

    def check_timed(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        return self.check_combined(set_index, batch) if self.backend.stable_order else None


def shard(point: Point, slots: Slots, rank: int, timed: Sequence[GroupBatch]) -> Shard:
    """What `rank` needs to prepare."""
    return Shard(
        rank=rank,
        tokens=point.tokens,
        slot_rank=slots.slot_rank,
        batches=tuple(batch.batch(rank) for batch in timed),
    )
