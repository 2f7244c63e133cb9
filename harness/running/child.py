"""A supervisor's handle on its worker process: start it, talk to it, learn how it ended, kill all of it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epcross.harness.running.processes import kill_group, reap_group
from epcross.harness.storing.regular_file import append_regular

WORKER = "epcross.harness.running.worker"
QUOTED_LINES = 4
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def environment(env: Mapping[str, str], imports: Path | None) -> dict[str, str]:
    """The environment of a process that loads a backend: ours, one thread for each library, `env`, and where it
    imports epcross from."""
    merged = {**ONE_THREAD, **os.environ, **env}
    if imports is not None:
        merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(imports), merged.get("PYTHONPATH")]))
    return merged


class Child:
    """One worker in a session of its own, so that everything it starts can be killed with it.

    Args:
        hello: its first message; secrets travel here, where no process list shows them.
        python: interpreter; None is this one.
        env: added to the environment.
        log: file that its output is appended to.
        imports: folder to import epcross from; None if the interpreter finds it by itself.
        wrapper: command, such as a profiler, that starts the interpreter as its child or in its place.
    """

    def __init__(
        self,
        hello: Mapping[str, Any],
        *,
        python: str | None,
        env: Mapping[str, str],
        log: Path,
        imports: Path | None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._pending = b""
        ours, theirs = socket.socketpair()
        with theirs, append_regular(log) as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                # -P: a file in the current folder must not shadow a library
                [*wrapper, python or sys.executable, "-P", "-m", WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(env, imports),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.channel = ours
        self.ended = os.pidfd_open(self._process.pid)  # readable when the process has ended
        self.send(dict(hello))

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message; a worker that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> list[dict[str, Any]] | None:
        """What has arrived, after `channel` became readable; None at the end of file."""
        try:
            data = self.channel.recv(1 << 20)
        except ConnectionError:
            return None
        if not data:
            return None
        *whole, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def how_it_ended(self) -> str:
        """A sentence with its exit status and last words. Waits for the end, which must be near."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        words = self.last_words()
        return f"its process {how}" + (f"; its last words: {words}" if words else f" and wrote nothing to {self.log}")

    def last_words(self) -> str:
        """The last lines it wrote; after a crash of the interpreter the first of its report, which say where, and where
        a library ended the process the line before, in which it says why."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
            if crash is None:
                return " | ".join(lines[-QUOTED_LINES:])
            begin = max(0, crash - 1) if lines[crash].endswith("Aborted") else crash
            return " | ".join(lines[begin : crash + QUOTED_LINES])
        return ""

    def hang_up(self) -> None:
        """Let it end by itself, from now on."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def leave(self, limit_s: float) -> None:
        """Let it end by itself, then make sure."""
        self.hang_up()
        self.make_sure(limit_s)

    def make_sure(self, limit_s: float) -> None:
        """End it, if it has not ended within `limit_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, limit_s))
        self.kill()

    def kill(self) -> None:
        """End it and everything it started, and reap it. Idempotent."""
        if self.ended < 0:
            return
        kill_group(self.pid)
        self._process.wait()
        reap_group(self.pid)
        self.channel.close()
        os.close(self.ended)
        self.ended = -1
