"""The ranks of a process on its GPU: outputs are compared where they are, by `verification.device_check`."""

from collections.abc import Sequence

from epcross.harness.backends.base import Group
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.point import Point
from epcross.harness.verification.device_check import DeviceChecker
from epcross.harness.verification.device_rows import DeviceRows
from epcross.harness.verification.local_ranks import shard
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.placement import Slots


class DeviceRanks:
    """`count` ranks of one backend, consecutive; see `LocalRanks`."""

    def __init__(self, backend: GpuBackend, point: Point, group: Group, slots: Slots, count: int) -> None:
        self.backend, self.point, self.group, self.slots = backend, point, group, slots
        self.ranks = range(group.rank * count, (group.rank + 1) * count)
        self._rows = DeviceRows(current_device())
        self.checkers = [
            DeviceChecker(
                point,
                rank,
                slots,
                backend.weights_by,
                backend.reduction,
                rows=self._rows,
                stable_order=backend.stable_order,
            )
            for rank in self.ranks
        ]

    def prepare(self, timed: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`."""
        shards = [shard(self.point, self.slots, rank, timed) for rank in self.ranks]
        self.backend.prepare_ranks(self.point, shards, self.group)

    def expect(self, batches: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`. They share nothing."""

    def refill(self, set_index: int, batch: GroupBatch) -> None:
        """See `LocalRanks`."""
        self.backend.refill_ranks(set_index, [batch.batch(rank) for rank in self.ranks])

    def check_received(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        received = self.backend.received_ranks(set_index)
        for checker, here in zip(self.checkers, received, strict=True):
            if wrong := checker.check_received(batch, here):
                return wrong
        partials = [checker.partials(batch, here) for checker, here in zip(self.checkers, received, strict=True)]
        self.backend.stage_ranks(set_index, partials)
        return None

    def check_combined(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        return self._check_sums(set_index, batch, timed=False)

    def stage_timed(self, timed: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`. One round of each set; partials depend on (rank, source, token) alone, so that those of one
        set may lie where another's do; on the rank alone where rows have no stable order."""
        for set_index, batch in enumerate(timed):
            self.backend.dispatch(set_index)
            received = self.backend.received_ranks(set_index)
            partials = [
                checker.timed_partials(batch, here) for checker, here in zip(self.checkers, received, strict=True)
            ]
            self.backend.stage_ranks(set_index, partials)
            self.backend.combine(set_index)

    def check_timed(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        return self._check_sums(set_index, batch, timed=True)

    def _check_sums(self, set_index: int, batch: GroupBatch, *, timed: bool) -> Mismatch | None:
        sums = self.backend.combined_ranks(set_index)
        for checker, here in zip(self.checkers, sums, strict=True):
            if wrong := checker.check_combined(batch, here, timed=timed):
                return wrong
        return None


def current_device() -> str:
    """The device that this process works on: its CUDA device, or the CPU where there is none (tests)."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
