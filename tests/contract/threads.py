"""Ranks as threads of one process with an in-memory group: enough to run the contract, and fast."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from epcross.harness.errors import GroupError

T = TypeVar("T")


@dataclass
class Shared:
    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    rounds: list[dict[int, bytes]] = field(default_factory=list)
    aborted: str = ""


class ThreadGroup:
    """`Group` for one thread."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.size, self._shared, self._round = rank, shared.size, shared, 0

    def barrier(self, timeout_s: float | None = None) -> None:
        self.all_gather(b"", timeout_s)

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        shared, number = self._shared, self._round
        self._round += 1
        with shared.changed:
            if number == len(shared.rounds):
                shared.rounds.append({})
            mine = shared.rounds[number]
            mine[self.rank] = data
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: len(mine) == self.size or shared.aborted, timeout_s)
            if len(mine) == self.size:
                return [mine[rank] for rank in range(self.size)]
            missing = sorted(set(range(self.size)) - set(mine))
            raise GroupError(shared.aborted or f"ranks {missing} did not come within {timeout_s} s")

    def abort(self, reason: str) -> None:
        with self._shared.changed:
            self._shared.aborted = self._shared.aborted or f"rank {self.rank} aborted: {reason}"
            self._shared.changed.notify_all()

    @property
    def shared_name(self) -> str:
        return f"threads_{id(self._shared):x}"

    def torch(self, backend: str) -> object:
        raise NotImplementedError("threads have no torch group")


def on_ranks(size: int, work: Callable[[ThreadGroup], T], timeout_s: float = 60) -> list[T | None]:
    """`work`'s result on every rank; None where it did not return in time."""
    shared = Shared(size)
    results: list[T | None] = [None] * size

    def run(rank: int) -> None:
        results[rank] = work(ThreadGroup(rank, shared))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return results
