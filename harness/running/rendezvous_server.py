"""The serving side of `rendezvous`: one thread and one selector answer every process of a run."""

import contextlib
import errno
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epcross.harness.errors import GroupError
from epcross.harness.running.rendezvous import (
    ABORTED,
    EXPIRED,
    LENGTH,
    MAX_FRAME_BYTES,
    OBSERVER,
    OK,
    REFUSED,
    Abort,
    Address,
    decode,
    encode,
)

MAX_STRANGER_BYTES = 4096  # of the first frame, before the token was seen


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    scope: str | None = None  # None until the token was seen
    rank: int = OBSERVER
    closing: bool = False  # close once the outbox is empty


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that cannot be answered yet."""

    connection: _Connection
    deadline: float
    key: str
    on_expiry: Callable[[], bytes]


@dataclass(slots=True, eq=False)
class _Gather:
    size: int
    data: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Scope:
    values: dict[str, bytes] = field(default_factory=dict)
    gathers: dict[str, _Gather] = field(default_factory=dict)
    waits: list[_Wait] = field(default_factory=list)
    watchers: list[_Connection] = field(default_factory=list)
    members: dict[int, _Connection] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    abort: Abort | None = None


class StoreServer:
    """Serves the store from a daemon thread until `close`.

    `ports` are tried in turn (0 lets the kernel choose); a port that is taken is passed over.
    """

    def __init__(self, *, token: str, host: str = "127.0.0.1", ports: Sequence[int] = (0, 0, 0)) -> None:
        self._listener = _bind(host, ports)
        self.address = Address(host=host, port=self._listener.getsockname()[1], token=token)
        self._scopes: dict[str, _Scope] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="epcross-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; every client's next or pending call raises `GroupError`."""
        if self._thread.is_alive():
            self._wake_write.send(b"x")
            self._thread.join()

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            waits = [w for s in self._scopes.values() for w in s.waits]
            timeout = max(0.0, min((w.deadline for w in waits), default=time.monotonic() + 60) - time.monotonic())
            for key, events in self._selector.select(timeout):
                if key.fileobj is self._wake_read:
                    return self._shut_down()
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._pump(key.data, events)
            self._expire()

    def _shut_down(self) -> None:
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            sock.close()
        self._wake_write.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client may be gone again
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _pump(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                data = connection.sock.recv(1 << 16)
                if not data:
                    return self._drop(connection)
                connection.inbox += data
                self._parse(connection)
        except (OSError, ValueError):
            self._drop(connection)

    def _parse(self, connection: _Connection) -> None:
        inbox = connection.inbox
        while len(inbox) >= LENGTH.size and not connection.closing:
            (length,) = LENGTH.unpack_from(inbox)
            if length > (MAX_STRANGER_BYTES if connection.scope is None else MAX_FRAME_BYTES):
                raise ValueError(f"a frame of {length} bytes is too long")
            if len(inbox) < LENGTH.size + length:
                return
            fields = decode(bytes(inbox[LENGTH.size : LENGTH.size + length]))
            del inbox[: LENGTH.size + length]
            self._handle(connection, fields)

    def _handle(self, connection: _Connection, fields: list[bytes]) -> None:
        if connection.scope is None:
            return self._hello(connection, fields)
        scope = self._scopes[connection.scope]
        match fields:
            case [b"set", key, value]:
                scope.values[key.decode()] = value
                self._reply(connection, OK)
                for wait in [w for w in scope.waits if w.key == f"get/{key.decode()}"]:
                    scope.waits.remove(wait)
                    self._reply(wait.connection, OK, value)
            case [b"add", key, delta]:
                total = int(scope.values.get(key.decode(), b"0")) + int(delta)
                scope.values[key.decode()] = b"%d" % total
                self._reply(connection, OK, b"%d" % total)
            case [b"get", key, timeout]:
                name = key.decode()
                if name in scope.values:
                    self._reply(connection, OK, scope.values[name])
                elif scope.abort:
                    self._reply(connection, ABORTED, scope.abort.encode())
                else:
                    self._wait(scope, connection, f"get/{name}", timeout, lambda: b"nobody set it")
            case [b"gather", key, size, data, timeout]:
                self._gather(scope, connection, key.decode(), int(size), data, timeout)
            case [b"abort", name, rank, kind, reason]:
                target = self._scopes.setdefault(name.decode(), _Scope())
                record = self._abort(target, int(rank), reason.decode(), kind.decode())
                self._reply(connection, OK, record.encode())
            case [b"watch", name]:
                target = self._scopes.setdefault(name.decode(), _Scope())
                if target.abort:
                    self._reply(connection, ABORTED, target.abort.encode())
                else:
                    target.watchers.append(connection)
            case [b"bye"]:
                if connection.rank != OBSERVER:
                    scope.left.add(connection.rank)
                    scope.members.pop(connection.rank, None)
                    connection.rank = OBSERVER  # so that dropping it aborts nothing
                    self._wake_deserted(scope)
                connection.closing = True
                self._reply(connection, OK)
            case _:
                raise ValueError("no such request")
        return None

    def _hello(self, connection: _Connection, fields: list[bytes]) -> None:
        match fields:
            case [b"hello", token, name, rank] if hmac.compare_digest(token, self.address.token.encode()):
                scope = self._scopes.setdefault(name.decode(), _Scope())
                member = int(rank)
                if member != OBSERVER and (member in scope.members or member in scope.left):
                    connection.closing = True
                    return self._reply(connection, REFUSED, b"rank %d has joined this group before" % member)
                connection.scope, connection.rank = name.decode(), member
                if member != OBSERVER:
                    scope.members[member] = connection
                self._reply(connection, OK)
            case _:
                connection.closing = True
                self._reply(connection, REFUSED, b"the token is wrong: this store belongs to another run")
        return None

    def _gather(self, scope: _Scope, connection: _Connection, key: str, size: int, data: bytes, timeout: bytes) -> None:
        if scope.abort:
            return self._reply(connection, ABORTED, scope.abort.encode())
        gather = scope.gathers.setdefault(key, _Gather(size))
        if gather.size != size or connection.rank in gather.data or not 0 <= connection.rank < size:
            return self._reply(connection, REFUSED, b"rank %d cannot join %s" % (connection.rank, key.encode()))
        gather.data[connection.rank] = data
        if len(scope.gathers) > 1:  # collectives are in lockstep, so two open ones never meet
            names = " and ".join(sorted(scope.gathers))
            self._abort(scope, connection.rank, f"the ranks went different ways: {names} are open at once", "error")
            return self._reply(connection, ABORTED, scope.abort.encode() if scope.abort else b"")

        def missing() -> bytes:
            # the group is broken from here on: peers that come later must not wait for the rank that gave up
            absent = [r for r in range(size) if r not in gather.data]
            text = f"rank {', '.join(map(str, absent))} did not come to {key} in {float(timeout):g} s"
            return self._abort(scope, absent[0], text, "late").encode()

        self._wait(scope, connection, f"gather/{key}", timeout, missing)
        if len(gather.data) == size:
            del scope.gathers[key]
            reply = [gather.data[r] for r in range(size)]
            for wait in [w for w in scope.waits if w.key == f"gather/{key}"]:
                scope.waits.remove(wait)
                self._reply(wait.connection, OK, *reply)
        else:
            self._wake_deserted(scope)
        return None

    def _wake_deserted(self, scope: _Scope) -> None:
        """Nobody waits for a rank that said goodbye."""
        for key, gather in scope.gathers.items():
            gone = scope.left - gather.data.keys()
            if gone and gather.data:
                self._abort(scope, min(gone), f"rank {min(gone)} left the group before {key}", "left")
                return

    def _wait(
        self, scope: _Scope, connection: _Connection, key: str, timeout: bytes, on_expiry: Callable[[], bytes]
    ) -> None:
        deadline = time.monotonic() + float(timeout)
        scope.waits.append(_Wait(connection, deadline, key, on_expiry))

    def _abort(self, scope: _Scope, rank: int, reason: str, kind: str) -> Abort:
        if scope.abort is None:
            waiting = sorted({w.connection.rank for w in scope.waits if w.connection.rank != OBSERVER})
            blamed = None if rank == OBSERVER else rank
            scope.abort = Abort(rank=blamed, reason=reason, kind=kind, waiting=tuple(waiting))
            woken = [w.connection for w in scope.waits] + scope.watchers
            scope.waits.clear()
            scope.watchers.clear()
            scope.gathers.clear()
            for connection in woken:
                self._reply(connection, ABORTED, scope.abort.encode())
        return scope.abort

    def _expire(self) -> None:
        now = time.monotonic()
        for scope in self._scopes.values():
            for wait in [w for w in scope.waits if w.deadline <= now]:
                if wait in scope.waits:  # an earlier expiry may have aborted the scope and answered it
                    if wait.key.startswith("gather/"):
                        wait.on_expiry()
                    else:
                        scope.waits.remove(wait)
                        self._reply(wait.connection, EXPIRED, wait.on_expiry())

    def _reply(self, connection: _Connection, *fields: bytes) -> None:
        connection.outbox += encode(fields)
        with contextlib.suppress(OSError):  # a lost peer is dropped when its socket reads as closed
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            del connection.outbox[: connection.sock.send(connection.outbox)]
        if connection.outbox:
            self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        elif connection.closing:
            self._drop(connection)
        else:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.sock.fileno() < 0:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for scope in self._scopes.values():
            scope.waits = [w for w in scope.waits if w.connection is not connection]
            scope.watchers = [c for c in scope.watchers if c is not connection]
        if connection.scope is not None and connection.rank != OBSERVER:
            scope = self._scopes[connection.scope]
            scope.members.pop(connection.rank, None)
            scope.left.add(connection.rank)
            self._abort(
                scope, connection.rank, f"rank {connection.rank} lost its connection: its process ended", "lost"
            )


def _bind(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise GroupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    raise GroupError(f"every port tried on {host} is taken: {', '.join(map(str, ports))}; name others")
