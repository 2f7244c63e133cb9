import time
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.errors import StoreError
from epcross.harness.record import COLUMNS, Record, Samples, UnitResult
from epcross.harness.storing.parquet import rows_table, samples_table, write_tables
from epcross.harness.storing.rows import failed_records
from epcross.harness.storing.store import (
    RunDirectory,
    compact,
    load_rows,
    load_samples,
    write_unit,
)
from epcross.harness.terms import Status


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


def test_of_many_damaged_units_a_few_are_named_and_all_are_counted(run: RunDirectory):
    for launch in range(5):
        write_unit(run, make_unit(make_point(), launch)).write_bytes(b"{}")
    with pytest.warns(UserWarning, match=r"5 damaged units are left out: .*; and 2 more$") as told:
        assert len(load_rows(run.path)) == 0
    assert str(told[0].message).count("is damaged") == 3


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


def test_tables_of_the_first_schema_have_nulls_in_later_columns(run: RunDirectory, tmp_path: Path):
    write_unit(run, make_unit(make_point()))
    rows, samples = compact(run)
    table = pq.read_table(rows)
    later = [column.name for column in fields(Record) if column.metadata["since"] > 1]
    assert later
    version = table.schema.get_field_index("schema_version")
    old = table.set_column(version, table.schema.field(version), pa.array([1] * len(table), pa.int64())).drop(later)
    (tmp_path / "old").mkdir()
    write_tables(tmp_path / "old", old, pq.read_table(samples))
    frame = load_rows(tmp_path / "old")
    assert tuple(frame.columns) == COLUMNS
    assert frame[later].isna().all(axis=None)
    # a table of this schema that lacks them is damaged
    write_tables(tmp_path / "old", table.drop(later), pq.read_table(samples))
    with pytest.raises(StoreError, match="has other columns than this epcross"):
        load_rows(tmp_path / "old")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("latency_us", float("nan"), "4 rows are ok without a latency above 0"),
        ("latency_us", float("inf"), "4 rows are ok without a latency above 0"),
        ("latency_us", None, "4 rows are ok without a latency above 0"),
        ("latency_us", 0.0, "4 rows are ok without a latency above 0"),
        ("latency_us", -1.0, "4 rows are ok without a latency above 0"),
        ("status", "fine", "status is 'fine', where only ok, "),
        ("domain", "moon", "domain is 'moon', where only cpu, "),
        ("regime", "stead", "regime is 'stead', where only "),
    ],
)
def test_rows_that_no_run_leaves_are_refused(run: RunDirectory, column: str, value: object, words: str):
    """A parquet file has no seal: without a look at it, a verdict or a figure would rest on what was changed."""
    write_unit(run, make_unit(make_point()))
    path = compact(run)[0]
    assert len(load_rows(path)) == 4
    table = pq.read_table(path)
    field = table.schema.field(column)
    changed = pa.array([value] * len(table), field.type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), field, changed), path)
    with pytest.raises(StoreError, match="was changed: ") as caught:
        load_rows(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
