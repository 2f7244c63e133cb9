"""Gluon programs of warps that each do one thing, run as Python: barriers, copies that come later, what is read when.

Not numbers are computed but where each operand came from: memory holds addresses, and a sum is the list of its terms.
The order in which roles go on and copies come is drawn, so a stage that is overwritten too early, or read too early,
shows as a wrong term, and a phase that nobody completes as roles that all wait. Threads of a role are one: what they
need among themselves the compiler puts between, and proxies of memory and caches are not in here.
"""

import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np


class Values(np.ndarray):
    """Integers with the methods of Triton's tensors."""

    def to(self, _: Any) -> "Values":
        return self

    def __iadd__(self, other: Any) -> Any:  # tensors do not change
        return self + other


def values(of: Any) -> Values:
    return np.asarray(of).view(Values)


class Sum:
    """Its terms, and what weights it; what is done to a finished sum leaves it as it is."""

    def __init__(self, terms: tuple[Any, ...] = (), weight: Any = None) -> None:
        self.terms, self.weight = terms, weight

    def __add__(self, other: Any) -> "Sum":
        return Sum(self.terms + other.terms) if isinstance(other, Sum) else self

    def __mul__(self, other: Any) -> Any:
        return (self, other) if isinstance(other, Sum) else Sum(self.terms, other)

    def same(self, *_: Any) -> "Sum":
        return self

    __radd__ = __neg__ = __truediv__ = to = same


class Scale(tuple[Any, ...]):
    """Where scales came from."""

    def __mul__(self, other: Any) -> "Scale":
        return Scale((*self, *other))


class Place:
    """Of shared memory."""

    def __init__(self, below: dict[int, "Place"] | None = None) -> None:
        self.content: Any = None
        self.leaving = 0  # bulk copies that still read it
        self.below = {} if below is None else below

    def index(self, number: int) -> "Place":
        return self.below.setdefault(number, Place())

    def slice(self, first: int, _: int) -> "Half":
        return Half(self, first)

    def load(self, _: Any) -> Scale:
        return Scale((self.content,))

    def store(self, value: Any) -> None:
        assert not self.leaving, "overwritten while a bulk copy reads it"
        self.content = value


class Half:
    def __init__(self, place: Place, first: int) -> None:
        self.place, self.first = place, first

    def load(self, _: Any) -> Scale:
        return self.place.load(_)


