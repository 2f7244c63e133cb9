"""What a unit asks of a clock, whatever it reads: series of each regime, and what the instrument itself costs."""

import statistics
from typing import Protocol

from epcross.harness.backends.base import Group
from epcross.harness.measuring.timing import EmptyPair, Pair, Series, StartLine, entry_series, steady_series
from epcross.harness.terms import Phase, Regime

INSTRUMENT_ITERATIONS = 64


class Timer(Protocol):
    """Times pairs of one backend at one point. Every call is collective."""

    def enqueued(self, regime: Regime) -> str:
        """How pairs of a regime are issued: "host", "graph" or "eager"."""
        ...

    def expect(self, pair_us: float) -> None:
        """How long a pair takes on the slowest rank, the same on all of them; before the first series that counts."""
        ...

    def steady(self, pair: Pair, *, pairs: int, sets: int) -> Series:
        """A chain of about `pairs` pairs (never fewer), after a fill; ends on the last set."""
        ...

    def series(self, regime: Regime, pair: Pair, *, pairs: int, iterations: int, sets: int) -> Series:
        """One series of a regime; the last pair is of the last set."""
        ...

    def instrument_us(self, regime: Regime, *, sets: int) -> float:
        """What an empty pair costs through the same path."""
        ...

    def close(self) -> None:
        """Release what the timer itself holds. Idempotent."""
        ...


class HostTimer:
    """The CPU's clock; see `timing`."""

    def __init__(self, group: Group, *, oversubscribed: bool, limit_s: float) -> None:
        self._line: StartLine | None = StartLine(group, oversubscribed=oversubscribed, limit_s=limit_s)

    def enqueued(self, regime: Regime) -> str:
        """See `Timer`."""
        return "host"

    def expect(self, pair_us: float) -> None:
        """See `Timer`. A loop needs no size."""

    def steady(self, pair: Pair, *, pairs: int, sets: int) -> Series:
        """See `Timer`."""
        assert self._line is not None
        return steady_series(pair, pairs=pairs, sets=sets, line=self._line)

    def series(self, regime: Regime, pair: Pair, *, pairs: int, iterations: int, sets: int) -> Series:
        """See `Timer`."""
        assert self._line is not None
        if regime is Regime.STEADY:
            return self.steady(pair, pairs=pairs, sets=sets)
        return entry_series(pair, iterations=iterations, sets=sets, line=self._line)

    def instrument_us(self, regime: Regime, *, sets: int) -> float:
        """See `Timer`."""
        iterations = INSTRUMENT_ITERATIONS
        series = self.series(regime, EmptyPair(), pairs=iterations, iterations=iterations, sets=sets)
        return round(statistics.median(series.values_us[Phase.ROUND_TRIP]), 4)

    def close(self) -> None:
        """See `Timer`."""
        if self._line is not None:
            self._line.close()
            self._line = None
