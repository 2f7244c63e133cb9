import errno
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness import run_directory, sealed
from epcross.harness.errors import StoreError
from epcross.harness.parquet import rows_table, samples_table, write_tables
from epcross.harness.record import COLUMNS, SCHEMA_VERSION, Samples, UnitResult
from epcross.harness.rows import failed_records
from epcross.harness.store import (
    RunDirectory,
    claim,
    compact,
    create_run,
    done_units,
    load_rows,
    load_samples,
    missing_rows,
    open_run,
    owner_of,
    planned_keys,
    read_floor,
    read_units,
    release,
    set_aside_damaged,
    start_unit,
    write_floor,
    write_unit,
)
from epcross.harness.terms import Regime, Stage, Status

PLAN = {"points": [make_point().to_json()]}


@pytest.fixture
def run(tmp_path: Path):
    created = create_run(tmp_path, "quickstart", PLAN, {"hostname": "here"})
    yield created
    release(created.path)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the folder


def test_a_new_run_opens_with_what_it_was_given(run: RunDirectory):
    opened = open_run(run.path)
    assert opened == run
    assert json.dumps(opened.plan) == json.dumps(PLAN)
    assert opened.environment == {"hostname": "here"}
    assert opened.sweep == "quickstart"
    assert opened.run_id == run.path.name == opened.allocation_id
    stamp, clock, sweep, suffix = opened.run_id.split("-")
    assert (len(stamp), len(clock), sweep, len(suffix)) == (8, 6, "quickstart", 4)
    assert files_of(run.path) == ["attempts", "environment.json", "logs", "owner", "plan.json", "run.json", "units"]


def test_a_sweep_name_cannot_spoil_the_path(tmp_path: Path):
    run = create_run(tmp_path, "../my dir/tokens=1,2.yaml", PLAN, {})
    assert run.path.parent == tmp_path
    assert run.run_id.split("-", 2)[2].startswith("tokens-1-2-")
    assert run.sweep == "../my dir/tokens=1,2.yaml"


def test_runs_started_in_the_same_second_never_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    suffixes = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda n: next(suffixes) if n == 2 else os.urandom(n).hex())

    class Frozen(run_directory.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(run_directory, "datetime", Frozen)
    names = [create_run(tmp_path, "s", PLAN, {}).run_id for _ in range(2)]
    assert names == ["20260102-030405-s-aaaa", "20260102-030405-s-bbbb"]


def test_an_unwritable_output_dir_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot create a run in .*file.*output_dir"):
        create_run(tmp_path / "file", "s", PLAN, {})


def test_a_full_disk_at_creation_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealed.os, "write", failing(errno.ENOSPC))
    with pytest.raises(StoreError, match="No space left on device; nothing was measured"):
        create_run(tmp_path, "s", PLAN, {})
    assert files_of(tmp_path) == []


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match=r"is not a run directory: it has no run\.json"):
        open_run(tmp_path / "absent")


def test_a_newer_schema_names_the_version_that_reads_it(run: RunDirectory):
    header = {**sealed.read_sealed(run.path / "run.json"), "schema_version": SCHEMA_VERSION + 1}
    sealed.write_whole(run.path / "run.json", sealed.seal({**header, "epcross_version": "9.1", "new": 1}))
    with pytest.raises(StoreError, match=r"written by epcross 9\.1; this is epcross .* Install epcross 9\.1 or later"):
        open_run(run.path)


