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
import time
from dataclasses import dataclass

READER = "epcross.harness.measuring.link_reader"
ANSWER_LIMIT_S = 10.0
"""For one answer. The first takes longest, since the interpreter starts: 0.1 s, or seconds from a slow file system."""

TRIES = 2
"""What is counted is the driver's: where a reader is lost, another one goes on."""

_WHO = "the process that reads counters of links"
_END_S = 1.0  # for a reader whose output has ended to be gone
_WORDS = 200  # characters of its last line


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Since the driver was loaded, sums over the links of one GPU."""

    tx_bytes: int
    rx_bytes: int
    links: int  # that are counted


class _Lost(Exception):
    """The reader is gone, or not to be trusted; the message says why, as a clause."""


class LinkCounters:
    """The counters of the GPU that NVML knows by `uuid`.

    The reader starts with the first reading and ends with this process, however that ends: its input ends then, and it
    is of the same session. It holds no file of this process's and no CUDA context.
    """

    def __init__(self, uuid: str, limit_s: float = ANSWER_LIMIT_S) -> None:
        self._uuid, self._limit_s = uuid, limit_s
        self._reader: subprocess.Popen[bytes] | None = None
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
                words = str(lost)
                sys.stderr.write(f"{words}\n")  # a log that tells of it even where the next one answers
                sys.stderr.flush()
        return words

    def close(self) -> None:
        """End the reader. Another reading would start another one."""
        if self._reader:
            self._end(self._reader)

    def _ask(self) -> LinkBytes | str:
        """One try. Raises `_Lost`."""
        try:
            reader = self._reader = self._reader or _start(self._uuid)
        except OSError as error:
            return f"{_WHO} cannot be started: {error}"
        try:
            line = _answer(reader, self._limit_s)
        except TimeoutError:
            reader.kill()
            self._end(reader)
            self._hung = f"{_WHO} gave no answer within {self._limit_s:g} s"
            return self._hung
        if not line:
            raise _Lost(f"{_WHO} {self._end(reader)}")
        try:
            told = json.loads(line)
            if "note" in told:
                return str(told["note"])
            if "overrun_bytes" not in told:
                return LinkBytes(**told)
            words = f"saw NVML write {told['overrun_bytes']} bytes beyond the {told['asked_bytes']} that were asked for"
        except (ValueError, TypeError):
            words = f"said what is no answer: {line[:_WORDS]!r}"
        reader.kill()
        self._end(reader)
        raise _Lost(f"{_WHO} {words}")

    def _end(self, reader: subprocess.Popen[bytes]) -> str:
        """End it, if it has not ended; how it ended, and its last words."""
        self._reader = None
        assert reader.stdin
        assert reader.stdout
        assert reader.stderr
        with reader.stdin, reader.stdout, reader.stderr:
            reader.stdin.close()
            try:
                code = reader.wait(_END_S)
            except subprocess.TimeoutExpired:
                reader.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver; it dies when that returns
                    reader.wait(_END_S)
                return "closed its output and went on"
            lines = reader.stderr.read().decode(errors="replace").split("\n")
        words = next((line.strip()[:_WORDS] for line in reversed(lines) if line.strip()), "")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{how} ({words})" if words else how


@functools.cache
def counters_of(uuid: str) -> LinkCounters:
    """The counters of a GPU, with one reader for all units of this process."""
    return LinkCounters(uuid)


def _start(uuid: str) -> subprocess.Popen[bytes]:
    # nothing is preloaded into it: a NCCL or a profiler meant for this process would only make it slower to start
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    # -P: a file in the current folder must not shadow a library
    command = [sys.executable, "-P", "-m", READER, uuid]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=env, close_fds=True)


def _answer(reader: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Its next line; nothing if it ended. Raises `TimeoutError` where neither comes."""
    assert reader.stdin
    assert reader.stdout
    until_s = time.monotonic() + limit_s
    with contextlib.suppress(BrokenPipeError):
        reader.stdin.write(b"\n")
    ready = select.poll()  # where select() knows the first 1024 files only
    ready.register(reader.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not ready.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            raise TimeoutError
        data = os.read(reader.stdout.fileno(), 4096)
        if not data:
            return b""
        line += data
    return line
