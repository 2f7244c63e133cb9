"""Backends that pass every check of a measurement and are wrong afterwards: what only a soak can find."""

from collections import Counter

import numpy as np
from tests.broken_backends import ReferenceBackend

from epcross.harness.backends.base import Batch, Group, Received, Shard
from epcross.harness.point import Point

SET_ROUNDS = 150
"""More rounds than a unit has before its soak: checks, warm-up and the longest chain."""


class LateWrongRow(ReferenceBackend):
    """Rank 1 flips a bit in a row it receives, now and then, after many rounds."""

    def received(self, set_index: int) -> Received:
        received = super().received(set_index)
        if self.rank == 1 and self.calls > SET_ROUNDS and self.calls % 3 == 0 and received.rows.size:
            received.rows[0, 0] ^= 1
        return received


class SleepsWhenRepeated(ReferenceBackend):
    """Rank 1 keeps the sums of a set's first visit, as a combine would that skips what it believes to be done."""

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        super().prepare(point, shard, group)
        self.kept: dict[int, np.ndarray] = {}
        self.visits: Counter[int] = Counter()

    def refill(self, set_index: int, batch: Batch) -> None:
        super().refill(set_index, batch)
        self.kept.pop(set_index, None)

    def combine(self, set_index: int) -> None:
        super().combine(set_index)
        if self.rank == 1 and len(self.sums):
            self.sums = self.kept.setdefault(set_index, self.sums).copy()
