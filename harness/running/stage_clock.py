"""How long each stage of a unit took on one rank, for the notes of a run: where its time goes."""

import time
from collections.abc import Callable

LOAD = "load"
"""Before any stage: a worker that starts, and imports what it needs."""


class StageClock:
    """Sums seconds by stage; a stage that is come to again, as for each seed, goes on."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._stage, self._since_s = LOAD, clock()

    def enter(self, stage: str) -> None:
        """The stage before ends now."""
        now_s = self._clock()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now_s - self._since_s
        self._stage, self._since_s = stage, now_s

    def seconds(self) -> dict[str, float]:
        """By stage, in the order in which they came, the one that runs up to now; none that took no millisecond."""
        self.enter(self._stage)
        return {stage: round(seconds, 3) for stage, seconds in self._seconds.items() if seconds >= 0.0005}
