"""Ranks as threads, with a torch group that libraries which are not here can be imitated over.

The imitations hold to what the libraries document (layout, who multiplies, what is delivered) and scramble what they do
not promise: rows come in another order in each call, and what no row fills is garbage.
"""

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from tests.contract.threads import Shared, ThreadGroup

from epcross.harness.verification.cases import Case
from epcross.harness.verification.contract import run_case
from epcross.harness.verification.gpu_contract import GpuVisit

LIMIT_S = 60.0
"""For a step of ranks that all come to it; only a rank that is lost waits so long."""


class Meeting:
    """Where threads exchange objects; the n-th call of each meets the n-th of the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, given: Any) -> list[Any]:
        self._given[rank] = given
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything


class TorchGroup:
    """What a library is given as a torch process group."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.size

    def exchange(self, given: Any) -> list[Any]:
        return self._meeting.exchange(self._rank, given)


class FakeGroup(ThreadGroup):
    def __init__(self, rank: int, shared: Shared, meeting: Meeting) -> None:
        super().__init__(rank, shared)
        self._torch = TorchGroup(rank, meeting)

    def torch(self, backend: str) -> Any:
        return self._torch


def problems(
    make: Callable[[], Any], case: Case, size: int, visit_type: Any = GpuVisit, *, visits: int = 1
) -> list[str]:
    """What visits find, on all ranks together; several are of one process group."""
    shared, meeting = Shared(size), Meeting(size)
    found: list[list[str]] = [["no answer"] for _ in range(size)]

    def visit(rank: int) -> None:
        group = FakeGroup(rank, shared, meeting)
        each = [run_case(make, case, group, LIMIT_S, visit_type=visit_type) for _ in range(visits)]
        found[rank] = [text for texts in each for text in texts]

    threads = [threading.Thread(target=visit, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [text for texts in found for text in texts]


def module(name: str, **contents: Any) -> types.ModuleType:
    """A module with these contents, importable once it and its parents are in sys.modules."""
    made = types.ModuleType(name)
    made.__path__ = []  # type: ignore[attr-defined]
    vars(made).update(contents)
    return made


def install(monkeypatch: Any, *modules: types.ModuleType) -> None:
    """Put modules where imports find them, for this test; a parent that is not given is an empty one."""
    given = {made.__name__: made for made in modules}
    for name in list(given):
        while "." in name:
            name, _, _ = name.rpartition(".")
            given.setdefault(name, module(name))
    for name, made in given.items():
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(given[parent], child, made)


_calls = threading.local()


def scrambled(count: int) -> list[int]:
    """0 to count - 1 in an order that is another one in each call of this thread."""
    _calls.number = getattr(_calls, "number", 0) + 1
    return torch.randperm(count, generator=torch.Generator().manual_seed(_calls.number)).tolist()


def garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What nobody has written: NaN, or a number that is no id."""
    if dtype in (torch.int32, torch.int64):
        return torch.full(shape, 2**30, dtype=dtype)
    width = torch.zeros((), dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * width), 0x7F, dtype=torch.uint8).view(dtype)


def chosen(ids: torch.Tensor, rank: int, per_rank: int) -> list[int]:
    """Tokens with an expert on `rank`."""
    here = (ids >= rank * per_rank) & (ids < (rank + 1) * per_rank)
    return here.any(dim=1).nonzero()[:, 0].tolist()


def localised(ids: torch.Tensor, rank: int, per_rank: int) -> torch.Tensor:
    """Ids numbered from the rank's first; -1 elsewhere."""
    here = (ids >= rank * per_rank) & (ids < (rank + 1) * per_rank)
    return torch.where(here, ids - rank * per_rank, torch.full_like(ids, -1))


def ranks_of(ids: torch.Tensor, per_rank: int) -> list[int]:
    """Destination ranks of one token, in the order its ids name them."""
    return list(dict.fromkeys(int(i) // per_rank for i in ids if i >= 0))
