"""`epcross point`: a stored point again, alone, beside its stored rows, and under a wrapper."""

import re
import shutil
from pathlib import Path

import pytest

from _command import epcross, rows_of
from _spawn import left_overs
from epcross.harness import cli
from epcross.harness.planning.plan import Plan
from epcross.harness.running.find_point import runs_in
from epcross.harness.storing.store import merge, open_run
from epcross.harness.terms import Flag, Regime

pytestmark = pytest.mark.beside
SWEEP = """\
description: Two points and two launches.
timing: smoke
grid: {backend: shm_sentinel, ep_size: 2, model: tiny, tokens_per_rank: 3, regime: [steady, entry]}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run in results/runs."""
    work = tmp_path_factory.mktemp("work")
    (work / "config" / "sweep").mkdir(parents=True)
    (work / "config" / "sweep" / "two.yaml").write_text(SWEEP)
    ended = epcross(work, "run", "sweep=two", "timing.launches=2", "--config-dir", "config")
    assert ended.returncode == 0, ended.stderr
    return work


def points_of(run: Path) -> dict[Regime, str]:
    return {point.regime: point.point_id for point in Plan.from_json(open_run(run).plan).points}


def test_a_prefix_is_enough_and_the_rows_stand_beside_the_stored_ones(work: Path) -> None:
    (first,) = [run for run in runs_in(work / "results" / "runs") if "-two-" in run.name]
    point_id = points_of(first)[Regime.ENTRY]
    ended = epcross(work, "point", point_id[:9], "--output-dir", "again")
    assert ended.returncode == 0, ended.stderr
    assert f"{point_id} of {first.name}: shm_sentinel" in ended.stdout
    (run,) = runs_in(work / "again")
    assert ended.stdout.splitlines()[-1] == str(run)
    new, stored = rows_of(run), [row for row in rows_of(first) if row.point_id == point_id]
    assert {(row.point_id, row.launch) for row in new} == {(point_id, 0)}
    assert sorted(row.phase for row in new) == ["combine", "dispatch", "round_trip"]
    assert all(row.status == "ok" and Flag.PROFILED not in row.flags.split() for row in new)
    # phase, seed, chain, now, one time for each of two launches, ratio
    lines = [re.findall(r"[\w.]+", line) for line in ended.stdout.splitlines() if line.startswith("│")]
    assert [line[0] for line in lines] == [row.phase for row in new]
    for line, row in zip(lines, new, strict=True):
        old = [other.latency_us or 0 for other in stored if other.phase == row.phase]
        assert [float(word) for word in line[3:6]] == pytest.approx([row.latency_us or 0, *old], rel=6e-3, abs=6e-3)
        assert float(line[6]) == pytest.approx((row.latency_us or 0) / (sum(old) / 2), abs=0.006)
    assert "differs" not in ended.stdout
    assert open_run(run).plan["description"] == f"Point {point_id} of run {first.name} again, alone"
    assert open_run(run).plan["config"]["note"] == open_run(run).plan["description"]
    assert not left_overs(open_run(run))


def test_a_wrapper_starts_each_worker_and_its_rows_say_so(work: Path) -> None:
    (first,) = [run for run in runs_in(work / "results" / "runs") if "-two-" in run.name]
    wrapper = work / "wrap.sh"
    # a parent that stays, as a profiler does
    wrapper.write_text('#!/bin/sh\necho "began $1" > "$2"\nshift 2\n"$@"\n')
    wrapper.chmod(0o755)
    point_id = points_of(first)[Regime.STEADY]
    ended = epcross(
        work,
        "point",
        point_id,
        "--run",
        str(first),
        "--output-dir",
        "profiled",
        "--profile",
        f"{wrapper} rank{{rank}} {{log}}",
    )
    assert ended.returncode == 0, ended.stderr
    (run,) = runs_in(work / "profiled")
    logs = sorted(run.glob("logs/*.profile"))
    assert [log.read_text() for log in logs] == ["began rank0\n", "began rank1\n"]
    assert all(str(log) in ended.stdout for log in logs)
    assert all(Flag.PROFILED in row.flags.split() for row in rows_of(run))
    assert "flags differs: now profiled" in ended.stdout
    assert open_run(run).plan["timing"]["wall_limit_s"] == 600
    assert not left_overs(open_run(run))


def test_a_merged_folder_holds_points_too(work: Path, tmp_path: Path) -> None:
    (first,) = [run for run in runs_in(work / "results" / "runs") if "-two-" in run.name]
    merge(tmp_path / "merged", [first])
    point_id = points_of(first)[Regime.STEADY]
    ended = epcross(work, "point", point_id, "--run", str(tmp_path / "merged"), "--output-dir", str(tmp_path / "new"))
    assert ended.returncode == 0, ended.stderr
    assert f"{point_id} of {first.name}" in ended.stdout


def test_what_cannot_be_found_or_started_is_told(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(work)
    (first,) = [run for run in runs_in(work / "results" / "runs") if "-two-" in run.name]
    points = points_of(first)

    def refused(*words: str) -> str:
        assert cli.run(["point", *words]) in (1, 2)
        return capsys.readouterr().err

    ambiguous = refused("")
    assert "2 points begin with" in ambiguous
    assert all(f"{point_id}  shm_sentinel" in ambiguous for point_id in points.values())
    assert f"({first.name})" in ambiguous
    assert "no point begins with zz; looked into 1 runs" in refused("zz")
    assert "there is no command 'no-such-profiler'" in refused("zz", "--profile", "no-such-profiler -o x")
    assert "No closing quotation" in refused("zz", "--profile", "strace 'x")
    assert "holds no run" in refused("zz", "--run", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "no run, for results/runs here holds none" in refused("zz")
    for name, plan in {"1-damaged": "{", "2-whole": None}.items():
        shutil.copytree(first, tmp_path / "results" / "runs" / name)
        if plan:
            (tmp_path / "results" / "runs" / name / "plan.json").write_text(plan)
    said = refused("zz")
    assert re.search(r"not looked into: .*1-damaged.*plan", said)  # and the search goes on, in the other
    assert "no point begins with zz; looked into 2 runs" in said
    assert "2 points begin with" in refused("")
