"""How a pair is timed on a GPU: two regimes, and spans for diagnosis.

    steady   graph: |pair|pair| ... |pair|        replayed: |fill|replay|replay| ... |      period = time / pairs
             if the host is slower than the GPU: |hold|line up|replay|  |hold|line up|replay| ...
    entry    graph: |flush|line up, stamp|pair|stamp|  ...                                  once for each iteration
             and again with stamps around each phase, which cost time: its own series, for dispatch and combine
    spans    |hold|pair|pair| ... under the profiler: each phase from its first kernel's start to its last one's end

Graphs hold no host work and rotate through all sets; they are captured once for a unit and replayed for every chain and
seed, whose inputs change in place. A backend that cannot be captured is called in a loop instead (`eager`): enqueued
ahead of the GPU if it allows that, behind a held kernel in `entry`.

Timers of two GPUs differ and drift; `line_up` starts all of them at one moment of process 0's timer, as far as the
offset is known. It is measured before and after each series: starts are given on process 0's timer, with half a round
trip and the drift between the two as their uncertainty.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from epcross.harness.backends.base import Group
from epcross.harness.measuring.device import ClockOffset, Device, KernelSpan, Replay
from epcross.harness.measuring.spans import phase_spans, range_name
from epcross.harness.measuring.timing import NS_PER_US, Pair, Series
from epcross.harness.terms import GraphSupport, Phase, Regime

WARM_PAIRS, MOST_PAIRS = 20, 200
"""Pairs of one steady graph: before their time is known, and at most."""

GRAPH_US = 1000.0
"""About how long a steady graph lasts: the gap between two replays, of a microsecond or two, is then 0.2 % of one, and
no graph is longer than an engine's. On two H200s a pair of NCCL's collectives took 67 us in graphs of 200 pairs and 28
alone; tests/benchmark/gpu_graphs.py measures what the length of a graph does."""

ENTRY_ITERATIONS = 20
"""Of one graph, for the same reason."""

HOST_SHARE = 0.8
"""If enqueuing takes a larger share of the time that the GPU takes, a chain of replays may be timing the host. On two
H200s a pair of NCCL's collectives took 35 us, its kernels 14, and the host as long as the GPU."""

HELD_REPLAYS = 10

INSTRUMENT_ITERATIONS = 64
HOLD_US = 300.0
"""Longer than Python takes to enqueue one pair and its stamps, or a few replays."""

PROFILER_SLOWDOWN = 5.0
"""By how much a profiler may slow the host down, generously."""

SPAN_PAIRS = 32
"""The profiler keeps every kernel; spans need few."""


