"""One rank fails, in every way at every stage: a bounded end, one culprit, all rows, and the sweep goes on."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from _spawn import EVERY_RANK, TIMING, config, finish, job, left_overs, new_run, point
from epcross.harness.record import UnitResult
from epcross.harness.running.launch import End
from epcross.harness.running.progress import ProgressReader
from epcross.harness.running.schedule import turns
from epcross.harness.storing.run_directory import RunDirectory, read_floor
from epcross.harness.storing.store import missing_rows, read_units
from epcross.harness.terms import Domain, Flag, Sharing, Stage, Status


def gpu_count() -> int:
    return len([entry for entry in Path("/dev").glob("nvidia*") if entry.name.removeprefix("nvidia").isdigit()])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    folder = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    return new_run(tmp_path)


def stored(run: RunDirectory) -> dict[tuple[int, int], UnitResult]:
    units, problems = read_units(run)
    assert problems == []
    return {(unit.records[0].tokens_per_rank, unit.launch): unit for unit in units}


def statuses(run: RunDirectory) -> dict[tuple[int, int], set[str]]:
    return {key: {record.status for record in unit.records} for key, unit in stored(run).items()}


IN_TIME = ["raise", "exit", "kill", "segfault", "stop", "hang", "wait_expired", "silent"]
FAULTS = [
    *[(fault, "time", 1) for fault in IN_TIME],
    ("raise", "time", 0),
    ("kill", "prepare", 0),
    ("hang", "verify_after", 0),
]
WORDS = {
    "raise": "RuntimeError: the fake was told to raise",
    "exit": "its process ended with exit status 7; its last words: these are my last words",
    "kill": "its process was killed by SIGKILL",
    "segfault": "its process was killed by SIGSEGV; its last words: Fatal Python error: Segmentation fault",
    "stop": "not done within the wall limit of 1 s",
    "hang": "not done within the wall limit of 1 s",
    "wait_expired": "rank 1 waited 1 s for peer 0 in dispatch, epoch 3",
    "silent": "it did not answer; rank 0: rank 0 waited 1 s for peer 1 in combine, epoch 9",
}


@pytest.mark.parametrize(("fault", "stage", "rank"), FAULTS)
def test_a_fault_costs_one_unit(run: RunDirectory, fault: str, stage: str, rank: int) -> None:
    slow = fault in ("stop", "hang")
    timing = replace(TIMING, wall_limit_s=1.0 if slow else 20.0)
    points = [point(1, child=True), point(2, fault=fault, stage=stage, rank=rank, child=True), point(3)]
    end, took_s = finish(job(run, points, timing=timing))
    assert end.end is End.DONE
    assert took_s < 15
    ok, bad, skipped = {Status.OK}, {Status.ERROR}, {Status.SKIPPED}
    if fault in ("stop", "hang", "wait_expired", "silent"):
        bad = {Status.TIMEOUT}
    assert statuses(run) == {(1, 0): ok, (2, 0): bad, (3, 0): ok, (1, 1): ok, (2, 1): skipped, (3, 1): ok}
    assert missing_rows(stored(run).values(), points, timing) == []
    for record in stored(run)[2, 0].records:
        assert (record.failed_rank, record.failed_stage) == (rank, stage)
        assert record.reason is not None
        assert record.reason.startswith(WORDS[fault])
    again = stored(run)[2, 1].records[0]
    assert again.reason is not None
    assert again.reason.startswith(f"not tried again: in launch 0 rank {rank} failed in {stage}: {WORDS[fault]}")
    assert left_overs(run) == []


def test_what_does_not_fit_on_any_rank_is_unsupported_and_costs_no_worker(run: RunDirectory) -> None:
    points = [point(1), point(2, fault="does_not_fit", stage="prepare", rank=EVERY_RANK), point(3)]
    end, _ = finish(job(run, points, timing=replace(TIMING, wall_limit_s=20.0)))
    assert end.end is End.DONE
    ok, refused = {Status.OK}, {Status.UNSUPPORTED}
    assert statuses(run) == {(1, 0): ok, (2, 0): refused, (3, 0): ok, (1, 1): ok, (2, 1): ok, (3, 1): ok}
    (reason,) = {record.reason for record in stored(run)[2, 0].records}
    assert reason == "the workspace takes 2 bytes and 1 byte is free: lower max_tokens_per_rank"


def test_ranks_of_one_launch_are_one_process(run: RunDirectory) -> None:
    shared = replace(point(1, ep_size=4), domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH)
    made = replace(job(run, [shared]), domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH)
    end, _ = finish(made)
    assert end.end is End.DONE
    assert len(list(run.logs.glob("*.supervisor.rank*.log"))) == 1
    found = statuses(run)
    if gpu_count():
        assert found == {(1, 0): {Status.OK}, (1, 1): {Status.OK}}
    else:  # the worker asks for a GPU before it does anything else
        assert found == {(1, 0): {Status.UNAVAILABLE}, (1, 1): {Status.UNAVAILABLE}}
        reasons = {record.reason for unit in stored(run).values() for record in unit.records}
        assert len(reasons) == 1
        assert "torch" in str(reasons)


def test_a_backend_that_cannot_start_is_given_up_after_two_tries(run: RunDirectory) -> None:
    points = [point(n) for n in (1, 2, 3, 4)] + [point(5, backend="fine")]
    backends = {"fake": config(target="_spawn:FailsAtImport"), "fine": config("fine")}
    end, _ = finish(job(run, points, backends=backends))
    assert end.end is End.DONE
    records = {key: unit.records[0] for key, unit in stored(run).items()}
    assert [records[n, 0].status for n in (1, 2, 3, 4, 5)] == ["error"] * 4 + ["ok"]
    assert {records[n, 0].failed_stage for n in (1, 2, 3, 4)} == {Stage.START}
    assert all("libfancy.so.3: cannot open shared object file" in str(records[n, 0].reason) for n in (1, 2, 3, 4))
    assert all("failed to start 2 times in a row" in str(records[n, 0].reason) for n in (3, 4))
    assert {records[n, 1].status for n in (1, 2, 3, 4)} == {"skipped"}
    starts = [n for n in ProgressReader(run.path).read() if n["event"] == "start" and n["backend"] == "fake"]
    assert len(starts) == 2


def test_a_missing_interpreter_is_named(run: RunDirectory) -> None:
    backends = {"fake": config(python="/nonexistent/python")}
    end, _ = finish(job(run, [point(1)], backends=backends, timing=replace(TIMING, launches=1)))
    assert end.end is End.DONE
    (record, _) = stored(run)[1, 0].records
    assert record.reason == "its interpreter /nonexistent/python cannot be started: No such file or directory"
    assert (record.status, record.failed_stage) == ("error", "start")


def test_a_backend_runs_in_its_own_interpreter_and_environment(run: RunDirectory, tmp_path: Path) -> None:
    """Another interpreter finds epcross without the folder that this one imports it from."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "started as my own: $MINE" >&2\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    backends = {
        "fake": config(python=str(python), env={"MINE": "yes", "PYTHONPATH": str(Path(__file__).parent.parent)})
    }
    end, _ = finish(job(run, [point(1)], backends=backends, timing=replace(TIMING, launches=1)))
    assert end.end is End.DONE
    assert statuses(run) == {(1, 0): {"ok"}}
    for rank in range(2):
        assert "started as my own: yes" in (run.logs / f"ep2.fake.launch0.rank{rank}.log").read_text()
    assert [path.name for path in (run.path / "jobs" / "imports").iterdir()] == ["epcross"]


