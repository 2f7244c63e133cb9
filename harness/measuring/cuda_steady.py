"""The steady regime on a GPU: pairs back to back in graphs, replayed in a chain.

chain    |fill|replay|replay| ... |                           period = time / pairs
held     |hold|line up|replay|  |hold|line up|replay| ...     where the host is slower than the GPU
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from epcross.harness.backends.base import Group
from epcross.harness.measuring.device import Device, Replay
from epcross.harness.measuring.timing import Pair, Series, of_all_ranks
from epcross.harness.terms import GraphSupport, Phase

WARM_PAIRS, MOST_PAIRS = 20, 200
"""Pairs of one steady graph: before their time is known, and at most."""

GRAPH_US, SHORT_GRAPH_US = 1000.0, 100.0
"""About how long a steady graph lasts, and a short one. In a long one the gap between two replays, of a microsecond or
two, is 0.2 %. But a graph of kernels with large arguments is not enqueued whole while the one before it runs, and the
chain takes longer the longer its graphs are: on two H200s a pair of NCCL's collectives took 20 us in graphs of 5 pairs,
32 of 20, 39 of 100, 54 of 200 (tests/benchmark/gpu_graphs.py). So each unit takes what its chain is faster in."""

FASTER = 0.99
"""Short graphs are taken if pairs take less than this share of the time in them. Where both take as long, either number
is right; with 0.95 some launches took graphs that were 4 % slower, and others did not."""

SETTLE_US, SETTLE_CHAINS = 5000.0, 3
"""About how long each compared chain lasts, and how many there are of a kind, in turn. The least of them counts,
so neither wins because something held up the other's host once."""

HOST_SHARE = 0.8
"""If enqueuing takes a larger share of the time that the GPU takes, a chain of replays may be timing the host. On two
H200s a pair of NCCL's collectives took 35 us, its kernels 14, and the host as long as the GPU."""

HELD_REPLAYS = 10

HOLD_US = 300.0
"""Longer than Python takes to enqueue one pair and its stamps, or a few replays."""