class Barrier:
    """Of shared memory, as PTX has it: a phase ends once all arrivals and bytes have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, arrivals: int = 1, expected: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than a phase has"
        if not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Barriers:
    def __init__(self) -> None:
        self.each: dict[int, Barrier] = {}

    def index(self, number: int) -> Barrier:
        return self.each.setdefault(number, Barrier())


class Abandoned(BaseException):
    """Another role has failed."""


class Role:
    """A thread that goes on when it is told to."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name, self.work = name, work
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.done = self.abandoned = False
        self.error: BaseException | None = None
        self.leaving: list[Place] = []
        self.copies: list[Callable[[], None]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.abandoned:
                self.work()
        except Abandoned:
            pass
        except BaseException as error:  # told by whoever runs the roles
            self.error = error
        self.done = True
        self.back.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.back.release()
        self.go.acquire()
        if self.abandoned:
            raise Abandoned

    def step(self) -> None:
        self.go.release()
        self.back.acquire()


class Device:
    """Memory, and one program at a time on it. `modules` stands for what kernels import."""

    def __init__(self, memory: np.ndarray, seed: int) -> None:
        self.memory, self.random = memory, random.Random(seed)
        self.sums: dict[int, Sum] = {}  # that are stored whole, by their first address
        self.stored: list[tuple[Any, Any, Any]] = []  # addresses, values, mask
        self.left: dict[tuple[Any, ...], Any] = {}  # what bulk copies took, by descriptor and coordinates
        self.bulk: list[Callable[[], None]] = []
        self.roles: list[Role] = []
        self.role: Role | None = None
        self.program = self.programs = 0
        self.earlier_ended = False

    def run(self, kernel: Any, parts: list[Any], arguments: list[Any], *, program: int, programs: int) -> None:
        """Run one program of a kernel, which calls `parts`; each of them may call those before it."""
        self.program, self.programs, self.roles, self.role, self.earlier_ended = program, programs, [], None, False
        names = self.modules()
        for part in parts:
            names[part.fn.__name__] = rebound(part, names)
        rebound(kernel, names)(*arguments)
        for role in self.roles:
            role.thread.start()
        try:
            while not all(role.done for role in self.roles):
                self._step()
        finally:
            for role in self.roles:
                if not role.done:
                    role.abandoned = True
                    role.step()
        while self.bulk:
            self.bulk.pop()()

    def _step(self) -> None:
        roles = [role for role in self.roles if not role.done and role.ready()]
        copying = [role for role in self.roles if role.copies]
        ways = ["role"] * bool(roles) + ["bulk"] * bool(self.bulk) + ["copy"] * bool(copying)
        ways += ["end"] * (not self.earlier_ended)
        assert ways, f"all wait: {[role.name for role in self.roles if not role.done]}"
        match self.random.choice(ways):
            case "end":
                self.earlier_ended = True
            case "bulk":
                self.bulk.pop(self.random.randrange(len(self.bulk)))()
            case "copy":
                self.random.choice(copying).copies.pop(0)()
            case _:
                self.role = self.random.choice(roles)
                self.role.step()
                if self.role.error:
                    raise self.role.error

    def _now(self) -> Role:
        assert self.role is not None
        return self.role

    def modules(self) -> dict[str, Any]:
        gl = SimpleNamespace(
            constexpr=None, int32=None, int64=None, bfloat16=None, float32=None, float8e4nv=None,
            BlockedLayout=_none, SliceLayout=_none, NVMMADistributedLayout=_none, NVMMASharedLayout=_none,
            SwizzledSharedLayout=_none, static_range=range, thread_barrier=_none, exp=lambda x: x,
            arange=lambda first, last, layout=None: values(np.arange(first, last)),
            zeros=lambda shape, *_: Sum() if len(shape) == 2 else values(np.zeros(shape, np.int64)),
            minimum=np.minimum, maximum=np.maximum, where=lambda which, one, two: one if which else two,
            max=lambda x, _: int(np.max(x)), expand_dims=lambda x, _: x, broadcast=lambda x, y: (x, y),
            program_id=lambda _: self.program, num_programs=lambda _: self.programs,
            load=self._load, store=self._store, atomic_add=self._atomic_add,
            allocate_shared_memory=lambda kind, shape, layout: Barriers() if layout == "barriers" else Place(),
            warp_specialize=self._warp_specialize,
        )  # fmt: skip
        tl = SimpleNamespace(
            load=self._load, minimum=np.minimum, maximum=np.maximum, where=gl.where, constexpr=None, int64=None,
            extra=SimpleNamespace(cuda=SimpleNamespace(gdc_wait=self._gdc_wait, gdc_launch_dependents=_none)),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, parity: self._now().wait(lambda: barrier.passed(parity)),
            expect=lambda barrier, size: barrier.arrive(1, size),
            arrive=lambda barrier: barrier.arrive(),
        )
        tma = SimpleNamespace(
            async_copy_global_to_shared=self._bulk_in,
            async_copy_shared_to_global=self._bulk_out,
            store_wait=self._store_wait,
        )
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=self._copy_in,
            mbarrier_arrive=lambda barrier, increment_count: self._now().copies.append(lambda: barrier.arrive(128)),
        )
        return {
            "gl": gl, "tl": tl, "mbarrier": mbarrier, "tma": tma, "async_copy": async_copy,
            "fence_async_shared": _none, "BLOCK": 128, "HALF": 64, "WARPS": 4, "TILES": 0, "SPLITS": 1, "WHOLE": 4,
            "REGISTERS": 0, "COPY_REGISTERS": 0, "product_of": product_of, "scaled_into": scaled_into,
            "to_fp8": lambda h, *_: (h, "scale"),
        }  # fmt: skip

    def _load(self, at: Any, cache_modifier: str = "") -> Any:
        if np.ndim(at) == 2:
            return self.sums[int(at.flat[0])]
        return values(self.memory[at])

    def _store(self, at: Any, value: Any, mask: Any = None) -> None:
        if isinstance(value, Sum) and mask is None:
            self.sums[int(at.flat[0])] = value
        elif isinstance(value, int):
            self.memory[at] = value
        else:
            self.stored.append((at, value, mask))

    def _atomic_add(self, at: Any, value: int, sem: str, scope: str) -> int:
        before = int(self.memory[at])
        self.memory[at] += value
        return before

    def _gdc_wait(self) -> None:
        if self.role is None:
            self.earlier_ended = True
        else:
            self.role.wait(lambda: self.earlier_ended)

    def _bulk_in(self, descriptor: str, coordinates: list[Any], barrier: Barrier, place: Place) -> None:
        coordinate = (descriptor, *map(int, coordinates))
        assert descriptor == "w" or self.earlier_ended, "read before the kernel that makes it has ended"
        place.content = None

        def come() -> None:
            place.content = coordinate
            barrier.arrive(0, -128 * 128)

        self.bulk.append(come)

    def _copy_in(self, place: Place, at: Any, mask: Any = None) -> None:
        assert self.earlier_ended, "read before the kernel that makes it has ended"
        content = np.asarray(at)
        content = content[:, 0] if content.ndim == 2 else content
        kept = np.ones(len(content), bool) if mask is None else np.asarray(mask).reshape(len(content))
        place.content = None
        told = tuple(int(x) if own else None for x, own in zip(content, kept, strict=True))
        self._now().copies.append(lambda: setattr(place, "content", told))

    def _bulk_out(self, descriptor: str, coordinates: list[Any], place: Place) -> None:
        role, coordinate = self._now(), (descriptor, *map(int, coordinates))
        place.leaving += 1
        role.leaving.append(place)

        def leave() -> None:
            assert coordinate not in self.left, "written twice"
            self.left[coordinate] = place.content
            place.leaving -= 1

        self.bulk.append(leave)

    def _store_wait(self, most: int) -> None:
        assert most == 0
        role = self._now()
        role.wait(lambda: not any(place.leaving for place in role.leaving))

    def _warp_specialize(self, parts: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        for number, (work, arguments) in enumerate(parts):
            self.roles.append(Role(f"{number}", lambda work=work, arguments=arguments: work(*arguments)))


def product_of(x: Half, w: Place, zero: Sum) -> Any:
    return x.first, x.place.content, w.content


def scaled_into(total: Sum, product: Any, scale: Scale) -> Sum:
    return total + Sum(((*product, *scale),))


def rebound(kernel: Any, names: dict[str, Any]) -> Any:
    """A program's own source, with other modules."""
    source = kernel.fn
    return FunctionType(source.__code__, {**source.__globals__, **names}, source.__name__, source.__defaults__)


def _none(*_: Any, **__: Any) -> None:
    return None
