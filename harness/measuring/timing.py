"""How a pair is timed on the CPU: the two regimes, one loop for every backend.

    steady   |fill|pair|pair|pair| ... |pair|        period = (end - begin) / pairs, each rank by itself
    entry    line up, agree on a start time, spin until it, pair; once per iteration

Both read CLOCK_MONOTONIC, which all processes of one host share, so stamps of different ranks can be subtracted.
The loop, the calls and the stamps are the same for every backend; `EmptyPair` sent through them gives the cost of
the instrument itself.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from epcross.harness.backends.base import Group
from epcross.harness.errors import WaitExpired
from epcross.harness.terms import Phase
from epcross.kernels.shm.segment import attach, reserve

NS_PER_US = 1000.0
START_MARGIN_NS = 30_000
"""Time between agreeing on a start and the start: longer than it takes every rank to read it."""

OVERSUBSCRIBED_MARGIN_NS = 300_000
"""The same when ranks outnumber cores: a rank may have to be scheduled first."""


class Pair(Protocol):
    """What is timed."""

    def dispatch(self, set_index: int, /) -> None:
        """Send one set's rows."""
        ...

    def experts(self, set_index: int, /) -> None:
        """Write the partials."""
        ...

    def combine(self, set_index: int, /) -> None:
        """Return and add them."""
        ...


class EmptyPair:
    """A pair that does nothing: what it costs to be timed."""

    def dispatch(self, set_index: int, /) -> None:
        """Nothing."""

    def experts(self, set_index: int, /) -> None:
        """Nothing."""

    def combine(self, set_index: int, /) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one rank saw in one timed series."""

    values_us: dict[Phase, list[float]]  # steady: one period; entry: one value an iteration
    starts_ns: list[int]  # entry: this rank's actual start of each iteration, on a clock that all ranks share
    pairs: int
    clock_error_us: float = 0.0  # by how much that clock may be off between ranks
    enqueue_us: float | None = None  # what the host takes to enqueue a pair, where that was measured
    graph_pairs: int | None = None  # of one graph
    held: bool | None = None  # whether the GPU was held until all of it was enqueued, since the host is slower


def of_all_ranks(group: Group, value: float) -> list[float]:
    """What each rank gives, rank 0 first; to the last bit. Collective."""
    return [float(item) for item in group.all_gather(repr(value).encode())]


class Line(Protocol):
    """Where ranks agree on when to start."""

    def next_start_ns(self) -> int:
        """The next common start, in the clock's nanoseconds. Collective."""
        ...


