"""A small TCP key store that processes meet at: no torch, no MPI, nothing but bytes on the wire.

One process hosts `rendezvous_server.StoreServer`; every other holds a `StoreClient`. Keys live in *scopes*:
a scope is one process group. A client that joined a scope as a rank is a member of it, and when a member's
connection ends without a goodbye the scope is aborted in its name, so that peers of a killed process wake at once
instead of at their deadline. The first abort of a scope is kept, with the ranks that were waiting when it came: they
are not the ones to blame.

Wire format, both ways: `u32 length | fields`, where a field is `u32 length | bytes` and the first field is the verb or
status. Nothing from the network is evaluated or unpickled. The first frame must carry the run's token.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from epcross.harness.errors import GroupError

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 30
REPLY_GRACE_S = 5.0  # a server that is alive answers an expired wait within this
CONNECT_TIMEOUT_S = 10.0

OK, EXPIRED, ABORTED, REFUSED = b"ok", b"expired", b"aborted", b"refused"
OBSERVER = -1  # the rank of a client that is no member of its scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Why a scope ended: the first reason given, by whom, and who was waiting in a collective at that moment.

    `kind` is a word for whoever judges the failure; the server itself gives "lost", "late" and "left".
    """

    rank: int | None
    reason: str
    kind: str = "error"
    waiting: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Abort":
        """What `encode` wrote."""
        values = json.loads(data)
        return cls(**{**values, "waiting": tuple(values["waiting"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the store listens, and the token that lets a process in."""

    host: str
    port: int
    token: str = field(repr=False)

    def publish(self, path: Path) -> None:
        """Write to `path`, atomically and readable by the owner alone."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        temporary.replace(path)

    @classmethod
    def discover(cls, path: Path, timeout_s: float) -> "Address":
        """Read what `publish` wrote, waiting for it. Raises `GroupError` if it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                return cls(**json.loads(path.read_text()))
            if time.monotonic() > deadline:
                raise GroupError(f"no rendezvous address in {path} after {timeout_s:g} s; rank 0 did not start")
            time.sleep(0.005)


def new_token() -> str:
    """A secret that strangers cannot guess."""
    return secrets.token_hex(16)


def encode(fields: Sequence[bytes]) -> bytes:
    """One frame."""
    body = b"".join(part for f in fields for part in (LENGTH.pack(len(f)), f))
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> list[bytes]:
    """The fields of one frame's body. Raises `ValueError` if it is malformed."""
    fields: list[bytes] = []
    at = 0
    while at < len(body):
        if at + LENGTH.size > len(body):
            raise ValueError("a field is cut short")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + length > len(body):
            raise ValueError("a field is cut short")
        fields.append(body[at : at + length])
        at += length
    return fields


class StoreClient:
    """One connection to the store, as rank `rank` of `scope` or as an observer of it.

    One request at a time. `send` and `receive` are the halves of a request, for callers that select on `fileno()`.
    Every failure is a `GroupError`; after a connection is lost or its reply is overdue, every call raises it.
    """

    def __init__(self, address: Address, scope: str, rank: int = OBSERVER) -> None:
        self._timeout_s = CONNECT_TIMEOUT_S
        try:
            self._sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise GroupError(f"cannot reach the store at {address.host}:{address.port}: {error}") from error
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self.call(b"hello", address.token.encode(), scope.encode(), b"%d" % rank)
        except BaseException:
            self._sock.close()
            raise

    def fileno(self) -> int:
        """The socket, readable when a reply is there."""
        return self._sock.fileno()

    def set(self, key: str, value: bytes) -> None:
        """Give `key` a value and wake who waits for it."""
        self.call(b"set", key.encode(), value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of `key`, waiting until it is set."""
        return self.call(b"get", key.encode(), b"%f" % timeout_s, timeout_s=timeout_s)[0]

    def add(self, key: str, delta: int) -> int:
        """Add to the integer at `key` (0 at first) and return the sum."""
        return int(self.call(b"add", key.encode(), b"%d" % delta)[0])

    def gather(self, key: str, size: int, data: bytes, timeout_s: float) -> list[bytes]:
        """The data of ranks 0 to size - 1, once all have come to `key`."""
        self.send_gather(key, size, data, timeout_s)
        return self.receive()

    def send_gather(self, key: str, size: int, data: bytes, timeout_s: float) -> None:
        """The first half of `gather`; `receive` is the second."""
        self.send(b"gather", key.encode(), b"%d" % size, data, b"%f" % timeout_s, timeout_s=timeout_s)

    def abort(self, scope: str, reason: str, rank: int | None = None, kind: str = "error") -> Abort:
        """End `scope` unless it has ended before; returns the first abort of the scope."""
        blamed = OBSERVER if rank is None else rank
        request = (b"abort", scope.encode(), b"%d" % blamed, kind.encode(), reason.encode())
        return Abort.decode(self.call(*request)[0])

    def send_watch(self, scope: str) -> None:
        """Ask to be told when `scope` is aborted: `receive` then raises `ScopeAborted`."""
        self.send(b"watch", scope.encode(), timeout_s=float("inf"))

    def call(self, *fields: bytes, timeout_s: float = 0.0) -> list[bytes]:
        """`send`, then `receive`."""
        self.send(*fields, timeout_s=timeout_s)
        return self.receive()

    def send(self, *fields: bytes, timeout_s: float = 0.0) -> None:
        """Write one request that the server may take `timeout_s` to answer."""
        self._timeout_s = timeout_s + REPLY_GRACE_S
        try:
            self._sock.settimeout(CONNECT_TIMEOUT_S)
            self._sock.sendall(encode(fields))
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> list[bytes]:
        """The fields of the reply. Raises `ScopeAborted`, or another `GroupError`."""
        deadline = time.monotonic() + self._timeout_s
        try:
            (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
            status, *fields = decode(self._read(length, deadline))
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if status == OK:
            return fields
        if status == ABORTED:
            raise ScopeAborted(Abort.decode(fields[0]))
        raise GroupError(fields[0].decode() if status == REFUSED else f"the wait ran out: {fields[0].decode()}")

    def close(self) -> None:
        """Say goodbye, so that the peers do not take it for a death. Idempotent."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(GroupError):
                self.call(b"bye")
            self._sock.close()

    def hang_up(self) -> None:
        """Close without a word: for an observer with an open request."""
        self._sock.close()

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("the store does not answer")
            self._sock.settimeout(None if remaining == float("inf") else remaining)
            part = self._sock.recv(count - len(data))
            if not part:
                raise ConnectionError("the store closed the connection: the process that hosts it ended")
            data += part
        return bytes(data)

    def _lost(self, error: Exception) -> GroupError:
        self._sock.close()  # a late reply must not be taken for that of the next request
        return GroupError(f"the store is lost: {error}")


class ScopeAborted(GroupError):
    """The scope was ended by `abort`."""

    def __init__(self, abort: Abort) -> None:
        who = "the group" if abort.rank is None else f"rank {abort.rank}"
        super().__init__(f"{who} gave up: {abort.reason}", rank=abort.rank)
        self.abort = abort