Parts = Sequence[tuple[Phase, Callable[[int], None]]]
"""What a pair is made of, in order: a call with the set's number, and what it is called in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steady:
    """How the last steady series was timed."""

    size: int = WARM_PAIRS  # pairs of a graph
    replays: int = 1
    held: bool = False
    enqueue_us: float = 0.0  # of a graph


class CudaTimer:
    """A `Timer` on one GPU of each process; ranks that one launch serves are timed together."""

    graph_pairs = WARM_PAIRS

    def __init__(self, device: Device, group: Group, *, graph: GraphSupport) -> None:
        self._device, self._group = device, group
        self._captures = graph is not GraphSupport.NO
        self._graphs: dict[tuple[str, int, int], Replay] = {}
        self._steady = _Steady()
        self._slower_hosts: dict[int, bool] = {}
        self._sized = False

    def expect(self, pair_us: float) -> None:
        """See `Timer`. Sizes the graphs, once: later seeds replay those that are captured."""
        if not self._sized:
            self.graph_pairs = max(1, min(MOST_PAIRS, round(GRAPH_US / max(pair_us, 1e-3))))
            self._sized = True

    def enqueued(self, regime: Regime) -> str:
        """See `Timer`."""
        return "graph" if self._captures and regime is not Regime.SPANS else "eager"

    def steady(self, pair: Pair, *, pairs: int, sets: int, name: str = "steady") -> Series:
        """See `Timer`. A graph is replayed until at least `pairs` have run; `name` tells other pairs' graphs apart."""
        device = self._device
        size = -(-min(pairs, self.graph_pairs) // sets) * sets
        replays = -(-pairs // size)
        run = self._runner(name, size, sets, lambda: _chain(pair, size, sets))
        self._line_up()
        with device.range(f"{name} {replays} x {size} pairs"):
            # a first replay uploads its graph, which takes the host longer than few pairs take the GPU: without the
            # hold a short series would time the host
            device.hold(HOLD_US)
            run()  # the fill: a whole graph, so that replays are enqueued while the GPU is busy
            first = device.mark()
            enqueue_us = device.host_us(run) / size  # behind the fill, so that the queue has room
            for _ in range(replays - 1):
                run()
            last = device.mark()
            period_us = device.elapsed_us(first, last) / (size * replays)
            device.synchronize()
            held = self._captures and self._host_is_slower(size, enqueue_us / max(period_us, 1e-3))
            if held:
                replays = min(replays, HELD_REPLAYS)
                period_us = self._held_us(run, size * enqueue_us, replays) / size
        self._steady = _Steady(size=size, replays=replays, held=held, enqueue_us=size * enqueue_us)
        return Series(
            values_us={Phase.ROUND_TRIP: [period_us]},
            starts_ns=[0],
            pairs=size * replays,
            enqueue_us=enqueue_us if self._captures else None,
            held=held if self._captures else None,
        )

    def _host_is_slower(self, size: int, share: float) -> bool:
        """Whether that is so on any rank. The first series of graphs of a size decides, so that all of a unit are timed
        alike: its repeats, and what is subtracted from each other. Collective."""
        if size not in self._slower_hosts:
            shares = self._group.all_gather(repr(share).encode())
            self._slower_hosts[size] = max(map(float, shares)) > HOST_SHARE
        return self._slower_hosts[size]

    def _held_us(self, run: Callable[[], None], enqueue_us: float, replays: int) -> float:
        """Median time of a replay by itself: all of it is enqueued before any runs, and ranks start together. What the
        first pair waits for nobody and the last for no next one is spread over all pairs of the graph. Collective."""
        device, times = self._device, []
        for _ in range(replays):
            self._line_up()
            device.hold(HOLD_US + 2 * enqueue_us)
            device.line_up(0)
            first = device.mark()
            run()
            times.append(device.elapsed_us(first, device.mark()))
            device.synchronize()
        return statistics.median(times)

    def chain(self, pair: Pair, *, pairs: int, sets: int) -> int:
        """Run at least `pairs` pairs as `steady` does, each set equally often, and wait for them; how many they were.
        Nothing is timed. Collective."""
        size = -(-min(pairs, self.graph_pairs) // sets) * sets
        replays = -(-pairs // size)
        run = self._runner("steady", size, sets, lambda: _chain(pair, size, sets))
        self._line_up()
        for _ in range(replays):
            run()
        self._device.synchronize()
        return size * replays

    def series(self, regime: Regime, pair: Pair, *, pairs: int, iterations: int, sets: int) -> Series:
        """See `Timer`."""
        if regime is Regime.STEADY:
            return self.steady(pair, pairs=pairs, sets=sets)
        if regime is Regime.SPANS:
            return self._spans(pair, pairs=pairs, sets=sets)
        return self._entry(pair, iterations=iterations, sets=sets)

    def instrument_us(self, regime: Regime, *, sets: int) -> float:
        """See `Timer`. Steady: a graph of one empty kernel in place of each graph of pairs, shared out over the pairs;
        by itself where graphs of pairs were. Collective.
        Entry: the common start and the stamp, with nothing between. Spans: the profiler times kernels by themselves.
        """
        if regime is Regime.SPANS:
            return 0.0
        if regime is Regime.STEADY:
            last = self._steady
            run = self._runner("empty", 1, sets, self._device.empty)
            if last.held:
                return round(self._held_us(run, last.enqueue_us, last.replays) / last.size, 4)
            self._device.hold(HOLD_US)
            run()
            first = self._device.mark()
            for _ in range(last.replays):
                run()
            return round(self._device.elapsed_us(first, self._device.mark()) / (last.size * last.replays), 4)
        count = INSTRUMENT_ITERATIONS
        stamps = self._stamped("instrument", 2, count, sets, lambda slot, _: self._between(slot, lambda: None))
        return round(statistics.median((b - a) / NS_PER_US for a, b in zip(stamps[::2], stamps[1::2], strict=True)), 4)

    def replayable(self, name: str, enqueue: Callable[[], None]) -> Callable[[], None]:
        """What runs all that `enqueue` enqueues: its graph, captured when first asked for under this name, if the
        backend can be captured. Until `close`."""
        return self._runner(name, 1, 1, enqueue)

    def close(self) -> None:
        """See `Timer`. Graphs hold addresses of the backend's buffers, so they go first."""
        self._graphs.clear()

    def _entry(self, pair: Pair, *, iterations: int, sets: int) -> Series:
        device = self._device

        def phases(slot: int, s: int) -> None:
            self._start(slot)
            pair.dispatch(s)
            device.stamp(slot + 1)
            pair.experts(s)
            device.stamp(slot + 2)
            pair.combine(s)
            device.stamp(slot + 3)

        before = device.measure_offset()
        parts = self._stamped("phases", 4, iterations, sets, phases)
        whole = self.entry_whole(pair, iterations=iterations, sets=sets, before=before)  # last: its sums are checked
        values_us: dict[Phase, list[float]] = {
            Phase.DISPATCH: _differences_us(parts[0::4], parts[1::4]),
            Phase.COMBINE: _differences_us(parts[2::4], parts[3::4]),
        }
        return replace(whole, values_us={**values_us, **whole.values_us})

    def entry_whole(self, pair: Pair, *, iterations: int, sets: int, before: ClockOffset | None = None) -> Series:
        """Pairs from a common start without stamps inside; `before` is what clocks were compared at, if they were."""

        def whole(slot: int, s: int) -> None:
            self._between(slot, lambda: _pair(pair, s))

        before = before or self._device.measure_offset()
        stamps = self._stamped("entry", 2, iterations, sets, whole)
        after = self._device.measure_offset()
        drift_ns = abs(after.offset_ns - before.offset_ns)
        starts = stamps[::2]
        return Series(
            values_us={Phase.ROUND_TRIP: _differences_us(starts, stamps[1::2])},
            starts_ns=[start - before.offset_ns for start in starts],  # as `line_up` saw it
            pairs=iterations,
            clock_error_us=(max(before.error_ns, after.error_ns) + drift_ns) / NS_PER_US,
        )

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
        self._line_up()
        device.kernel_spans(held(hold_us))  # the profiler's own start, and kernels that are loaded when first called
        self._line_up()
        begin = time.perf_counter()
        enqueue()
        took_us = (time.perf_counter() - begin) * 1e6
        hold_us = max(hold_us, PROFILER_SLOWDOWN * took_us)
        self._line_up()
        return device.kernel_spans(held(hold_us)), pairs

    def _stamped(
        self, name: str, slots: int, iterations: int, sets: int, enqueue: Callable[[int, int], None]
    ) -> list[int]:
        """Stamps of `iterations` runs of `enqueue(first slot, set)`, after a whole fill of them."""

        def some_of_them(first: int, last: int) -> Callable[[], None]:
            def run() -> None:
                for i in range(first, last):
                    enqueue(slots * i, i % sets)

            return run

        bounds = [*range(0, iterations, ENTRY_ITERATIONS), iterations]
        runs = [
            self._runner(f"{name} {first}", last - first, sets, some_of_them(first, last))
            for first, last in pairwise(bounds)
        ]
        self._line_up()
        with self._device.range(f"{name} {iterations}"):
            for run in (*runs, *runs):
                run()
            self._device.synchronize()
        return list(self._device.stamps_ns(slots * iterations))

    def _runner(self, name: str, size: int, sets: int, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Runs what `enqueue` enqueues: by replaying its graph, captured once, or by enqueuing it again."""
        if not self._captures:
            return enqueue
        key = (name, size, sets)
        if key not in self._graphs:
            self._graphs[key] = self._device.capture(enqueue)
        return self._graphs[key].replay

    def _start(self, slot: int) -> None:
        self._device.flush_cache()
        if not self._captures:
            self._device.hold(HOLD_US)
        self._device.line_up(slot)

    def _between(self, slot: int, enqueue: Callable[[], None]) -> None:
        self._start(slot)
        enqueue()
        self._device.stamp(slot + 1)

    def _line_up(self) -> None:
        """No rank enqueues a wait for peers that are still capturing or reading."""
        self._device.synchronize()
        self._group.barrier()


def _pair(pair: Pair, s: int) -> None:
    pair.dispatch(s)
    pair.experts(s)
    pair.combine(s)


def _chain(pair: Pair, pairs: int, sets: int) -> None:
    for i in range(pairs):
        _pair(pair, i % sets)


def _differences_us(begins: list[int], ends: list[int]) -> list[float]:
    return [(end - begin) / NS_PER_US for begin, end in zip(begins, ends, strict=True)]
