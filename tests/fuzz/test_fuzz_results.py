"""Damaged run folders: every file that was cut, changed, or rewritten with other content is refused by name."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from _mutate import SECONDS, altered, damaged, fuzz

from epcross.harness.analysis.table import run_table, status_table
from epcross.harness.errors import EpcrossError, StoreError
from epcross.harness.planning.build import build
from epcross.harness.planning.plan import Plan
from epcross.harness.record import UnitResult
from epcross.harness.running.display import failure_line, progress_line
from epcross.harness.running.progress import Pace, ProgressLog, ProgressReader, attempts
from epcross.harness.storing.rows import RunContext, failed_records
from epcross.harness.storing.run_directory import RunDirectory, create_run, open_run, read_floor, write_floor
from epcross.harness.storing.run_owner import release
from epcross.harness.storing.sealed import seal, unseal
from epcross.harness.storing.units import missing_rows, read_units, write_unit
from epcross.harness.terms import Status


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build(["sweep=smoke", "backend=shm_fence"])


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> RunDirectory:
    """A run with one unit, a floor and some progress."""
    run = create_run(tmp_path, "smoke", plan.to_json(), {"cpu": "some"})
    release(run.path)
    context = RunContext(
        run_id=run.run_id, measure_hash="m", machine="x", allocation_id="a", git_sha="", git_dirty=False
    )
    point = plan.points[0]
    records = failed_records(point, plan.timing, 0, context, Status.ERROR, "it fell over", failed_rank=1)
    write_unit(run, UnitResult(point_id=point.point_id, launch=0, records=records))
    write_floor(run, {"cpu_ep2": {"pair_us": 1.5}})
    return run


def look(run: RunDirectory) -> None:
    """What `epcross status` and the table do with a run."""
    opened = open_run(run.path)
    plan = Plan.from_json(opened.plan)
    units, problems = read_units(opened)
    rows = [record for unit in units for record in unit.records]
    missing_rows(units, plan.points, plan.timing)
    run_table(rows)
    status_table(rows, planned_units=len(plan.points), done_units=len(units), problems=problems)
    read_floor(opened)


@pytest.mark.parametrize("name", ["run", "plan", "environment", "floor", "unit"])
@pytest.mark.parametrize("seconds", [pytest.param(0.7, id="short"), SECONDS[1]])
def test_a_file_with_damaged_bytes_is_named(run: RunDirectory, name: str, seconds: float) -> None:
    path = next(run.units.glob("*.json")) if name == "unit" else run.path / f"{name}.json"
    good = path.read_bytes()
    look(run)

    def case(drawn: random.Random) -> None:
        data = damaged(good, drawn, [b"{", b"}", b"null", b'"sha256":', b"\\ud800"])
        path.write_bytes(data)
        if name == "unit" and data != good:
            units, problems = read_units(run)
            assert (len(units), len(problems)) == (0, 1)
        look(run)
        if name != "unit":
            assert data == good, "changed bytes were taken"

    refused = fuzz(seconds, case, (StoreError,))
    assert refused > 5 or name == "unit"
    path.write_bytes(good)
    look(run)


@pytest.mark.parametrize("name", ["run", "plan", "environment", "floor", "unit"])
@pytest.mark.parametrize("seconds", [pytest.param(1.0, id="short"), SECONDS[1]])
def test_a_whole_file_with_other_content_is_refused_or_read(run: RunDirectory, name: str, seconds: float) -> None:
    """As another version, or an editor that knows the seal, might leave it."""
    path = next(run.units.glob("*.json")) if name == "unit" else run.path / f"{name}.json"
    content = unseal(path.read_bytes())

    def case(drawn: random.Random) -> None:
        path.write_bytes(seal(altered(content, drawn)))
        look(run)

    fuzz(seconds, case, (EpcrossError,))
    path.write_bytes(seal(content, indent=None if name == "unit" else 1))
    look(run)


def test_a_seal_around_what_is_no_json(run: RunDirectory) -> None:
    path = run.path / "plan.json"
    from epcross.harness.storing.sealed import _sealed

    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(_sealed(body))
        with pytest.raises(StoreError, match=r"plan\.json"):
            open_run(run.path)


@pytest.mark.parametrize("seconds", [pytest.param(1.0, id="short"), SECONDS[1]])
def test_damaged_progress_costs_its_own_lines(run: RunDirectory, plan: Plan, seconds: float) -> None:
    log = ProgressLog(run.path)
    log.note("session", units=3, done=0)
    log.note("turn", job="ep2", kind="measure", backend="shm_fence", launch=0)
    log.note("start", job="ep2", point_id="p", launch=0, backend="shm_fence")
    log.note(
        "unit", point_id="p", launch=0, backend="shm_fence", statuses={"ok": 1}, wall_s=1.0, reason=None,
        failed_rank=None, failed_stage=None,
    )  # fmt: skip
    log.note("end", end="done", reason="")
    path = run.path / "progress.jsonl"
    good = path.read_bytes()

    def case(drawn: random.Random) -> None:
        if drawn.random() < 0.5:
            data = damaged(good, drawn, [b"{}", b"null", b"{", b"[]"])
        else:
            lines = [json.dumps(altered(json.loads(line), drawn)) for line in good.splitlines()]
            data = "\n".join(lines).encode() + b"\n"
        path.write_bytes(data)
        notes = ProgressReader(run.path).read()
        attempts(notes)
        pace = Pace()
        for note in notes:
            pace.take(note)
        progress_line(pace)
        for note in pace.failures:
            failure_line(note)
        _ = pace.eta_s

    assert fuzz(seconds, case, ()) == 0
    path.write_bytes(good[:-30])  # as a kill leaves it
    assert [note["event"] for note in ProgressReader(run.path).read()] == ["session", "turn", "start", "unit"]
    assert asdict(Pace())["done"] == 0
