"""A GPU's queue on the CPU: everything runs at once when enqueued, on a clock of the test's choice."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from epcross.harness.measuring.device import ClockOffset, KernelSpan


class FakeReplay:
    def __init__(self, enqueue: Callable[[], None], device: "FakeDevice") -> None:
        self.enqueue, self.device = enqueue, device

    def replay(self) -> None:
        self.device.log.append("replay")
        self.device.starts = 0
        self.device.advance(self.device.replay_us)
        begin = self.device.clock()
        self.enqueue()
        self.device.advance(self.device.long_graph_us(self.device.clock() - begin))


class FakeDevice:
    """`clock` gives nanoseconds; `advance(us)` lets that much time pass, which a real clock does by itself."""

    def __init__(
        self,
        clock: Callable[[], int],
        *,
        advance: Callable[[float], None] = lambda us: None,
        replay_us: float = 0.0,
        stamp_us: float = 0.0,
        enqueue_us: float = 0.0,
        offset: ClockOffset | None = None,
    ) -> None:
        self.clock, self.advance = clock, advance
        self.replay_us, self.stamp_us, self.enqueue_us = replay_us, stamp_us, enqueue_us
        self.long_graph_us: Callable[[int], float] = lambda lasts_ns: 0.0  # what a graph takes beside its pairs
        self.offset = offset or ClockOffset()
        self.drift_ns = 0  # from one comparison of clocks to the next
        self.log: list[str] = []
        self.held_us: list[float] = []
        self.slots: dict[int, int] = {}
        self.captured = 0
        self.graphs: weakref.WeakSet[FakeReplay] = weakref.WeakSet()  # those that somebody keeps
        self.starts = 0  # common starts since the last replay began
        self.ranges: list[str] = []
        self.spans: list[KernelSpan] = []

    def measure_offset(self) -> ClockOffset:
        now = self.offset
        self.offset = ClockOffset(offset_ns=now.offset_ns + self.drift_ns, error_ns=now.error_ns)
        return now

    def capture(self, enqueue: Callable[[], None]) -> FakeReplay:
        self.captured += 1
        graph = FakeReplay(enqueue, self)
        self.graphs.add(graph)
        return graph

    def host_us(self, enqueue: Callable[[], None]) -> float:
        enqueue()
        return self.enqueue_us

    def mark(self) -> int:
        return self.clock()

    def elapsed_us(self, first: int, last: int) -> float:
        return (last - first) / 1e3

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def line_up(self, slot: int) -> None:
        self.log.append("line_up")
        self.starts += 1
        self.stamp(slot)

    def stamp(self, slot: int) -> None:
        self.advance(self.stamp_us)
        self.slots[slot] = self.clock()

    def stamps_ns(self, count: int) -> Sequence[int]:
        return [self.slots[slot] for slot in range(count)]

    def flush_cache(self) -> None:
        self.log.append("flush")

    def hold(self, duration_us: float) -> None:
        self.log.append("hold")
        self.held_us.append(duration_us)

    def empty(self) -> None:
        self.advance(self.stamp_us)

    def kernel_spans(self, run: Callable[[], None]) -> Sequence[KernelSpan]:
        self.spans = []
        run()
        return self.spans

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        begin = self.clock()
        yield
        self.spans.append(KernelSpan(name="k", range=name, begin_us=begin / 1e3, end_us=self.clock() / 1e3))
