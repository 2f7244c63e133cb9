"""The NVLink counters of one GPU, read by a process that does nothing else.

On H200s (driver 580.159.04), NVML's nvmlDeviceGetFieldValues now and then damages the heap of the process that calls
it: behind the array of values that it had filled, asked for the 18 links that are there and no more, glibc's check
found another byte than it had put there. Measured processes that called it died of that at the call, or soon after. So
the caller is a process of its own, link_reader.py, and when it dies counts are lost and nothing else.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from typing import IO, Any

READER = "epcross.harness.measuring.link_reader"
ANSWER_LIMIT_S = 10.0
"""For one answer. The first takes longest, since the interpreter starts: 0.1 s, or seconds from a slow file system."""

TRIES = 2
"""What is counted is the driver's: where a reader is lost, another one goes on."""

_WHO = "the process that reads counters of links"
_END_S = 1.0  # for a reader whose output has ended to be gone
_WORDS = 200  # characters of its last line
_MOST_BYTES = 8192  # of an answer, and from the end of what it wrote to standard error; an answer takes some 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Since the driver was loaded, sums over the links of one GPU."""

    tx_bytes: int
    rx_bytes: int
    links: int  # that are counted


_COUNTS = {field.name for field in fields(LinkBytes)}


class _Lost(Exception):
    """The reader is gone, or not to be trusted; the message says why, as a clause."""


class LinkCounters:
    """The counters of the GPU that NVML knows by `uuid`.

    The reader starts with the first reading and ends with this process, however that ends: its input ends then, and it
    is of the same session. It holds no file of this process's and no CUDA context. A process that was forked from this
    one starts its own.
    """

    def __init__(self, uuid: str, limit_s: float = ANSWER_LIMIT_S) -> None:
        self._uuid, self._limit_s = uuid, limit_s
        self._reader: _Reader | None = None
        self._hung: str | None = None

    def read(self) -> LinkBytes | str:
        """The counters now, or why there are none, as a clause."""
        if self._hung:  # another one would most likely hang, too
            return self._hung
        words = ""
        for _ in range(TRIES):
            try:
                return self._ask()
            except _Lost as lost:
                words = f"{_WHO} {lost}"
                sys.stderr.write(f"{words}\n")  # a log that tells of it even where the next one answers
                sys.stderr.flush()
        return words

    def close(self) -> None:
        """End the reader. Another reading would start another one."""
        if reader := self._own():
            self._reader = None
            reader.end()

    def _ask(self) -> LinkBytes | str:
        """One try. Raises `_Lost`."""
        try:
            reader = self._reader = self._own() or _start(self._uuid)
        except OSError as error:
            return f"{_WHO} cannot be started: {error}"
        try:
            if line := reader.answer(self._limit_s):
                return _understood(line)
        except TimeoutError:
            self._hung = f"{_WHO} gave no answer within {self._limit_s:g} s"
            self._kill(reader)
            return self._hung
        except BaseException:  # an answer that nobody waits for any more would be taken for the next one
            self._kill(reader)
            raise
        self._reader = None
        raise _Lost(reader.end())

    def _own(self) -> "_Reader | None":
        """The reader, if this process started it. One that was forked since shares its pipes, where the answers to two
        would mix: it lets go of them."""
        if self._reader and self._reader.owner_pid != os.getpid():
            self._reader.let_go()
            self._reader = None
        return self._reader

    def _kill(self, reader: "_Reader") -> None:
        self._reader = None
        reader.process.kill()
        reader.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """A process that reads, and what it wrote to standard error: a file, which is never full as a pipe would be, and
    has an end though a child of the reader's holds it open."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    owner_pid: int

    def answer(self, limit_s: float) -> bytes:
        """Its next line, or the first of one that is too long; nothing if it ended. Raises `TimeoutError` where it is
        late with all of these."""
        stdin, stdout = self._pipes()
        until_s = time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError):
            stdin.write(b"\n")
        ready = select.poll()  # where select() knows the first 1024 files only
        ready.register(stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
            left_s = until_s - time.monotonic()
            # what is there already is taken once, for it may be this process that was late
            if (line and left_s < 0) or not ready.poll(max(0.0, left_s) * 1e3):
                if self.process.poll() is None:
                    raise TimeoutError
                return b""  # and a child of its own holds its output open
            data = os.read(stdout.fileno(), _MOST_BYTES - len(line))
            if not data:
                return b""
            line += data
        return line

    def end(self) -> str:
        """End it, if it has not ended; how it ended, and its last words."""
        process = self.process
        stdin, stdout = self._pipes()
        with stdin, stdout, self.errors:
            stdin.close()
            try:
                code = process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver; it dies when that returns
                    process.wait(_END_S)
                return "closed its output and went on"
            words = self._last_words()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{how} ({words})" if words else how

    def let_go(self) -> None:
        """In a process that was forked from its owner: close what is held of it, and leave it as it is."""
        self.process.poll()  # no child of this process, so that Popen takes it for gone
        for file in (*self._pipes(), self.errors):
            file.close()

    def _last_words(self) -> str:
        file = self.errors.fileno()
        begin = max(0, os.fstat(file).st_size - _MOST_BYTES)
        lines = os.pread(file, _MOST_BYTES, begin).decode(errors="replace").split("\n")  # whoever writes goes on there
        return next((line.strip()[:_WORDS] for line in reversed(lines) if line.strip()), "")

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin
        assert self.process.stdout
        return self.process.stdin, self.process.stdout


@functools.cache
def counters_of(uuid: str) -> LinkCounters:
    """The counters of a GPU, with one reader for all units of this process."""
    return LinkCounters(uuid)


def _start(uuid: str) -> _Reader:
    """Raises `OSError`."""
    # nothing is preloaded into it: a NCCL or a profiler meant for this process would only make it slower to start
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    # -P: a file in the current folder must not shadow a library
    command = [sys.executable, "-P", "-m", READER, uuid]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as opened:
        errors = opened.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0, env=env, close_fds=True)
        opened.pop_all()
    return _Reader(process=process, errors=errors, owner_pid=os.getpid())


def _understood(line: bytes) -> LinkBytes | str:
    """The counters, or why there are none, as an answer has it. Raises `_Lost` where it is no answer, or tells that the
    reader's memory was written to."""
    try:
        told: Any = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    names: set[str] = set(told) if isinstance(told, dict) else set()
    if names == {"note"} and isinstance(told["note"], str):
        return told["note"]
    counts = {name for name in names if type(told[name]) is int and told[name] >= 0}  # True is no count
    if names == counts == _COUNTS:
        return LinkBytes(**told)
    if names == counts == {"overrun_bytes", "asked_bytes"}:
        raise _Lost(
            f"saw NVML write {told['overrun_bytes']} bytes beyond the {told['asked_bytes']} that were asked for"
        )
    raise _Lost(f"said what is no answer: {line[:_WORDS]!r}")
