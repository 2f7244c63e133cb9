"""The entry regime on a GPU: pairs from a common start, in graphs that are enqueued whole before they run.

graph    |flush|line up, stamp|pair|stamp|  ...                                      once for each iteration
series   |hold|graph| read stamps  |hold|graph| read stamps  ...                     a fill, and once more to count
phases   the same with stamps around each phase, which cost time: a series of its own, for dispatch and combine

Pairs of kernels with large arguments take longer in long graphs, the longer the later they come: on two H200s, with no
hold, one of NCCL's collectives took 40 us in the second iteration of a graph of 20, 59 in the last, and 18 in a chain.
So each unit takes graphs of one iteration if it is faster in those, as `steady` takes short ones (`GRAPH_US` of
cuda_steady.py).

A host that is late before a graph only delays its common start; one that is late within a graph is timed. So the GPU is
held before every graph, of either length, until all of it is enqueued, and is idle before, so that the queue has room.
Stamps are read after each graph: one graph serves all iterations that begin with the same set.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

from epcross.harness.backends.base import Group
from epcross.harness.measuring.cuda_steady import FASTER, HOLD_US, Graphs, run_pair
from epcross.harness.measuring.device import ClockOffset, Device
from epcross.harness.measuring.timing import NS_PER_US, Pair, Series, of_all_ranks
from epcross.harness.terms import GraphSupport, Phase

ENTRY_ITERATIONS = 20
"""Of one graph, unless the unit is faster in graphs of one: no longer than an engine's."""

SHORT_ITERATIONS = 8
"""As many graphs of one iteration are compared with one of `ENTRY_ITERATIONS`, in each round."""

SETTLE_ROUNDS = 2
"""The least median of a length's rounds counts, so neither wins because something held up the other's host once."""

LONGEST_US = 10_000.0
"""Pairs that take longer are not compared, which would take long: the most that a long graph was seen to add to its
last iteration, 116 us of NCCL EP HT, is about as much of them as `FASTER` asks for."""

LEAST_HOLD_US, MOST_HOLD_US = 20.0, 20_000.0
"""The GPU is held before a graph for the first and twice the least that enqueuing one like it took the host so far: the
first replay uploads the graph, a host may be late once, and one that waits for the GPU, as with CUDA_LAUNCH_BLOCKING=1,
would be held for longer and longer. At most for the second: a hold cannot be interrupted, and a graph of 20 pairs takes
some milliseconds to enqueue. Before the first of its kind it is `HOLD_US`, which may be too short: that one never
counts alone."""

INSTRUMENT_ITERATIONS = 64

Enqueue = Callable[[int, int], None]
"""Enqueues an iteration, given its first slot and its set."""