class StartLine:
    """Ranks of one host line up and start together.

    A small shared mapping holds one word a rank (iterations finished) and one word with the next start time. Each
    word is data and flag at once, so no ordering between words is needed. Collective to create; unlinked as soon as
    every rank has mapped it, so nothing is left behind whatever happens later.
    """

    _WORDS_PER_LINE = 8  # a cache line each, so that spinning on one word does not slow another

    def __init__(
        self,
        group: Group,
        *,
        oversubscribed: bool,
        limit_s: float,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._group = group
        self._clock = clock
        self._limit_ns = int(limit_s * 1e9)
        self._yield = os.sched_yield if oversubscribed else _no_yield
        self._margin_ns = OVERSUBSCRIBED_MARGIN_NS if oversubscribed else START_MARGIN_NS
        self._rounds = 0
        self._last_start_ns = 0
        size_bytes = (group.size + 1) * self._WORDS_PER_LINE * 8
        own = reserve(f"{group.shared_name}_start", 0, size_bytes) if group.rank == 0 else None
        name = group.all_gather(own.name.encode() if own else b"")[0].decode()
        self._segment = own or attach(name, size_bytes)
        group.barrier()  # every rank has mapped it: the name may go
        self._segment.unlink()
        self._words = memoryview(self._segment.buffer).cast("q")

    def next_start_ns(self) -> int:
        """Wait for every rank, agree on a start, and return it; the caller spins until then."""
        line, words = self._WORDS_PER_LINE, self._words
        rank, size = self._group.rank, self._group.size
        self._rounds += 1
        words[(rank + 1) * line] = self._rounds
        if rank == 0:
            for peer in range(1, size):
                self._spin(lambda peer=peer: words[(peer + 1) * line] >= self._rounds, peer)
            self._last_start_ns = self._clock() + self._margin_ns
            words[0] = self._last_start_ns
        else:
            last = self._last_start_ns
            self._spin(lambda: words[0] > last, 0)
            self._last_start_ns = words[0]
        return self._last_start_ns

    def _spin(self, arrived: Callable[[], bool], peer: int) -> None:
        deadline_ns = self._clock() + self._limit_ns
        while not arrived():
            self._yield()
            if self._clock() > deadline_ns:
                raise WaitExpired(
                    f"rank {self._group.rank} waited {self._limit_ns / 1e9:g} s for rank {peer} at the common start "
                    f"number {self._rounds}: that rank is stuck, stopped or gone"
                )

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._segment.close()


def steady_series(
    pair: Pair, *, pairs: int, sets: int, line: Line, clock: Callable[[], int] = time.monotonic_ns
) -> Series:
    """One chain of `pairs` pairs, back to back, after a fill of one pair for each set. Collective.

    No barrier, stamp or allocation of ours lies inside. Ranks need not start together: the chain couples them.
    """
    dispatch, experts, combine = pair.dispatch, pair.experts, pair.combine
    order = [i % sets for i in range(pairs)]
    _wait_until(line.next_start_ns(), clock)
    with _no_collection():
        for s in range(sets):
            dispatch(s)
            experts(s)
            combine(s)
        begin = clock()
        for s in order:
            dispatch(s)
            experts(s)
            combine(s)
        end = clock()
    period_us = (end - begin) / NS_PER_US / pairs
    return Series(values_us={Phase.ROUND_TRIP: [period_us]}, starts_ns=[begin], pairs=pairs)


def entry_series(
    pair: Pair, *, iterations: int, sets: int, line: Line, clock: Callable[[], int] = time.monotonic_ns
) -> Series:
    """`iterations` single pairs, each from a common start. Collective.

    dispatch and round_trip count from the common start, so a rank that starts late shows it; combine counts from
    the moment this rank's partials were written.
    """
    dispatch, experts, combine = pair.dispatch, pair.experts, pair.combine
    phases: tuple[list[float], list[float], list[float]] = ([], [], [])
    starts: list[int] = []
    with _no_collection():
        for i in range(iterations):
            s = i % sets
            start = line.next_start_ns()
            _wait_until(start, clock)
            t0 = clock()
            dispatch(s)
            t1 = clock()
            experts(s)
            t2 = clock()
            combine(s)
            t3 = clock()
            starts.append(t0)
            phases[0].append((t1 - start) / NS_PER_US)
            phases[1].append((t3 - t2) / NS_PER_US)
            phases[2].append((t3 - start) / NS_PER_US)
    values_us: dict[Phase, list[float]] = {
        Phase.DISPATCH: phases[0],
        Phase.COMBINE: phases[1],
        Phase.ROUND_TRIP: phases[2],
    }
    return Series(values_us=values_us, starts_ns=starts, pairs=iterations)


def pairs_for(chain_ms: float, pair_us: float, *, min_pairs: int, max_pairs: int, sets: int) -> int:
    """How many pairs a chain of about `chain_ms` needs: within the bounds, and each set equally often."""
    wanted = chain_ms * 1000.0 / pair_us if pair_us > 0 else max_pairs
    pairs = int(min(max(wanted, min_pairs), max_pairs))
    return max(-(-pairs // sets) * sets, sets)


def more_warmup(warmup_ms: float, pair_us: float, done: int) -> int:
    """Pairs that are still to run, once `done` have, for a warm-up of `warmup_ms`."""
    return max(0, math.ceil(warmup_ms * 1000.0 / pair_us) - done) if pair_us > 0 else 0


def _wait_until(start_ns: int, clock: Callable[[], int]) -> None:
    while clock() < start_ns:
        pass


def _no_yield() -> None:
    """Spin on: the rank has a core of its own."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's cyclic collector, which may stop a rank for milliseconds, out of the window."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