@pytest.mark.parametrize("name", ["plan.json", "environment.json", "run.json"])
def test_a_torn_document_is_named(run: RunDirectory, name: str):
    file = run.path / name
    whole = file.read_bytes()
    for torn in (whole[:-1], whole[: len(whole) // 2], b"", whole.replace(b"{", b"[", 2), b"[]"):
        file.write_bytes(torn)
        with pytest.raises(StoreError, match=rf"{name} is damaged.*start a new run"):
            open_run(run.path)


def test_a_foreign_header_is_refused(run: RunDirectory):
    (run.path / "run.json").write_bytes(sealed.seal({"schema_version": 1}))
    with pytest.raises(StoreError, match=r"run\.json is not the header of a run"):
        open_run(run.path)


def test_a_missing_plan_is_named(run: RunDirectory):
    (run.path / "plan.json").unlink()
    with pytest.raises(StoreError, match=r"plan\.json cannot be read: No such file"):
        open_run(run.path)


def test_the_floor_is_kept(run: RunDirectory):
    assert read_floor(run) is None
    write_floor(run, {"empty_pair_us": 0.5})
    assert read_floor(run) == {"empty_pair_us": 0.5}


# --- the owner

CLAIMER = """
import sys, time
from pathlib import Path
from epcross.harness.errors import StoreError
from epcross.harness.store import claim
try:
    claim(Path(sys.argv[1]))
except StoreError as error:
    print(error)
    sys.exit(3)
print("claimed", flush=True)
time.sleep(float(sys.argv[2]))
"""


def claimer(run: RunDirectory, hold_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLAIMER, str(run.path), str(hold_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_until_the_owner_is_gone(run: RunDirectory):
    second = claimer(run, 0)
    words, _ = second.communicate()
    assert second.returncode == 3
    assert f"in use by process {os.getpid()} on" in words
    assert "delete" in words
    release(run.path)
    assert owner_of(run.path) is None
    third = claimer(run, 60)
    assert third.stdout
    assert third.stdout.readline() == "claimed\n"
    with pytest.raises(StoreError, match=f"in use by process {third.pid}"):
        claim(run.path)
    release(run.path)  # not ours: stays
    assert (owner_of(run.path) or "").startswith(f"process {third.pid} ")
    third.kill()  # dies without a word; a zombie until waited for
    deadline = time.monotonic() + 10
    while owner_of(run.path) and time.monotonic() < deadline:
        time.sleep(0.01)
    claim(run.path)
    assert (owner_of(run.path) or "").startswith(f"process {os.getpid()} ")
    third.communicate()


def test_an_owner_elsewhere_is_taken_as_alive_and_one_before_a_reboot_as_dead(run: RunDirectory):
    owner = json.loads((run.path / "owner").read_bytes())
    (run.path / "owner").write_text(json.dumps({**owner, "host": "elsewhere"}))
    with pytest.raises(StoreError, match=r"on elsewhere \(another host"):
        claim(run.path)
    for dead in ({**owner, "boot": "earlier"}, {**owner, "start": "1"}, {**owner, "pid": 2**22 + 1}):
        (run.path / "owner").write_text(json.dumps(dead))
        claim(run.path)
        assert json.loads((run.path / "owner").read_bytes()) == owner


def test_claiming_twice_does_no_harm(run: RunDirectory):
    claim(run.path)
    claim(run.path)


# --- units


def test_a_unit_is_read_back_as_it_was(run: RunDirectory):
    units = [
        make_unit(make_point(regime=regime), launch) for regime in (Regime.STEADY, Regime.ENTRY) for launch in (0, 1)
    ]
    for unit in units:
        write_unit(run, unit)
    results, problems = read_units(run)
    assert problems == []
    assert results == sorted(units, key=lambda u: (u.point_id, u.launch))
    assert done_units(run) == {(u.point_id, u.launch) for u in units}


def test_the_same_result_may_be_written_again_and_another_may_not(run: RunDirectory):
    unit = make_unit(make_point())
    path = write_unit(run, unit)
    before = path.read_bytes()
    assert write_unit(run, unit) == path
    other = make_unit(make_point(), latency_us=20.0)
    with pytest.raises(StoreError, match=f"unit {unit.point_id}.0 is already stored"):
        write_unit(run, other)
    assert path.read_bytes() == before


def test_a_sample_that_is_not_finite_comes_back_as_nan(run: RunDirectory):
    point = make_point()
    records = failed_records(point, TIMING, 0, CONTEXT, Status.NO_TIMING, "a sample is not finite")
    samples = (Samples(phase="round_trip", repeat=0, values_us=[[1.0, math.nan], [math.inf, 2.0]]),)
    path = write_unit(run, UnitResult(point_id=point.point_id, launch=0, records=records, samples=samples))
    json.loads(path.read_bytes(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    (result,), problems = read_units(run)
    assert problems == []
    np.testing.assert_equal(result.samples[0].values_us, [[1.0, math.nan], [math.nan, 2.0]])


def test_every_broken_rule_is_named_and_nothing_is_stored(run: RunDirectory):
    unit = make_unit(make_point())
    first, second, *rest = unit.records
    broken = replace(
        unit,
        records=(replace(first, latency_us=math.nan), replace(second, status="fine", launch=7), *rest, rest[0]),
        samples=(*unit.samples, Samples(phase="dispatch", repeat=0, values_us=[])),
    )
    with pytest.raises(StoreError) as caught:
        write_unit(run, broken)
    text = str(caught.value)
    assert "round_trip repeat 0: latency_us is nan; it must be finite" in text
    assert "round_trip repeat 1: status is 'fine'; allowed: ok, incorrect" in text
    assert f"round_trip repeat 1: belongs to unit {unit.point_id}.7" in text
    assert "round_trip repeat 2: 2 records" in text
    assert "dispatch repeat 0: 1 sets of samples for 0 records" in text
    assert files_of(run.units) == []


def failing(number: int):
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    return write


def test_a_damaged_unit_is_not_written_over(run: RunDirectory):
    path = write_unit(run, make_unit(make_point()))
    path.write_bytes(b"{}")
    with pytest.raises(StoreError, match="is there and damaged; a resume sets it aside"):
        write_unit(run, make_unit(make_point()))
    assert path.read_bytes() == b"{}"


def test_starts_are_counted_across_processes_and_crashes(run: RunDirectory):
    assert [start_unit(run, "abc", 0), start_unit(run, "abc", 0), start_unit(run, "abc", 1)] == [0, 1, 0]
    assert start_unit(open_run(run.path), "abc", 0) == 2
    run.attempts.rename(run.path / "elsewhere")
    with pytest.raises(StoreError, match=r"unit abc\.0 was not started: .*No such file"):
        start_unit(run, "abc", 0)


@pytest.mark.parametrize(
    ("number", "step"),
    [(errno.ENOSPC, "Free space"), (errno.EIO, "Check the disk"), (errno.EROFS, "Make it writable")],
)
def test_a_failing_disk_costs_at_most_the_unit_in_flight(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int, step: str
):
    first, second = make_unit(make_point(), 0), make_unit(make_point(), 1)
    write_unit(run, first)
    with monkeypatch.context() as patch:
        patch.setattr(sealed.os, "write", failing(number))
        with pytest.raises(StoreError) as caught:
            write_unit(run, second)
    text = str(caught.value)
    assert text.startswith(f"unit {second.point_id}.1 could not be written to {run.path}: {os.strerror(number)}. ")
    assert f"all stored before it are safe. {step}" in text
    assert f"--resume {run.path}" in text
    assert files_of(run.units) == [f"{first.point_id}.0.json"]
    write_unit(run, second)
    assert len(done_units(run)) == 2


def test_a_real_limit_in_the_middle_of_a_file_leaves_nothing_behind(run: RunDirectory):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            write_unit(run, make_unit(make_point()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_of(run.units) == []


def test_a_file_damaged_anywhere_is_reported_and_never_used(run: RunDirectory):
    good, bad = make_unit(make_point(), 0), make_unit(make_point(), 1)
    write_unit(run, good)
    path = write_unit(run, bad)
    whole = path.read_bytes()

    def check(data: bytes):
        path.write_bytes(data)
        results, problems = read_units(run)
        assert results == [good]
        assert [problem.path for problem in problems] == [path]
        assert str(problems[0]).startswith(f"{path.name}: ")
        assert "not done" in str(problems[0])

    @given(st.data())
    @settings(max_examples=150, deadline=None)
    def damage(data: st.DataObject):
        place = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            check(whole[:place])
        else:
            check(whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :])

    damage()
    for place in (*range(120), *range(len(whole) - 5, len(whole))):  # the frame around the content, every byte
        check(whole[:place])
        check(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
    check(whole + b"\n")
    path.write_bytes(whole)
    assert read_units(run) == ([good, bad], [])


def test_a_unit_under_a_wrong_name_is_not_used(run: RunDirectory):
    path = write_unit(run, make_unit(make_point()))
    path.rename(run.units / f"{path.name.split('.')[0]}.1.json")
    (run.units / "stray.json").write_text("{}")
    results, problems = read_units(run)
    assert results == []
    assert ["not the one of its name" in str(p) for p in problems] == [True, False]
    assert "not named" in str(problems[1])


def test_a_unit_of_a_newer_schema_is_not_used(run: RunDirectory):
    path = write_unit(run, make_unit(make_point()))
    content = sealed.read_sealed(path)
    content["records"][0]["brand_new"] = 1
    path.write_bytes(sealed.seal(content))
    results, (problem,) = read_units(run)
    assert results == []
    assert "newer epcross (columns unknown here: brand_new)" in str(problem)


def test_a_resume_sets_damaged_units_aside_and_measures_them_again(run: RunDirectory):
    unit = make_unit(make_point())
    path = run.units / f"{unit.point_id}.0.json"
    for _ in range(2):
        assert write_unit(run, unit) == path
        path.write_bytes(path.read_bytes()[:50])
        (run.units / f".{path.name}.12345678.tmp").write_bytes(b"half")
        assert done_units(run) == set()
        (moved,) = set_aside_damaged(run)
        assert moved.parent == run.damaged
        assert files_of(run.units) == ["damaged"]
    assert files_of(run.damaged) == [path.name, f"{path.name}.1"]
    write_unit(run, unit)
    assert read_units(run) == ([unit], [])


def test_every_planned_row_is_accounted_for():
    points = [make_point(), make_point(regime=Regime.ENTRY)]
    keys = planned_keys(points, TIMING)
    assert len(keys) == len(set(keys)) == (1 + 3) * 8
    units = [make_unit(point, launch) for point in points for launch in (0, 1)]
    assert missing_rows(units, points, TIMING) == []
    lost = replace(units[3], records=units[3].records[1:])
    assert missing_rows([*units[:3], lost], points, TIMING) == [(points[1].point_id, "dispatch", 4)]
    assert missing_rows([], points, TIMING) == keys
    with pytest.raises(StoreError, match=rf"point {points[0].point_id}, phase round_trip, repeat 0: 2 rows"):
        missing_rows([units[0], units[0]], points, TIMING)
    with pytest.raises(StoreError, match=rf"point {points[1].point_id}, phase dispatch, repeat 0: not planned"):
        missing_rows(units, points[:1], TIMING)


def test_a_failed_unit_has_a_row_for_everything_planned(run: RunDirectory):
    point = make_point(regime=Regime.ENTRY)
    for launch in range(TIMING.launches):
        records = failed_records(
            point, TIMING, launch, CONTEXT, Status.TIMEOUT, "rank 1 hung", failed_rank=1, failed_stage=Stage.TIME
        )
        write_unit(run, UnitResult(point_id=point.point_id, launch=launch, records=records))
    assert missing_rows(read_units(run)[0], [point], TIMING) == []


# --- tables


@pytest.mark.parametrize("compacted", [False, True])
def test_rows_load_typed(run: RunDirectory, compacted: bool):
    ok_unit = make_unit(make_point())
    failed = failed_records(make_point(tokens=8), TIMING, 0, CONTEXT, Status.ERROR, "rank 0 died", failed_rank=0)
    write_unit(run, ok_unit)
    write_unit(run, UnitResult(point_id=failed[0].point_id, launch=0, records=failed))
    source = compact(run)[0] if compacted else run.path
    frame = load_rows(source)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == 8
    assert frame["latency_us"].dtype == np.float64
    assert frame["failed_rank"].dtype == pd.Int64Dtype()
    assert frame["status"].dtype == pd.StringDtype()
    assert frame["tuned"].dtype == pd.BooleanDtype()
    assert sorted(frame["latency_us"].dropna()) == [10.0, 11.0, 12.0, 13.0]
    assert set(frame.loc[frame["status"] == "error", "failed_rank"]) == {0}
    assert frame.loc[frame["status"] == "ok", "reason"].isna().all()


@pytest.mark.parametrize("compacted", [False, True])
def test_samples_load_long(run: RunDirectory, compacted: bool):
    unit = make_unit(make_point(), 1)
    write_unit(run, unit)
    frame = load_samples(compact(run)[1] if compacted else run.path)
    assert list(frame.columns) == ["run_id", "point_id", "phase", "repeat", "rank", "iteration", "value_us"]
    assert len(frame) == 4 * 2 * 2
    one = frame[(frame["repeat"] == 5) & (frame["rank"] == 1)]
    assert one["value_us"].tolist() == [9.5, 12.0]
    assert one["iteration"].tolist() == [0, 1]
    assert set(frame["run_id"]) == {run.run_id}


def test_an_empty_run_loads_as_empty_tables(run: RunDirectory):
    compact(run)
    assert len(load_rows([run.path])) == len(load_samples([run.path])) == 0
    assert tuple(load_rows(run.path / "rows.parquet").columns) == COLUMNS


def test_a_damaged_unit_is_named_when_rows_are_loaded(run: RunDirectory):
    path = write_unit(run, make_unit(make_point()))
    write_unit(run, make_unit(make_point(), 1))
    path.write_bytes(b"{}")
    with pytest.warns(UserWarning, match=rf"1 damaged units are left out: {path.name}"):
        assert len(load_rows(run.path)) == 4


@pytest.mark.parametrize("name", ["rows.parquet", "samples.parquet"])
def test_a_damaged_table_is_a_clear_error(run: RunDirectory, name: str):
    write_unit(run, make_unit(make_point()))
    compact(run)
    file = run.path / name
    load = load_rows if name == "rows.parquet" else load_samples
    whole = file.read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="is damaged or no parquet file"):
            load(file)
    with pytest.raises(StoreError, match="does not exist"):
        load(run.path / "absent.parquet")


def test_a_million_samples_load_quickly(tmp_path: Path):
    point = make_point()
    records = make_unit(point).records
    values = np.random.default_rng(0).random((4, 62_500)).tolist()
    samples = tuple(Samples(phase=r.phase, repeat=r.repeat, values_us=values) for r in records)
    unit = UnitResult(point_id=point.point_id, launch=0, records=records, samples=samples)
    write_tables(tmp_path, rows_table(records), samples_table("run", [unit]))
    start = time.perf_counter()
    frame = load_samples(tmp_path)
    elapsed_s = time.perf_counter() - start
    assert len(frame) == 1_000_000
    assert frame["value_us"].iloc[62_500 * 4 + 1] == values[0][1]
    assert elapsed_s < 2


def test_nothing_warns_on_the_usual_way(run: RunDirectory):
    write_unit(run, make_unit(make_point()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_rows([run.path, run.path])
        load_samples([run.path, run.path])
