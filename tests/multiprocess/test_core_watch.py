"""Runs on the same cores are flagged and not refused."""

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from _spawn import TIMING, job, new_run, point
from epcross.harness.running.core_watch import CoreWatch, watch_cores
from epcross.harness.running.launch import End, run_job
from epcross.harness.running.seat import Seat
from epcross.harness.storing.store import read_units
from epcross.harness.terms import Domain

OTHER = """
import sys, time
from pathlib import Path
from epcross.harness.running.core_watch import CoreWatch
watch = CoreWatch(map(int, sys.argv[2:]), Path(sys.argv[1]))
print("here", flush=True)
time.sleep(1000)
"""


def test_runs_on_cores_of_their_own_see_nothing_of_each_other(tmp_path: Path) -> None:
    one, other = CoreWatch([0, 1, 1], tmp_path), CoreWatch([2, 3], tmp_path)
    for watch in (one, other):
        watch.begin()
        assert watch.was_alone()
        watch.close()
        watch.close()


def test_both_see_that_they_share_a_core_for_as_long_as_they_do(tmp_path: Path) -> None:
    one = CoreWatch([0, 1], tmp_path)
    one.begin()
    other = CoreWatch([1, 2], tmp_path)
    other.begin()
    assert not one.was_alone()
    assert not other.was_alone()
    one.begin()
    other.close()
    assert not one.was_alone()  # it was there when this began
    one.begin()
    assert one.was_alone()
    one.close()


def test_whoever_came_and_went_meanwhile_was_there(tmp_path: Path) -> None:
    watch = CoreWatch([0], tmp_path)
    watch.begin()
    CoreWatch([0], tmp_path).close()
    assert not watch.was_alone()
    watch.begin()
    assert watch.was_alone()
    watch.close()


def test_a_run_that_is_killed_is_gone(tmp_path: Path) -> None:
    watch = CoreWatch([0], tmp_path)
    with subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path), "0"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        watch.begin()
        assert not watch.was_alone()
        os.kill(other.pid, signal.SIGKILL)
    watch.begin()
    assert watch.was_alone()
    watch.close()


@pytest.mark.parametrize("why", ["no file", "no folder", "no such locks"])
def test_a_core_that_cannot_be_watched_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    if why == "no file":
        (tmp_path / "epcross-core-0.lock").mkdir()
    if why == "no such locks":  # of open files, as in some sandboxes
        monkeypatch.setattr("epcross.harness.running.core_watch.fcntl.fcntl", refuse)
    watch = CoreWatch([0], tmp_path / "lost" if why == "no folder" else tmp_path)
    watch.begin()
    assert watch.was_alone()
    watch.close()


def test_the_first_rank_of_a_host_watches_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[list[int]] = []
    monkeypatch.setattr("epcross.harness.running.core_watch.CoreWatch", lambda cores: watched.append(list(cores)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5})
    seat = Seat(rank=6, node="n", local_rank=0, local_size=3)
    watch_cores(seat, Domain.CPU)
    watch_cores(replace(seat, rank=7, local_rank=1), Domain.CPU)
    watch_cores(seat, Domain.NVLINK)
    assert [sorted(cores) for cores in watched] == [[4, 4, 5], [], []]


def test_rows_of_two_runs_on_the_same_cores_are_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    runs = [new_run(tmp_path) for _ in range(2)]
    timing, points = replace(TIMING, launches=1, wall_limit_s=30.0), [point(1, sleep_s=6), point(2, fault="raise")]
    jobs = [job(run, points, timing=timing) for run in runs]
    with ThreadPoolExecutor(2) as pool:
        assert [end.end for end in pool.map(run_job, jobs)] == [End.DONE, End.DONE]
    for run in runs:
        flags = {(r.tokens_per_rank, r.status): r.flags.split() for u in read_units(run)[0] for r in u.records}
        assert "not_alone" in flags[1, "ok"]
        assert (2, "error") in flags
