"""One GPU's queue, as timing sees it: the seam between how a pair is timed and the library that talks to the GPU."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class Replay(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Enqueue everything that was captured, again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpan:
    """One kernel (or copy, or fill) as the profiler saw it, and the range that its launch lies in."""

    name: str
    range: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """This GPU's timer minus that of process 0's GPU, and how far off that may be."""

    offset_ns: int = 0
    error_ns: int = 0


class Device(Protocol):
    """What is enqueued runs in order. Slots number the stamps of a series; each is written once for each replay."""

    def measure_offset(self) -> ClockOffset:
        """Compare this GPU's timer with process 0's now; common starts go by it from here on. Collective."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """A graph of what `enqueue` enqueues; nothing of it runs yet."""
        ...

    def host_us(self, enqueue: Callable[[], None]) -> float:
        """Enqueue, and say how long that took the host."""
        ...

    def mark(self) -> Any:
        """A point in the queue, for `elapsed_us`."""
        ...

    def elapsed_us(self, first: Any, last: Any) -> float:
        """Time between two marks. Waits for the second."""
        ...

    def synchronize(self) -> None:
        """Wait until everything enqueued has run. Raises `WaitExpired` if a common start did not come about."""
        ...

    def line_up(self, slot: int) -> None:
        """Enqueue a common start of all processes, stamped. Collective."""
        ...

    def stamp(self, slot: int) -> None:
        """Enqueue a stamp."""
        ...

    def stamps_ns(self, count: int) -> Sequence[int]:
        """The first `count` slots, in nanoseconds of this GPU's timer. Waits for the queue."""
        ...

    def flush_cache(self) -> None:
        """Enqueue a write of more than the second-level cache holds."""
        ...

    def hold(self, duration_us: float) -> None:
        """Enqueue a kernel that takes this long: what is enqueued meanwhile follows without gaps of the host."""
        ...

    def empty(self) -> None:
        """Enqueue a kernel that does nothing."""
        ...

    def kernel_spans(self, run: Callable[[], None]) -> Sequence[KernelSpan]:
        """What ran on the GPU during `run`, by the profiler; empty if it gives nothing."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """Name what is enqueued inside, for `kernel_spans` and for a profiler outside."""
        ...
