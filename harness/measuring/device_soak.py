"""A soak on a GPU: bursts as on the CPU, with outputs compared where they are; and then rounds from a graph.

    burst    |refill, poison|round|round| ... |round|agree|graph|graph| ... |graph|agree|

The rounds of the first part are enqueued one at a time, and the host looks at each: what is wrong is said in full. The
graph holds rounds and checks of the same sets (`verification.device_rounds`), is captured once for a unit, and replayed
for about `QUEUED_S` in each burst, whose inputs and right outputs change in place. It takes a backend whose outputs lie
in known places and whose sums have the same bits each time; others are soaked by the first part alone.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from epcross.harness.backends.gpu import DeviceReceived, GpuBackend
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.soak_session import VISITS, SoakSession, Wrong, visiting_order
from epcross.harness.verification.device_ranks import DeviceRanks
from epcross.harness.verification.device_rounds import DeviceRounds
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload.batches import GroupBatch

if TYPE_CHECKING:
    from torch import Tensor

GRAPH_VISITS = 8
"""Rounds of each set in a graph."""

QUEUED_S = 2.0
"""Time of the rounds from graphs in a burst: several times that of new inputs, also of 4096 tokens."""

MAX_REPLAYS = 2000

_SIGN = -0x8000  # the sign bit of a bf16 as int16


@dataclass(slots=True)
class _Visited:
    """What a set's first visit of the burst left on this process's ranks, all of it found right."""

    received: "list[DeviceReceived]"
    partials: "list[Tensor]"
    sums: "list[Tensor] | None" = None
    visits: int = 0


class DeviceSoak(SoakSession):
    """For the ranks of a process on its GPU."""

    _queued: DeviceRounds | None = None
    _replays = 1

    def _burst(self, number: int) -> None:
        super()._burst(number)
        if self._queued is not None:
            self._replay(number, self._queued)

    def _rounds(self, order: Sequence[int], batches: Sequence[GroupBatch]) -> Wrong | None:
        if self._queued is None:
            self._queued = self._make_queued()
        visited: dict[int, _Visited] = {}
        wrong: Wrong | None = None
        for n, s in enumerate(order):
            wrong = self._round(n, s, batches[s], visited, wrong)
        return wrong

    @property
    def _here(self) -> DeviceRanks:
        assert isinstance(self.ranks, DeviceRanks)
        return self.ranks

    @property
    def _gpu(self) -> GpuBackend:
        assert isinstance(self.backend, GpuBackend)
        return self.backend

    def _make_queued(self) -> DeviceRounds | None:
        backend = self._gpu
        place = backend.in_place() if backend.reduction.exact and backend.stable_order else None
        return place and DeviceRounds(backend, place, self._here.ranks, self.timing.sets)

    def _round(
        self, n: int, s: int, batch: GroupBatch, visited: dict[int, _Visited], wrong: Wrong | None
    ) -> Wrong | None:
        """One pair. After a wrong output it is still run, for the peers, and no longer checked."""
        import torch

        backend, checkers = self._gpu, self._here.checkers
        backend.dispatch(s)
        received = list(backend.received_ranks(s))
        seen = visited.get(s)
        if wrong is None and (seen is None or not _same(received, seen.received)):
            found = _first(c.check_received(batch, here) for c, here in zip(checkers, received, strict=True))
            if found is None:  # a backend without a stable order comes here each time
                kept = [_copy(here) for here in received]
                partials = [c.partials(batch, here) for c, here in zip(checkers, kept, strict=True)]
                if seen is None:
                    found = self._learn_rows(s, kept, partials)
                    seen = visited[s] = _Visited(kept, partials)
                seen.received, seen.partials = kept, partials
            if found is not None:
                wrong = Wrong(round=n, part=0, rank=found.rank, sentence=str(found))
        if wrong is not None or seen is None:
            backend.stage_ranks(s, [_zeros(here, self.point.model.hidden) for here in received])
            backend.combine(s)
            return wrong
        sign = _SIGN if seen.visits % 2 else 0
        seen.visits += 1
        backend.stage_ranks(s, [_flipped(partials, sign) for partials in seen.partials])
        if n % 2:
            backend.experts(s)  # writes the same again, from where `stage_ranks` kept them
        backend.combine(s)
        # a tensor of another type is no sum whose sign could be flipped; the check says what it is
        sums = [_flipped(t, sign) if t.dtype is torch.bfloat16 else t for t in backend.combined_ranks(s)]
        if seen.sums is not None and all(map(_equal, sums, seen.sums)):
            return None
        found = _first(c.check_combined(batch, here) for c, here in zip(checkers, sums, strict=True))
        if found is not None:
            return Wrong(round=n, part=1, rank=found.rank, sentence=str(found))
        if seen.sums is None and self._queued is not None:
            self._queued.learn_sums(s, sums)
        seen.sums = sums
        return None

    def _learn_rows(
        self, s: int, received: "Sequence[DeviceReceived]", partials: "Sequence[Tensor]"
    ) -> Mismatch | None:
        """What is wrong if the backend shows another thing in place than it returns."""
        if self._queued is None or self._queued.learn_rows(s, received, partials):
            return None
        rank = self._here.ranks[0]
        return Mismatch(
            what="rows in place are not those received", rank=rank, wrong=1, total=1, unit="of the views is wrong"
        )

    def _replay(self, number: int, queued: DeviceRounds) -> None:
        """The second part of a burst. What was wrong in the first was raised before, on every rank."""
        assert isinstance(self.timer, CudaTimer)
        sets = self.timing.sets
        order = _graph_order(sets)

        def enqueue() -> None:
            for s in order:
                queued.enqueue(s)

        run = self.timer.replayable("soak", enqueue)
        queued.start(VISITS * sets)
        # rank 0's clock decides, once all have captured
        replays = int(self.group.all_gather(str(self._replays).encode())[0])
        begin = time.monotonic()
        for _ in range(replays):
            run()
        self._gpu.combined_ranks(order[-1])  # waits, and raises if a peer did not come
        found = queued.first_wrong()
        took_s = time.monotonic() - begin
        self._replays = max(1, min(MAX_REPLAYS, int(replays * QUEUED_S / max(took_s, 1e-6))))
        wrong = None
        if found is not None:
            n, part, mismatch = found
            wrong = Wrong(round=n, part=part, rank=mismatch.rank, sentence=str(mismatch))
        self._agree_on_first(number, wrong)
        self.verified_rounds += replays * len(order)

    def close(self) -> None:
        """See `UnitSession`. Views go before the backend's buffers do."""
        super().close()
        self._queued = None