def test_an_unavailable_backend_is_asked_once(run: RunDirectory) -> None:
    points = [point(1), point(2)]
    env = {"FAKE_UNAVAILABLE": "libfancy is absent; install fancy"}
    end, _ = finish(job(run, points, backends={"fake": config(env=env)}))
    assert end.end is End.DONE
    records = [record for unit in stored(run).values() for record in unit.records]
    assert {(r.status, r.reason, r.failed_rank) for r in records} == {("unavailable", env["FAKE_UNAVAILABLE"], None)}
    assert missing_rows(stored(run).values(), points, TIMING) == []


def test_a_refused_point_costs_no_worker(run: RunDirectory) -> None:
    end, _ = finish(job(run, [point(77), point(1)]))
    assert end.end is End.DONE
    assert statuses(run) == {(77, 0): {"unsupported"}, (77, 1): {"unsupported"}, (1, 0): {"ok"}, (1, 1): {"ok"}}
    assert stored(run)[77, 0].records[0].reason == "the fake refuses 77 tokens; choose another number"


def test_what_a_process_has_loaded_is_asked_of_ranks_in_their_own_environment(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of this one, from which the ranks have the same variable unless their backend says otherwise."""
    monkeypatch.setenv("FAKE_LOADED", "the library of the planner")
    points = [point(66), point(1), point(67, backend="other"), point(68, backend="none")]
    envs = {"other": {"FAKE_LOADED": "another"}, "none": {"FAKE_LOADED": ""}}
    backends = {"fake": config(), **{name: config(name, env=env) for name, env in envs.items()}}
    end, _ = finish(job(run, points, backends=backends, timing=replace(TIMING, launches=1)))
    assert end.end is End.DONE
    said = {tokens: (unit.records[0].status, unit.records[0].reason) for (tokens, _), unit in stored(run).items()}
    assert said == {
        66: ("unsupported", "the fake has loaded the library of the planner"),
        1: ("ok", None),
        67: ("unsupported", "the fake has loaded another"),
        68: ("ok", None),
    }


def test_fail_fast_ends_the_job_at_the_first_failure(run: RunDirectory) -> None:
    points = [point(1), point(2, fault="raise"), point(3)]
    end, _ = finish(job(run, points, fail_fast=True))
    assert end.end is End.FAIL_FAST
    assert "--fail-fast" in end.reason
    assert statuses(run) == {(1, 0): {"ok"}, (2, 0): {"error"}}
    assert left_overs(run) == []


def test_floor_position_attempt_and_flags(run: RunDirectory) -> None:
    points = [point(1, backend="a"), point(1, backend="b")]
    units = {f"{p.point_id}.0": 2 for p in points}
    end, _ = finish(job(run, points, attempts=units, turns=turns(points, 2, floor=True)))
    assert end.end is End.DONE
    assert read_floor(run) == {"ep2": {"domain": "cpu", "sharing": "none", "ep_size": 2, "ranks": [0, 1]}}
    found = {(r.backend, r.launch): r for unit in read_units(run)[0] for r in unit.records}
    assert {key: (r.position, r.attempt) for key, r in found.items()} == {
        ("a", 0): (0, 2),
        ("b", 0): (1, 2),
        ("b", 1): (0, 0),
        ("a", 1): (1, 0),
    }
    assert "retried" in found["a", 0].flags.split()
    assert "retried" not in found["a", 1].flags.split()
    enough = len(os.sched_getaffinity(0)) >= 2
    assert ("oversubscribed" in found["a", 0].flags.split()) is not enough


def test_more_ranks_than_cores_are_flagged(run: RunDirectory) -> None:
    size = len(os.sched_getaffinity(0)) + 2
    wide = replace(point(1, ep_size=size), tokens=(1,) * size)
    end, _ = finish(job(run, [wide], timing=replace(TIMING, launches=1)))
    assert end.end is End.DONE
    flags = set(stored(run)[1, 0].records[0].flags.split())
    assert flags - {Flag.NOT_ALONE} == {Flag.OVERSUBSCRIBED}  # another run may be on this machine's cores
    assert left_overs(run) == []
