"""How a pair is timed on a GPU: two regimes, and spans for diagnosis.

    steady   graph: |pair|pair| ... |pair|        replayed: |fill|replay|replay| ... |      period = time / pairs
             if the host is slower than the GPU: |hold|line up|replay|  |hold|line up|replay| ...
    entry    |hold|graph|  |hold|graph| ...        graph: |flush|line up, stamp|pair|stamp|  ... for each iteration, of
             which a graph has 20, or 1 where pairs are faster so; phases are a series of their own
    spans    |hold|pair|pair| ... under the profiler: each phase from its first kernel's start to its last one's end

Graphs hold no host work and rotate through all sets; they are captured once for a unit and replayed for every chain and
seed, whose inputs change in place. A backend that cannot be captured is called in a loop instead (`eager`): enqueued
ahead of the GPU if it allows that, behind a held kernel in `entry`.

Timers of two GPUs differ and drift; `line_up` starts all of them at one moment of process 0's timer, as far as the
offset is known. It is measured before and after each series: starts are given on process 0's timer, with half a round
trip and the drift between the two as their uncertainty.
"""

import time
from collections.abc import Callable, Sequence

from epcross.harness.backends.base import Group
from epcross.harness.measuring.cuda_entry import EntryTimer
from epcross.harness.measuring.cuda_steady import HOLD_US, Graphs, SteadyTimer
from epcross.harness.measuring.device import Device, KernelSpan
from epcross.harness.measuring.spans import phase_spans, range_name
from epcross.harness.measuring.timing import Pair, Series
from epcross.harness.terms import GraphSupport, Phase, Regime

PROFILER_SLOWDOWN = 5.0
"""By how much a profiler may slow the host down, generously."""

SPAN_PAIRS = 32
"""The profiler keeps every kernel; spans need few."""


Parts = Sequence[tuple[Phase, Callable[[int], None]]]
"""What a pair is made of, in order: a call with the set's number, and what it is called in a trace."""


class CudaTimer:
    """A `Timer` on one GPU of each process; ranks that one launch serves are timed together."""

    def __init__(self, device: Device, group: Group, *, graph: GraphSupport) -> None:
        self._device, self._group = device, group
        self._graphs = Graphs(device, group, graph=graph)
        self._steady = SteadyTimer(self._graphs)
        self._entry = EntryTimer(device, group, graph=graph)

    def expect(self, pair_us: float) -> None:
        """See `Timer`."""
        self._steady.expect(pair_us)

    def steady(self, pair: Pair, *, pairs: int, sets: int, name: str = "steady") -> Series:
        """See `Timer`, and `SteadyTimer.series`."""
        return self._steady.series(pair, pairs=pairs, sets=sets, name=name)

    def chain(self, pair: Pair, *, pairs: int, sets: int) -> int:
        """See `SteadyTimer.chain`."""
        return self._steady.chain(pair, pairs=pairs, sets=sets)

    def enqueued(self, regime: Regime) -> str:
        """See `Timer`."""
        return "graph" if self._graphs.captures and regime is not Regime.SPANS else "eager"

    def series(self, regime: Regime, pair: Pair, *, pairs: int, iterations: int, sets: int) -> Series:
        """See `Timer`."""
        if regime is Regime.STEADY:
            return self.steady(pair, pairs=pairs, sets=sets)
        if regime is Regime.SPANS:
            return self._spans(pair, pairs=pairs, sets=sets)
        return self._entry.series(pair, iterations=iterations, sets=sets)

    def instrument_us(self, regime: Regime, *, sets: int) -> float:
        """See `Timer`. Steady: a graph of one empty kernel in place of each graph of pairs, shared out over the pairs;
        by itself where graphs of pairs were. Collective.
        Entry: the common start and the stamp, with nothing between. Spans: the profiler times kernels by themselves.
        """
        if regime is Regime.SPANS:
            return 0.0
        if regime is Regime.STEADY:
            return self._steady.instrument_us(sets)
        return self._entry.instrument_us(sets)

    def replayable(self, name: str, enqueue: Callable[[], None]) -> Callable[[], None]:
        """What runs all that `enqueue` enqueues: its graph, captured when first asked for under this name, if the
        backend can be captured. Until `close`."""
        return self._graphs.runner(name, 1, 1, enqueue)

    def close(self) -> None:
        """See `Timer`. Graphs hold addresses of the backend's buffers, so they go first."""
        self._entry.close()
        self._graphs.clear()

    def entry_whole(self, pair: Pair, *, iterations: int, sets: int) -> Series:
        """See `EntryTimer.whole`."""
        return self._entry.whole(pair, iterations=iterations, sets=sets)

    def _spans(self, pair: Pair, *, pairs: int, sets: int) -> Series:
        parts = ((Phase.DISPATCH, pair.dispatch), (Phase.EXPERTS, pair.experts), (Phase.COMBINE, pair.combine))
        seen, count = self.seen_kernels(parts, pairs=pairs, sets=sets)
        return Series(
            values_us={phase: phase_spans(seen, phase, count) for phase in (Phase.DISPATCH, Phase.COMBINE)},
            starts_ns=[0],
            pairs=count,
        )

    def seen_kernels(self, parts: Parts, *, pairs: int, sets: int) -> tuple[Sequence[KernelSpan], int]:
        """The kernels of some pairs, at most `pairs`, and how many: each part of a pair in a range of its own.

        Eager, since a profiler sees which call launched a kernel only then. The pairs run back to back all the same:
        the GPU is held until the host has enqueued them."""
        device = self._device
        pairs = -(-min(pairs, SPAN_PAIRS) // sets) * sets

        def enqueue() -> None:
            for i in range(pairs):
                for phase, part in parts:
                    with device.range(range_name(phase, i)):
                        part(i % sets)

        def held(hold_us: float) -> Callable[[], None]:
            def run() -> None:
                device.hold(hold_us)
                enqueue()
                device.synchronize()

            return run

        hold_us = HOLD_US * pairs
        self._graphs.line_up()
        device.kernel_spans(held(hold_us))  # the profiler's own start, and kernels that are loaded when first called
        self._graphs.line_up()
        begin = time.perf_counter()
        enqueue()
        took_us = (time.perf_counter() - begin) * 1e6
        hold_us = max(hold_us, PROFILER_SLOWDOWN * took_us)
        self._graphs.line_up()
        return device.kernel_spans(held(hold_us)), pairs
