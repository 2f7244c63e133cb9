"""A soak: one unit as always, and then rounds until its time is over, every output of each compared on every rank.

    burst    |refill, poison|round|round| ... |round|agree|        no barrier between rounds
    round    dispatch, compare rows; stage, combine, compare sums

Ranks run apart as far as the protocol lets them: one may be checking while its peers are a round ahead. Sets take
turns in an order of the burst's own. Their payloads differ, so that rows of another set are seen; and from one visit
to the next a set's partials change their sign, so that sums a combine did not write are seen, too. Negation is exact in
every format and order of reduction.
"""

import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np

from epcross.harness.backends.base import Backend, BF16Bits, Group, Received
from epcross.harness.errors import EpcrossError
from epcross.harness.measuring.measure import Incorrect, UnitSession, measure_unit
from epcross.harness.measuring.unit_rows import Chain
from epcross.harness.point import Timing, Unit
from epcross.harness.record import UnitResult
from epcross.harness.storing.rows import RunContext
from epcross.harness.terms import Flag, Stage
from epcross.harness.verification.local_ranks import HostRank
from epcross.harness.verification.sums import differ
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.tape import Payload

SOAK_SET = 10_000
"""Set numbers from here on are those of soaks."""

VISITS = 4
"""Of a burst to each of its sets."""

_PAYLOADS = (Payload.ADVERSARIAL, Payload.RANDOM, Payload.EXACT)
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
    return measure_unit(backend, unit, timing, group, context, report_stage, flags, session_type=SoakSession)


@dataclass(slots=True)
class _Visited:
    """What a set's first visit of the burst left, all of it found right."""

    received: Received
    partials: BF16Bits
    sums: BF16Bits | None = None
    visits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrong:
    """The first wrong output of a burst on this rank."""

    round: int
    part: int  # 0: rows, 1: sums; rows come first
    sentence: str


class SoakSession(UnitSession):
    """A unit that goes on verifying. For one rank in each process, whose outputs are numpy arrays."""

    def run(self) -> list[Chain]:
        """The chains of the unit, once the soak is over."""
        ranks = self.ranks
        if not isinstance(ranks, HostRank):
            raise EpcrossError(f"a soak runs in domain cpu, not in {self.point.domain}; use epcross run")
        self.checker = ranks.checker
        deadline = time.monotonic() + self.timing.chain_ms / 1e3
        chains = super().run()
        number = 0
        while number == 0 or self._goes_on(deadline):
            self._burst(number)
            number += 1
        return chains

    def _goes_on(self, deadline: float) -> bool:
        """Rank 0's clock decides for all."""
        return self.group.all_gather(b"1" if time.monotonic() < deadline else b"")[0] == b"1"

    def _burst(self, number: int) -> None:
        backend, group, sets = self.backend, self.group, self.timing.sets
        first = SOAK_SET + number * sets
        batches = [self._batch(0, first + s, _PAYLOADS[(number + s) % len(_PAYLOADS)]) for s in range(sets)]
        group.barrier()  # no peer may still be writing when inputs and buffers change
        for s, batch in enumerate(batches):
            backend.refill(s, batch.batch(group.rank))
        backend.poison()
        group.barrier()  # no row may arrive at a rank that has yet to poison
        visited: dict[int, _Visited] = {}
        wrong: _Wrong | None = None
        order = visiting_order(sets, VISITS, number)
        for n, s in enumerate(order):
            wrong = self._round(n, s, batches[s], visited, wrong)
        self._agree_on_first(number, wrong)
        self.verified_rounds += len(order)

    def _round(
        self, n: int, s: int, batch: GroupBatch, visited: dict[int, _Visited], wrong: _Wrong | None
    ) -> _Wrong | None:
        """One pair. After a wrong output it is still run, for the peers, and no longer checked."""
        backend, checker = self.backend, self.checker
        backend.dispatch(s)
        received = backend.received(s)
        seen = visited.get(s)
        if wrong is None and (seen is None or not _same(received, seen.received)):
            found = checker.check_received(batch, received)
            if found is not None:
                wrong = _Wrong(round=n, part=0, sentence=str(found))
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
        return None if found is None else _Wrong(round=n, part=1, sentence=str(found))

    def _check_sums(self, batch: GroupBatch, sums: BF16Bits, sign: np.uint16, seen: _Visited) -> Mismatch | None:
        positive = sums ^ sign if isinstance(sums, np.ndarray) and sums.dtype == np.uint16 else sums
        if seen.sums is not None and positive.shape == seen.sums.shape and not differ(positive, seen.sums).any():
            return None
        found = self.checker.check_combined(batch, positive)
        if found is None:
            seen.sums = positive
        return found

    def _agree_on_first(self, number: int, wrong: _Wrong | None) -> None:
        """Raise `Incorrect` on all ranks for the first wrong output of any; what follows it may be its consequence."""
        words = b"" if wrong is None else json.dumps([wrong.round, wrong.part, wrong.sentence]).encode()
        told = [(*json.loads(data), rank) for rank, data in enumerate(self.group.all_gather(words)) if data]
        if told:
            n, _, sentence, rank = min(told, key=lambda item: (item[0], item[1], item[3]))
            raise Incorrect(Stage.VERIFY_AFTER, rank, f"burst {number}, round {n} of the soak: {sentence}")


def visiting_order(sets: int, visits: int, number: int) -> list[int]:
    """`visits` visits to each set in an order of burst `number`, never the same set twice in a row (of two or more).

    A rank that did nothing in a round would hold the rows of the round before, which are another set's.
    """
    drawn = random.Random(number)  # the same on every rank: all of one unit run the same interpreter
    order: list[int] = []
    for _ in range(visits):
        turn = list(range(sets))
        drawn.shuffle(turn)
        if order and turn[0] == order[-1]:
            turn.reverse()
        order += turn
    return order


def _same(one: Received, other: Received) -> bool:
    """Whether two dispatches brought the same bits in the same order."""
    for spec in fields(Received):
        got, want = getattr(one, spec.name, None), getattr(other, spec.name)
        if not isinstance(got, np.ndarray) or got.shape != want.shape or got.dtype != want.dtype:
            return False
        if got.tobytes() != want.tobytes():  # by bits, for NaN is no error in a row
            return False
    return True
