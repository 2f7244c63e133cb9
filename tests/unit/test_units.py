import errno
import json
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_values import CONTEXT, TIMING, failing, files_of, make_point, make_unit

from epcross.harness.errors import StoreError
from epcross.harness.record import Samples, UnitResult
from epcross.harness.storing import sealed
from epcross.harness.storing.rows import failed_records
from epcross.harness.storing.store import (
    RunDirectory,
    done_units,
    missing_rows,
    open_run,
    planned_keys,
    read_floor,
    read_units,
    set_aside_damaged,
    start_unit,
    write_floor,
    write_unit,
)
from epcross.harness.terms import Regime, Stage, Status


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


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from epcross.harness.storing.store import open_run, write_unit
from store_values import make_point, make_unit
run = open_run(Path(sys.argv[1]))
print("ready", flush=True)
for tokens in range(1, 100_000):
    write_unit(run, make_unit(make_point(tokens=tokens)))
"""


def test_a_writer_killed_at_any_moment_leaves_whole_units(run: RunDirectory):
    command = [sys.executable, "-c", WRITER, str(run.path), str(Path(__file__).parent)]
    for stored in (5, 25):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
            while len(files_of(run.units)) < stored:
                time.sleep(0.0007)
            writer.kill()
        results, problems = read_units(run)
        assert problems == []
        assert {result.point_id: result for result in results} == {
            unit.point_id: unit for unit in (make_unit(make_point(tokens=n + 1)) for n in range(len(results)))
        }
        assert set_aside_damaged(run) == []
        assert len(files_of(run.units)) == len(results)  # nothing half-written is left


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


def test_a_resume_sets_a_damaged_floor_aside(run: RunDirectory):
    write_floor(run, {"cpu_ep2": {"copy_gbps": 10.5}})
    assert set_aside_damaged(run) == []
    assert read_floor(run) == {"cpu_ep2": {"copy_gbps": 10.5}}
    floor = run.path / "floor.json"
    floor.write_bytes(floor.read_bytes()[:-7])
    assert set_aside_damaged(run) == [run.damaged / "floor.json"]
    assert read_floor(run) is None
