"""Start the supervisors of a job on this host, see them through, and leave none behind."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from epcross.harness.running.job import Job
from epcross.harness.running.progress import ProgressReader
from epcross.harness.running.supervisor import EXIT_CANCELLED, EXIT_DONE, EXIT_FAIL_FAST, EXIT_OUT_OF_TIME
from epcross.harness.storing.regular_file import append_regular

TICK_S = 0.25
PEERS_LIMIT_S = 20.0  # for the others once one supervisor ended badly
FULL_BYTES = 1 << 20  # a disk with less free is the likely reason of a silent end
CANCEL_LIMIT_S = 5.0  # from SIGTERM to SIGKILL


class End(StrEnum):
    """How a job ended."""

    DONE = "done"  # every unit was tried
    CANCELLED = "cancelled"
    FAIL_FAST = "fail_fast"
    OUT_OF_TIME = "out_of_time"  # the time that it was given is over
    FAILED = "failed"  # a supervisor was lost, or rows could not be stored


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended, and why if not well."""

    end: End
    reason: str = ""


def run_job(
    job: Job,
    *,
    tick: Callable[[], Any] = lambda: None,
    stop_asked: Callable[[], str | None] = lambda: None,
) -> JobEnd:
    """Run all turns of `job` and return how it ended. When this returns or raises, its processes are gone.

    Args:
        tick: called a few times a second.
        stop_asked: why to end now; None to go on.
    """
    path = job.write()
    notes = ProgressReader(Path(job.run_dir), job.notes)
    notes.skip_to_end()
    ranks = [RankProcess(job, path, rank) for rank in range(job.processes)]
    asked: str | None = None
    kill_at = float("inf")
    try:
        while any(rank.alive for rank in ranks):
            _wait(ranks, min(TICK_S, max(0.0, kill_at - time.monotonic())))
            tick()
            if asked is None:
                asked = stop_asked()
                if asked is None and any(rank.code not in (None, EXIT_DONE) for rank in ranks):
                    kill_at = min(kill_at, time.monotonic() + PEERS_LIMIT_S)
                elif asked is not None:
                    kill_at = time.monotonic() + CANCEL_LIMIT_S
                    for rank in ranks:
                        rank.signal(signal.SIGTERM)
            if time.monotonic() > kill_at:
                break
    finally:
        for rank in ranks:
            rank.end()
        tick()
    codes = {rank.code for rank in ranks}
    if codes == {EXIT_DONE}:
        return JobEnd(end=End.DONE)
    told = next((note["reason"] for note in reversed(notes.read()) if note["event"] == "stopped"), None)
    reason = asked or told or _first_words(ranks)
    if asked or EXIT_CANCELLED in codes:
        return JobEnd(end=End.CANCELLED, reason=reason)
    if EXIT_OUT_OF_TIME in codes:
        return JobEnd(end=End.OUT_OF_TIME, reason=reason)
    return JobEnd(end=End.FAIL_FAST if EXIT_FAIL_FAST in codes else End.FAILED, reason=reason)


class RankProcess:
    """The supervisor process of one rank of `job`, whose file is at `path`, as our child."""

    def __init__(self, job: Job, path: Path, rank: int) -> None:
        self.rank = rank
        self.log = Path(job.run_dir) / "logs" / f"{job.name}.supervisor.rank{rank}.log"
        with append_regular(self.log) as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "epcross.harness.running.supervisor",
                    str(path),
                    str(rank),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher, which ends all ranks in order
            )
        self.ended = os.pidfd_open(self._process.pid)

    @property
    def code(self) -> int | None:
        """Its exit status; None while it lives."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, limit_s: float) -> None:
        """Until it ends, at most `limit_s`."""
        _wait([self], limit_s)

    def end(self) -> None:
        """Kill it if it lives (its worker dies with it) and reap it."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        os.close(self.ended)

    def last_words(self) -> str:
        """The last line it wrote, or that it wrote none."""
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the supervisor of rank {self.rank} ended with status {self.code}{self._full()}"

    def _full(self) -> str:
        """What to say beside its silence if the disk has no room, not even for last words."""
        free_bytes = shutil.disk_usage(self.log.parent).free
        if free_bytes >= FULL_BYTES:
            return ""
        return f"; the disk of {self.log.parent.parent} has {free_bytes} bytes free: free space there"


def _wait(ranks: list[RankProcess], limit_s: float) -> None:
    """Until a supervisor that lives ends, at most `limit_s`."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            if rank.alive:
                selector.register(rank.ended, selectors.EVENT_READ)
        selector.select(limit_s)


def _first_words(ranks: list[RankProcess]) -> str:
    bad = [rank for rank in ranks if rank.code != EXIT_DONE]
    killed = [rank for rank in bad if rank.code is not None and rank.code < 0]
    return (killed or bad)[0].last_words()
