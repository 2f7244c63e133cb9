"""What soaks have in common, wherever outputs lie: bursts until the time is over, and who was wrong first."""

import json
import random
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from epcross.harness.measuring.unit_rows import Chain
from epcross.harness.measuring.unit_session import Incorrect, UnitSession
from epcross.harness.terms import Stage
from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.tape import Payload

SOAK_SET = 10_000
"""Set numbers from here on are those of soaks."""

VISITS = 4
"""Of a burst to each of its sets."""

_PAYLOADS = (Payload.ADVERSARIAL, Payload.RANDOM, Payload.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """The first wrong output of a burst on a rank."""

    round: int
    part: int  # 0: rows, 1: sums; rows come first
    rank: int
    sentence: str

    @property
    def order(self) -> tuple[int, int, int]:
        """What is first is the cause; what follows it may be its consequence."""
        return self.round, self.part, self.rank


class SoakSession(UnitSession):
    """A unit that goes on verifying."""

    def run(self) -> list[Chain]:
        """The chains of the unit, once the soak is over."""
        deadline = time.monotonic() + self.timing.chain_ms / 1e3
        chains = super().run()
        number = 0
        while number == 0 or self._goes_on(deadline):
            self._burst(number)
            number += 1
        return chains

    @abstractmethod
    def _rounds(self, order: Sequence[int], batches: Sequence[GroupBatch]) -> Wrong | None:
        """A round of each set of `order`, whose inputs are in place, with every output compared. Collective."""

    def _goes_on(self, deadline: float) -> bool:
        """Rank 0's clock decides for all."""
        return self.group.all_gather(b"1" if time.monotonic() < deadline else b"")[0] == b"1"

    def _burst(self, number: int) -> None:
        backend, group, sets = self.backend, self.group, self.timing.sets
        first = SOAK_SET + number * sets
        batches = [self._batch(0, first + s, _PAYLOADS[(number + s) % len(_PAYLOADS)]) for s in range(sets)]
        group.barrier()  # no peer may still be writing when inputs and buffers change
        for s, batch in enumerate(batches):
            self.ranks.refill(s, batch)
        backend.poison()
        group.barrier()  # no row may arrive at a rank that has yet to poison
        order = visiting_order(sets, VISITS, number)
        self._agree_on_first(number, self._rounds(order, batches))
        self.verified_rounds += len(order)

    def _agree_on_first(self, number: int, wrong: Wrong | None) -> None:
        """Raise `Incorrect` on all ranks for the first wrong output of any."""
        words = b"" if wrong is None else json.dumps(asdict(wrong)).encode()
        told = [Wrong(**json.loads(data)) for data in self.group.all_gather(words) if data]
        if told:
            first = min(told, key=lambda one: one.order)
            sentence = f"burst {number}, round {first.round} of the soak: {first.sentence}"
            raise Incorrect(Stage.VERIFY_AFTER, first.rank, sentence)


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