class Graphs:
    """What is captured of a unit, or called in a loop where nothing can be captured."""

    def __init__(self, device: Device, group: Group, *, graph: GraphSupport) -> None:
        self.device, self.group = device, group
        self.captures = graph is not GraphSupport.NO
        self._kept: dict[tuple[str, int, int], Replay] = {}

    def runner(self, name: str, size: int, sets: int, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Runs what `enqueue` enqueues: by replaying its graph, captured once, or by enqueuing it again."""
        if not self.captures:
            return enqueue
        key = (name, size, sets)
        if key not in self._kept:
            self._kept[key] = self.device.capture(enqueue)
        return self._kept[key].replay

    def line_up(self) -> None:
        """No rank enqueues a wait for peers that are still capturing or reading. Collective."""
        self.device.synchronize()
        self.group.barrier()

    def clear(self) -> None:
        """They hold addresses of the backend's buffers, so they go before it."""
        self._kept.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """How the last steady series was timed."""

    size: int = WARM_PAIRS  # pairs of a graph
    replays: int = 1
    held: bool = False
    enqueue_us: float = 0.0  # of a graph


class SteadyTimer:
    """Times chains of pairs; see `CudaTimer`, which has one."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs, self._device, self._group = graphs, graphs.device, graphs.group
        self.graph_pairs = WARM_PAIRS
        self._pair_us: float | None = None
        self._settled = False
        self._last = _Last()
        self._slower_hosts: dict[int, bool] = {}

    def expect(self, pair_us: float) -> None:
        """Size the graphs, once: later seeds replay those that are captured."""
        if self._pair_us is None:
            self._pair_us = max(pair_us, 1e-3)
            self._slower_hosts.clear()  # so far clocks, links and the host were cold: it counts for no series to come
            self.graph_pairs = max(1, min(MOST_PAIRS, round(GRAPH_US / self._pair_us)))

    def series(self, pair: Pair, *, pairs: int, sets: int, name: str) -> Series:
        """A graph is replayed until at least `pairs` have run; `name` tells other pairs' graphs apart."""
        several = pairs > _whole(self.graph_pairs, sets)  # else one graph is all
        if self._pair_us is not None and not self._settled and several:
            self._settle(pair, self._pair_us, sets)
        run, size, replays = self._planned(pair, pairs, sets, name)
        with self._device.range(f"{name} {replays} x {size} pairs"):
            period_us, enqueue_us = self._chained_us(run, size, replays)
            held = self._graphs.captures and self._host_is_slower(size, enqueue_us / max(period_us, 1e-3))
            if held:
                replays = min(replays, HELD_REPLAYS)
                period_us = self._held_us(run, size * enqueue_us, replays) / size
        self._last = _Last(size=size, replays=replays, held=held, enqueue_us=size * enqueue_us)
        return Series(
            values_us={Phase.ROUND_TRIP: [period_us]},
            starts_ns=[0],
            pairs=size * replays,
            enqueue_us=enqueue_us if self._graphs.captures else None,
            held=held if self._graphs.captures else None,
            graph_pairs=size if self._graphs.captures else None,
        )

    def chain(self, pair: Pair, *, pairs: int, sets: int) -> int:
        """Run at least `pairs` pairs as `steady` does, each set equally often, and wait for them; how many they were.
        Nothing is timed. Collective."""
        run, size, replays = self._planned(pair, pairs, sets, "steady")
        self._graphs.line_up()
        for _ in range(replays):
            run()
        self._device.synchronize()
        return size * replays

    def instrument_us(self, sets: int) -> float:
        """A graph of one empty kernel in place of each graph of the last series, shared out over its pairs; by itself
        where those were. Collective."""
        last = self._last
        run = self._graphs.runner("empty", 1, sets, self._device.empty)
        if last.held:
            return round(self._held_us(run, last.enqueue_us, last.replays) / last.size, 4)
        self._device.hold(HOLD_US)
        run()
        first = self._device.mark()
        for _ in range(last.replays):
            run()
        return round(self._device.elapsed_us(first, self._device.mark()) / (last.size * last.replays), 4)

    def _planned(self, pair: Pair, pairs: int, sets: int, name: str) -> tuple[Callable[[], None], int, int]:
        """What runs a graph of pairs, how many it has, and how often it runs for at least `pairs`."""
        size = _whole(min(pairs, self.graph_pairs), sets)
        return self._graphs.runner(name, size, sets, lambda: _chain(pair, size, sets)), size, -(-pairs // size)

    def _chained_us(self, run: Callable[[], None], size: int, replays: int) -> tuple[float, float]:
        """What a pair takes in a chain of replays of a graph of `size` pairs, and enqueuing it. Collective."""
        device = self._device
        self._graphs.line_up()
        # a first replay uploads its graph, which takes the host longer than few pairs take the GPU: without the hold a
        # short series would time the host
        device.hold(HOLD_US)
        run()  # the fill: a whole graph, so that replays are enqueued while the GPU is busy
        first = device.mark()
        enqueue_us = device.host_us(run) / size  # behind the fill, so that the queue has room
        for _ in range(replays - 1):
            run()
        last = device.mark()
        period_us = device.elapsed_us(first, last) / (size * replays)
        device.synchronize()
        return period_us, enqueue_us

    def _settle(self, pair: Pair, pair_us: float, sets: int) -> None:
        """Take short graphs, for good, if a chain of them is faster on the slowest rank. Collective."""
        self._settled = True
        sizes = _whole(self.graph_pairs, sets), _whole(max(1, round(SHORT_GRAPH_US / pair_us)), sets)
        if not self._graphs.captures or sizes[1] >= sizes[0]:
            return
        least_us = [math.inf, math.inf]
        for _ in range(SETTLE_CHAINS):
            for i, size in enumerate(sizes):
                run = self._graphs.runner("steady", size, sets, lambda size=size: _chain(pair, size, sets))
                own_us, _ = self._chained_us(run, size, -(-round(SETTLE_US / pair_us) // size))
                slowest_us = max(of_all_ranks(self._group, own_us))
                least_us[i] = min(least_us[i], slowest_us)
        if least_us[1] < FASTER * least_us[0]:
            self.graph_pairs = sizes[1]

    def _host_is_slower(self, size: int, share: float) -> bool:
        """Whether that is so on any rank. The first series of graphs of a size decides, so that all of a unit are timed
        alike: its repeats, and what is subtracted from each other. Collective."""
        if size not in self._slower_hosts:
            self._slower_hosts[size] = max(of_all_ranks(self._group, share)) > HOST_SHARE
        return self._slower_hosts[size]

    def _held_us(self, run: Callable[[], None], enqueue_us: float, replays: int) -> float:
        """Median time of a replay by itself: all of it is enqueued before any runs, and ranks start together. What the
        first pair waits for nobody and the last for no next one is spread over all pairs of the graph. Collective."""
        device, times = self._device, []
        for _ in range(replays):
            self._graphs.line_up()
            device.hold(HOLD_US + 2 * enqueue_us)
            device.line_up(0)
            first = device.mark()
            run()
            times.append(device.elapsed_us(first, device.mark()))
            device.synchronize()
        return statistics.median(times)


def _whole(pairs: int, sets: int) -> int:
    """As many pairs or a few more, each set equally often."""
    return -(-pairs // sets) * sets


def _chain(pair: Pair, pairs: int, sets: int) -> None:
    for i in range(pairs):
        run_pair(pair, i % sets)


def run_pair(pair: Pair, s: int) -> None:
    """Enqueue one, with the inputs of a set."""
    pair.dispatch(s)
    pair.experts(s)
    pair.combine(s)
