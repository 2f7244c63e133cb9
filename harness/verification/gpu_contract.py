"""A visit of the contract to a backend on a GPU: the same cases, for all ranks of a process at once."""

from typing import Any

from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.verification.contract import CHAIN_PAIRS, SETS, Visit
from epcross.harness.verification.device_ranks import DeviceRanks
from epcross.harness.workload.batches import GroupBatch


class GpuVisit(Visit):
    """One backend at one case on the ranks of one process."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ranks = self.call("local ranks", self.local_ranks)

    def local_ranks(self) -> Any:
        """The ranks of this process."""
        assert isinstance(self.backend, GpuBackend)
        count = self.point.ep_size // self.group.size
        return DeviceRanks(self.backend, self.point, self.group, self.slots, count)

    def prepare(self, batches: list[GroupBatch]) -> None:
        """See `Visit`."""
        self.call("prepare", lambda: self.ranks.prepare(batches))

    def refill(self, batches: list[GroupBatch]) -> None:
        """See `Visit`."""
        self.agree(None)
        for index, gb in enumerate(batches):
            self.call("refill", lambda index=index, gb=gb: self.ranks.refill(index, gb))
        self.agree(None)

    def round(self, gb: GroupBatch) -> None:
        """See `Visit`."""
        backend, index = self.backend, gb.set_index
        self.call("poison", backend.poison)
        self.agree(None)
        self.call("dispatch", lambda: backend.dispatch(index))
        wrong = self.call("received and stage", lambda: self.ranks.check_received(index, gb))
        self.agree(wrong, f"dispatch of {gb.payload} rows, set {index}")
        self.call("combine", lambda: backend.combine(index))
        wrong = self.call("combined", lambda: self.ranks.check_combined(index, gb))
        self.agree(wrong, f"combine of {gb.payload} rows, set {index}")

    def chain(self, batches: list[GroupBatch]) -> None:
        """See `Visit`. The partials are those of timed series, which every set finds in place."""
        backend = self.backend
        self.call("stage", lambda: self.ranks.stage_timed(batches))
        self.call("drain_timing", backend.drain_timing)
        self.agree(None)
        self.call("poison", backend.poison)
        self.pairs()
        last = (CHAIN_PAIRS - 1) % SETS
        wrong = self.call("combined", lambda: self.ranks.check_timed(last, batches[last]))
        self.agree(wrong, f"a chain of {CHAIN_PAIRS} pairs of {batches[last].payload} rows, set {last}")
        self.call("drain_timing", backend.drain_timing)

    def pairs(self) -> None:
        """Pairs back to back, as timing runs them."""
        backend = self.backend
        for pair in range(CHAIN_PAIRS):
            index = pair % SETS
            self.call("dispatch", lambda index=index: backend.dispatch(index))
            self.call("experts", lambda index=index: backend.experts(index))
            self.call("combine", lambda index=index: backend.combine(index))
