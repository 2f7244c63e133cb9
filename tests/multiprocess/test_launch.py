"""Ends that nobody planned: a supervisor dies, the launcher dies, two runs meet. Nothing stays, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from _spawn import TIMING, config, finish, job, left_overs, new_run, point, processes, until
from epcross.harness.point import Point
from epcross.harness.running.launch import End, run_job
from epcross.harness.running.progress import ProgressReader
from epcross.harness.running.schedule import turns
from epcross.harness.running.stage_clock import LOAD
from epcross.harness.storing.run_directory import RunDirectory
from epcross.harness.storing.store import done_units, missing_rows, read_units
from epcross.harness.terms import Stage

pytestmark = pytest.mark.beside

ONCE = replace(TIMING, launches=1)
POINTS = [point(1), point(2, sleep_s=1.5), point(3)]


@pytest.fixture(autouse=True)
def path_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def in_the_slow_unit(run: RunDirectory) -> bool:
    """Whether the second point is being measured and the first is stored."""
    notes = ProgressReader(run.path).read()
    return bool(notes) and notes[-1]["event"] == "start" and notes[-1]["point_id"] == POINTS[1].point_id


def finish_the_rest(run: RunDirectory, points: list[Point]) -> None:
    """A second job measures what the first left; afterwards every planned row is there exactly once."""
    end, _ = finish(job(run, points, timing=ONCE, turns=turns(points, 1, done=done_units(run))))
    assert end.end is End.DONE
    units, problems = read_units(run)
    assert problems == []
    assert missing_rows(units, points, ONCE) == []  # raises if a row is there twice
    assert {record.status for unit in units for record in unit.records} == {"ok"}
    last = [note for note in ProgressReader(run.path).read() if note["event"] == "unit"][-1]
    assert last["stages_s"].keys() <= {LOAD, *Stage}
    assert sum(last["stages_s"].values()) == pytest.approx(last["wall_s"], abs=0.02)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_supervisor_ends_the_job_and_leaves_it_resumable(run: RunDirectory, rank: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        # the thread that starts the supervisors must outlive them: the kernel ties their lives to it
        ending = pool.submit(finish, job(run, POINTS, timing=ONCE))
        until(lambda: in_the_slow_unit(run) and len(processes(run, "running.worker")) == 2)
        (victim,) = [p for p in processes(run, "running.supervisor") if p.cmdline()[-2] == str(rank)]
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        end, _ = ending.result(timeout=30)
    assert time.monotonic() - killed_at < 3
    assert end.end is End.FAILED
    assert f"rank {rank}" in end.reason
    assert left_overs(run) == []
    assert done_units(run) == {(POINTS[0].point_id, 0)}
    finish_the_rest(run, POINTS)
    assert left_overs(run) == []


def test_a_request_to_stop_is_met_within_seconds(run: RunDirectory) -> None:
    asked_at: list[float] = []

    def stop() -> str | None:
        if not asked_at and in_the_slow_unit(run):
            asked_at.append(time.monotonic())
        return "enough" if asked_at else None

    end = run_job(job(run, POINTS, timing=ONCE), stop_asked=stop)
    assert time.monotonic() - asked_at[0] < 2
    assert (end.end, end.reason) == (End.CANCELLED, "enough")
    assert left_overs(run) == []
    finish_the_rest(run, POINTS)


LAUNCHER = """
import sys
from pathlib import Path
from epcross.harness.running.job import Job
from epcross.harness.running.launch import run_job
run_job(Job.read(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_outlives_a_killed_launcher(run: RunDirectory, stopped: bool) -> None:
    path = job(run, POINTS, timing=ONCE).write()
    environment = {**os.environ, "EPCROSS_TEST_RUN": str(run.path)}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(path)], env=environment) as launcher:
        until(lambda: in_the_slow_unit(run) and len(processes(run, "running.worker")) == 2)
        if stopped:  # a worker that cannot run a handler goes too
            processes(run, "running.worker")[0].suspend()
        launcher.kill()
    until(lambda: left_overs(run) == [], 5)
    assert done_units(run) == {(POINTS[0].point_id, 0)}


def test_a_worker_starts_while_the_one_before_it_leaves_and_does_nothing_before_that_is_gone(run: RunDirectory) -> None:
    """A worker that ends gives up its GPU for a second: one that starts may import meanwhile, and come near none."""
    points = [point(1, name, ep_size=1) for name in ("first", "second", "third")]
    backends = {p.backend: config(p.backend, "_spawn:LeavesSlowly") for p in points}
    end, _ = finish(job(run, points, timing=ONCE, backends=backends))
    assert end.end is End.DONE
    assert {record.status for unit in read_units(run)[0] for record in unit.records} == {"ok"}
    lives = sorted(json.loads(path.read_text()) for path in run.path.glob("gone-*"))
    assert len(lives) == 3  # the last one, too, left in good order
    for (_, _, gone), (started, begun, _) in pairwise(lives):
        assert started < gone - 0.5
        assert begun >= gone
    assert left_overs(run) == []


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    runs = [new_run(tmp_path) for _ in range(2)]
    jobs = [job(run, [point(1), point(2, fault="kill")], floor="_spawn:measure_floor") for run in runs]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(run_job, jobs))
    assert [end.end for end in ends] == [End.DONE, End.DONE]
    for run in runs:
        units, _ = read_units(run)
        rows = {(r.tokens_per_rank, r.launch, r.status) for unit in units for r in unit.records}
        assert rows == {(1, 0, "ok"), (1, 1, "ok"), (2, 0, "error"), (2, 1, "skipped")}
        assert {r.run_id for unit in units for r in unit.records} == {run.run_id}


def test_workers_are_bound_to_cores_of_their_own(run: RunDirectory) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs 2 cores")
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(finish, job(run, POINTS[:2], timing=ONCE))
        workers = until(lambda: in_the_slow_unit(run) and len(found := processes(run, "running.worker")) == 2 and found)
        bound = until(lambda: [b for b in map(psutil.Process.cpu_affinity, workers) if len(b) == 1])
        assert len({core for cores in bound for core in cores}) == len(bound)
        assert all(os.getpgid(worker.pid) == worker.pid for worker in workers)
        assert ending.result(timeout=30)[0].end is End.DONE
    job_file = json.loads((run.path / "jobs" / "ep2.json").read_text())
    address = json.loads((run.path / "jobs" / "ep2.address").read_text())
    assert address["host"] == "127.0.0.1"
    assert address["token"] not in json.dumps(job_file)