def _graph_order(sets: int) -> list[int]:
    """A graph follows itself: its last set is not its first."""
    orders = (visiting_order(sets, GRAPH_VISITS, number) for number in count())
    return next(order for order in orders if order[0] != order[-1])


def _first(found: "Iterable[Mismatch | None]") -> Mismatch | None:
    return next((one for one in found if one is not None), None)


def _copy(received: DeviceReceived) -> DeviceReceived:
    return DeviceReceived(**{name: getattr(received, name).clone() for name in DeviceReceived.__slots__})


def _zeros(received: DeviceReceived, hidden: int) -> "Tensor":
    import torch

    return torch.zeros((len(received.source), hidden), dtype=torch.bfloat16, device=received.source.device)


def _flipped(values: "Tensor", sign: int) -> "Tensor":
    """A copy, with all signs changed if `sign` is `_SIGN`."""
    import torch

    return (values.view(torch.int16) ^ sign).view(torch.bfloat16)


def _equal(got: "Tensor", want: "Tensor") -> bool:
    """Whether two tensors have the same values; NaN equals NaN, zero equals zero."""
    if got.dtype is not want.dtype or got.shape != want.shape:
        return False
    return bool(((got == want) | (got.isnan() & want.isnan())).all())


def _same(received: "Sequence[DeviceReceived]", before: "Sequence[DeviceReceived]") -> bool:
    """Whether two dispatches brought the same bits in the same order."""
    import torch

    for one, other in zip(received, before, strict=True):
        for name in DeviceReceived.__slots__:
            got, want = getattr(one, name, None), getattr(other, name)
            if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype is not want.dtype:
                return False
            if got.dtype is torch.float32:  # by bits, for NaN is no error in a weight
                got, want = got.view(torch.int32), want.view(torch.int32)
            if not torch.equal(got, want):
                return False
    return True