class EntryTimer:
    """Times pairs one by one; see `CudaTimer`, which has one."""

    def __init__(self, device: Device, group: Group, *, graph: GraphSupport) -> None:
        self._device, self._group = device, group
        self._graphs = {length: Graphs(device, group, graph=graph) for length in (1, ENTRY_ITERATIONS)}
        self._captures = self._graphs[1].captures
        self._settled = not self._captures
        self.length = ENTRY_ITERATIONS
        self._enqueue_us: dict[tuple[str, int], float] = {}  # by name and iterations, which sets do not change

    def series(self, pair: Pair, *, iterations: int, sets: int) -> Series:
        """Phases, and pairs as a whole. Collective."""
        device = self._device

        def phases(slot: int, s: int) -> None:
            self._start(slot)
            pair.dispatch(s)
            device.stamp(slot + 1)
            pair.experts(s)
            device.stamp(slot + 2)
            pair.combine(s)
            device.stamp(slot + 3)

        self._settle(pair, iterations, sets)
        before = device.measure_offset()
        parts = self._stamped("phases", 4, iterations, sets, phases)
        whole = self.whole(pair, iterations=iterations, sets=sets, before=before)  # last: its sums are checked
        values_us: dict[Phase, list[float]] = {
            Phase.DISPATCH: _differences_us(parts[0::4], parts[1::4]),
            Phase.COMBINE: _differences_us(parts[2::4], parts[3::4]),
        }
        return replace(whole, values_us={**values_us, **whole.values_us})

    def whole(self, pair: Pair, *, iterations: int, sets: int, before: ClockOffset | None = None) -> Series:
        """Pairs without stamps inside; `before` is what clocks were compared at, if they were. Collective."""
        self._settle(pair, iterations, sets)
        before = before or self._device.measure_offset()
        stamps = self._stamped("entry", 2, iterations, sets, self._of_pair(pair))
        after = self._device.measure_offset()
        drift_ns = abs(after.offset_ns - before.offset_ns)
        starts = stamps[::2]
        return Series(
            values_us={Phase.ROUND_TRIP: _differences_us(starts, stamps[1::2])},
            starts_ns=[start - before.offset_ns for start in starts],  # as `line_up` saw it
            pairs=iterations,
            clock_error_us=(max(before.error_ns, after.error_ns) + drift_ns) / NS_PER_US,
            graph_pairs=min(self.length, iterations) if self._captures else None,
        )

    def instrument_us(self, sets: int) -> float:
        """The common start and the stamp, with nothing between. Collective."""
        stamps = self._stamped(
            "instrument", 2, INSTRUMENT_ITERATIONS, sets, lambda slot, _: self._between(slot, lambda: None)
        )
        return round(statistics.median(_differences_us(stamps[::2], stamps[1::2])), 4)

    def close(self) -> None:
        """Graphs hold addresses of the backend's buffers, so they go first."""
        for graphs in self._graphs.values():
            graphs.clear()

    def _settle(self, pair: Pair, iterations: int, sets: int) -> None:
        """Choose the length of graphs, for good, and keep those of that length only. Collective."""
        if self._settled:
            return
        self._settled = True
        self.length = 1 if self._is_faster_alone(pair, iterations, sets) else ENTRY_ITERATIONS
        for length, graphs in self._graphs.items():
            if length != self.length:
                graphs.clear()

    def _is_faster_alone(self, pair: Pair, iterations: int, sets: int) -> bool:
        """Whether pairs are faster in graphs of one iteration, on the slowest rank. Collective."""
        compared = {1: SHORT_ITERATIONS, ENTRY_ITERATIONS: min(ENTRY_ITERATIONS, iterations)}
        least_us = dict.fromkeys(compared, math.inf)
        for _ in range(SETTLE_ROUNDS):
            for length, count in compared.items():
                stamps = self._replayed("entry", 2, count, sets, self._of_pair(pair), length=length)
                own_us = statistics.median(_differences_us(stamps[::2], stamps[1::2]))
                least_us[length] = min(least_us[length], max(of_all_ranks(self._group, own_us)))
                if least_us[length] > LONGEST_US:
                    return False
        return least_us[1] < FASTER * least_us[ENTRY_ITERATIONS]

    def _stamped(self, name: str, slots: int, iterations: int, sets: int, enqueue: Enqueue) -> list[int]:
        """Stamps of `iterations` runs of `enqueue`, after a fill of as many. Collective."""
        with self._device.range(f"{name} {iterations}"):
            stamps = self._replayed(name, slots, iterations, sets, enqueue, length=self.length, rounds=2)
        return stamps[slots * iterations :]

    def _replayed(
        self, name: str, slots: int, iterations: int, sets: int, enqueue: Enqueue, *, length: int, rounds: int = 1
    ) -> list[int]:
        """Stamps of `rounds` times `iterations` runs of `enqueue`, in graphs of `length` of them. Collective."""
        device, graphs = self._device, self._graphs[length]

        def runner(first: int) -> tuple[Callable[[], None], int]:
            count, first_set = min(length, iterations - first), first % sets

            def run() -> None:
                for i in range(count):
                    enqueue(slots * i, (first_set + i) % sets)

            return graphs.runner(f"{name} from set {first_set}", count, sets, run), count

        runs = [runner(first) for first in range(0, iterations, length)]
        graphs.line_up()
        stamps: list[int] = []
        for run, count in runs * rounds:
            least_us = self._enqueue_us.get((name, count), math.inf)
            if self._captures:
                device.hold(_hold_us(least_us))
            self._enqueue_us[name, count] = min(least_us, device.host_us(run))
            stamps += device.stamps_ns(slots * count)
        return stamps

    def _of_pair(self, pair: Pair) -> Enqueue:
        return lambda slot, s: self._between(slot, lambda: run_pair(pair, s))

    def _start(self, slot: int) -> None:
        self._device.flush_cache()
        if not self._captures:
            self._device.hold(HOLD_US)
        self._device.line_up(slot)

    def _between(self, slot: int, enqueue: Callable[[], None]) -> None:
        self._start(slot)
        enqueue()
        self._device.stamp(slot + 1)


def _hold_us(enqueue_us: float) -> float:
    """Before a graph that takes the host so long to enqueue; infinite where that is not known."""
    return HOLD_US if math.isinf(enqueue_us) else min(LEAST_HOLD_US + 2 * enqueue_us, MOST_HOLD_US)


def _differences_us(begins: list[int], ends: list[int]) -> list[float]:
    return [(end - begin) / NS_PER_US for begin, end in zip(begins, ends, strict=True)]
