"""A soak: one unit as always, and then rounds until its time is over, every output of each compared on every rank.

    burst    |refill, poison|round|round| ... |round|agree|        no barrier between rounds
    round    dispatch, compare rows; stage, combine, compare sums

Ranks run apart as far as the protocol lets them: one may be checking while its peers are a round ahead. Sets take
turns in an order of the burst's own. Their payloads differ, so that rows of another set are seen; and from one visit
to the next a set's partials change their sign, so that sums a combine did not write are seen, too. Negation is exact in
every format and order of reduction.

Where outputs lie on a GPU they are compared there: `device_soak`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from epcross.harness.backends.base import Backend, BF16Bits, Group, Received
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.errors import EpcrossError
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.measuring.soak_session import SoakSession, Wrong
from epcross.harness.point import Timing, Unit
from epcross.harness.record import UnitResult
from epcross.harness.storing.rows import RunContext
from epcross.harness.terms import Flag, Stage
from epcross.harness.verification.local_ranks import HostRank
from epcross.harness.verification.sums import differ
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload.batches import GroupBatch

_SIGN = np.uint16(0x8000)


def soak_unit(
    backend: Backend,
    unit: Unit,
    timing: Timing,
    group: Group,
    context: RunContext,
    report_stage: Callable[[Stage], None],
    flags: Iterable[Flag] = (),
) -> UnitResult | None:
    """As `measure_unit`, with rounds verified until `timing.chain_ms` are over; at least one burst of them.

    The latency is that of the short chain timed before, bounded by `timing.max_pairs`.
    """
    session_type: type[SoakSession] = HostSoak
    if isinstance(backend, GpuBackend):
        from epcross.harness.measuring.device_soak import DeviceSoak

        session_type = DeviceSoak
    return measure_unit(backend, unit, timing, group, context, report_stage, flags, session_type=session_type)


@dataclass(slots=True)
class _Visited:
    """What a set's first visit of the burst left, all of it found right."""

    received: Received
    partials: BF16Bits
    sums: BF16Bits | None = None
    visits: int = 0


class HostSoak(SoakSession):
    """For one rank in each process, whose outputs are numpy arrays."""

    def _rounds(self, order: Sequence[int], batches: Sequence[GroupBatch]) -> Wrong | None:
        ranks = self.ranks
        if not isinstance(ranks, HostRank):
            raise EpcrossError(f"{self.point.backend} holds several ranks, and its outputs are no numpy arrays")
        self.checker = ranks.checker
        visited: dict[int, _Visited] = {}
        wrong: Wrong | None = None
        for n, s in enumerate(order):
            wrong = self._round(n, s, batches[s], visited, wrong)
        return wrong

    def _round(
        self, n: int, s: int, batch: GroupBatch, visited: dict[int, _Visited], wrong: Wrong | None
    ) -> Wrong | None:
        """One pair. After a wrong output it is still run, for the peers, and no longer checked."""
        backend, checker = self.backend, self.checker
        backend.dispatch(s)
        received = backend.received(s)
        seen = visited.get(s)
        if wrong is None and (seen is None or not _same(received, seen.received)):
            found = checker.check_received(batch, received)
            if found is not None:
                wrong = Wrong(round=n, part=0, rank=self.group.rank, sentence=str(found))
            else:  # a backend without a stable order comes here each time
                visits = seen.visits if seen else 0
                seen = _Visited(received, checker.partials(batch, received), seen.sums if seen else None, visits)
                visited[s] = seen
        if wrong is not None or seen is None:
            backend.stage(s, np.zeros((len(received.source), self.point.model.hidden), np.uint16))
            backend.combine(s)
            return wrong
        sign = _SIGN if seen.visits % 2 else np.uint16(0)
        seen.visits += 1
        backend.stage(s, seen.partials ^ sign)
        if n % 2:
            backend.experts(s)  # writes the same again, from where `stage` kept them
        backend.combine(s)
        sums = backend.combined(s)
        found = self._check_sums(batch, sums, sign, seen)
        return None if found is None else Wrong(round=n, part=1, rank=self.group.rank, sentence=str(found))

    def _check_sums(self, batch: GroupBatch, sums: BF16Bits, sign: np.uint16, seen: _Visited) -> Mismatch | None:
        positive = sums ^ sign if isinstance(sums, np.ndarray) and sums.dtype == np.uint16 else sums
        if seen.sums is not None and positive.shape == seen.sums.shape and not differ(positive, seen.sums).any():
            return None
        found = self.checker.check_combined(batch, positive)
        if found is None:
            seen.sums = positive
        return found


def _same(one: Received, other: Received) -> bool:
    """Whether two dispatches brought the same bits in the same order."""
    for spec in fields(Received):
        got, want = getattr(one, spec.name, None), getattr(other, spec.name)
        if not isinstance(got, np.ndarray) or got.shape != want.shape or got.dtype != want.dtype:
            return False
        if got.tobytes() != want.tobytes():  # by bits, for NaN is no error in a row
            return False
    return True
