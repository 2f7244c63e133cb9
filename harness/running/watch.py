"""What a supervisor waits for: its worker, its peers, the end of either, and being told to stop."""

import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any

from epcross.harness.errors import GroupError
from epcross.harness.running.child import Child
from epcross.harness.running.rendezvous import REPLY_GRACE_S, Abort, Address, ScopeAborted, StoreClient

CONTROL = "control"
"""The scope in which supervisors meet; aborting it ends the job."""

CANCELLED, FAIL_FAST, OUT_OF_TIME, PREEMPTED = "cancelled", "fail_fast", "out_of_time", "preempted"
"""Kinds of an abort of `CONTROL` that are no error."""

_NO_ERROR = (CANCELLED, FAIL_FAST, OUT_OF_TIME, PREEMPTED)


class Stopped(Exception):
    """The job ends before its last turn, on every rank."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Said:
    """The worker sent a message."""

    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker's process ended."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The workers' process group was aborted."""

    abort: Abort


Event = Said | Ended | Aborted


class Watch:
    """One rank's seat at the store, and one place to wait for everything.

    SIGTERM and SIGINT to this process end the job on all ranks. `in_batch`, SIGTERM and SIGUSR2 are the scheduler's and
    say that it is about to end this start of the job.
    """

    def __init__(self, address: Address, rank: int, *, in_batch: bool = False) -> None:
        self.address = address
        self._schedulers = (signal.SIGTERM, signal.SIGUSR2) if in_batch else ()
        self._control = StoreClient(address, CONTROL, rank)
        self._alarm = StoreClient(address, CONTROL)
        self._alarm.send_watch(CONTROL)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._selector.register(self._catch_signals(), selectors.EVENT_READ)
        self._child: Child | None = None
        self._group: StoreClient | None = None
        self._events: deque[Event] = deque()
        self._heard: set[Any] = set()  # sources of the attached worker that are still listened to

    def _catch_signals(self) -> socket.socket:
        self._signalled, write = socket.socketpair()
        write.setblocking(False)
        signal.set_wakeup_fd(write.detach())
        for number in {signal.SIGTERM, signal.SIGINT, *self._schedulers}:
            signal.signal(number, _noted)
        return self._signalled

    def attach(self, child: Child, scope: str) -> None:
        """Listen to a worker and to the abort of its process group."""
        self._child, self._group = child, StoreClient(self.address, scope)
        self._group.send_watch(scope)
        for source in (child.channel, child.ended, self._group):
            self._selector.register(source, selectors.EVENT_READ)
            self._heard.add(source)

    def detach(self) -> None:
        """Listen to no worker. Before the worker is killed, since that closes what is listened to."""
        for source in tuple(self._heard):
            self._ignore(source)
        if self._group is not None:
            self._group.hang_up()
        self._child = self._group = None
        self._events.clear()

    def wait(self, deadline: float) -> Event | None:
        """The next event of the attached worker; None once `deadline` (monotonic) has passed. Raises `Stopped`."""
        while not self._events:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            ready = [key.fileobj for key, _ in self._selector.select(remaining)]
            self._check_stop(ready)
            self._collect(ready)
        return self._events.popleft()

    def meet(self, key: str, size: int, data: bytes, timeout_s: float) -> list[bytes]:
        """`data` of the supervisors of all ranks. Raises `Stopped` if one of them is lost or told to stop."""
        try:
            self._control.send_gather(key, size, data, timeout_s)
            with selectors.DefaultSelector() as selector:
                for source in (self._control, self._alarm, self._signalled):
                    selector.register(source, selectors.EVENT_READ)
                deadline = time.monotonic() + timeout_s + REPLY_GRACE_S
                while time.monotonic() < deadline:
                    ready = [chosen.fileobj for chosen, _ in selector.select(deadline - time.monotonic())]
                    if self._control in ready:  # first: the last meeting ends well though a peer leaves right after
                        return self._control.receive()
                    self._check_stop(ready)
        except GroupError as error:
            raise self._stopped(error) from error
        raise Stopped("lost", f"the store of rank 0 gave no answer in {timeout_s + REPLY_GRACE_S:g} s")

    def abort_group(self, scope: str, reason: str, rank: int | None, kind: str) -> Abort:
        """Abort the workers' process group; returns its first abort. Raises `Stopped` if the store is lost."""
        try:
            return self._control.abort(scope, reason, rank, kind)
        except GroupError as error:
            raise self._stopped(error) from error

    def stop_all(self, kind: str, reason: str) -> Stopped:
        """End the job on all ranks; returns what to raise here."""
        try:
            client = StoreClient(self.address, CONTROL)
            first = client.abort(CONTROL, reason, kind=kind)
            client.close()
        except GroupError:
            return Stopped(kind, reason)
        return Stopped(first.kind, first.reason)

    def close(self) -> None:
        """Leave the store in good order."""
        self.detach()
        self._control.close()
        self._alarm.hang_up()

    def _ignore(self, source: Any) -> None:
        """Listen to a source no more. Before it is closed: a closed one cannot be found."""
        self._heard.remove(source)
        self._selector.unregister(source)

    def _check_stop(self, ready: list[Any]) -> None:
        if self._signalled in ready:
            number = signal.Signals(self._signalled.recv(1)[0])
            if number in self._schedulers:
                raise self.stop_all(PREEMPTED, f"the scheduler ends this start of the job ({number.name})")
            raise self.stop_all(CANCELLED, f"cancelled by {number.name}")
        if self._alarm in ready:
            try:
                self._alarm.receive()
            except GroupError as error:
                raise self._stopped(error) from error

    def _stopped(self, error: GroupError) -> Stopped:
        if isinstance(error, ScopeAborted):
            rank = error.abort.rank
            lost = "" if rank is None or error.abort.kind in _NO_ERROR else f"supervisor of rank {rank}: "
            return Stopped(error.abort.kind, lost + error.abort.reason)
        return Stopped("lost", f"the supervisor of rank 0 is lost: {error}")

    def _collect(self, ready: list[Any]) -> None:
        """What the ready sources say, the worker's own words before the news of its end."""
        assert self._child is not None
        assert self._group is not None
        if self._child.channel in ready:
            messages = self._child.messages()
            if messages is None:
                self._ignore(self._child.channel)
            else:
                self._events += [Said(message) for message in messages]
                return  # come back for more before looking at anything else
        if self._group in ready:
            self._ignore(self._group)
            try:
                self._group.receive()
            except ScopeAborted as error:
                self._events.append(Aborted(error.abort))
            except GroupError as error:
                raise self._stopped(error) from error
        if self._child.ended in ready:
            self._ignore(self._child.ended)
            self._events.append(Ended())


def _noted(_signum: int, _frame: FrameType | None) -> None:
    """The wake-up socket tells; Python's default would interrupt anywhere."""
