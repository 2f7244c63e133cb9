"""Rows of an older schema are read in the words of today."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_values import make_point, make_unit

from epcross.harness.errors import StoreError
from epcross.harness.record import SCHEMA_VERSION
from epcross.harness.storing.older import as_now, table_as_now
from epcross.harness.storing.parquet import rows_table
from epcross.harness.storing.sealed import seal
from epcross.harness.storing.store import RunDirectory, load_rows, read_units, write_unit

CASES = [
    (7, "throttled", "sw_power_cap", "power_capped"),
    (7, "not_alone throttled within_launch", "sw_power_cap", "not_alone power_capped within_launch"),
    (7, "throttled", "applications_clocks_setting sw_power_cap", "power_capped"),
    (7, "throttled", "sw_power_cap sw_thermal_slowdown", "throttled"),
    (7, "throttled", "hw_slowdown", "throttled"),
    (7, "throttled", None, "throttled"),  # why is not known
    (7, "within_launch", "sw_power_cap", "within_launch"),
    (8, "throttled", "sw_power_cap", "throttled"),  # nothing writes this: what stands there is not guessed at
    (8, "power_capped", "sw_power_cap", "power_capped"),
]


@pytest.mark.parametrize(("version", "flags", "reasons", "now"), CASES)
def test_a_gpu_at_its_power_limit_was_called_throttled(version, flags, reasons, now):
    row = {"schema_version": version, "flags": flags, "throttle_reasons": reasons, "backend": "x"}
    assert as_now(row) == {**row, "flags": now}
    unit = make_unit(make_point())
    told = [replace(r, schema_version=version, flags=flags, throttle_reasons=reasons) for r in unit.records]
    table = rows_table(told)
    read = table_as_now(table)
    assert read["flags"].to_pylist() == [now] * len(told)
    assert read.drop(["flags"]).equals(table.drop(["flags"]))
    assert read.schema == table.schema


@pytest.mark.parametrize("row", [{}, {"schema_version": "7", "flags": "throttled"}, {"schema_version": 7, "flags": 3}])
def test_what_is_no_row_is_left_to_those_who_refuse_it(row):
    assert as_now(row) == row


def test_an_empty_table_stays_one():
    assert table_as_now(rows_table([])).equals(rows_table([]))


def test_runs_and_tables_from_before_are_read_so_and_stay_as_they_are(run: RunDirectory, tmp_path):
    unit = make_unit(make_point())
    write_unit(run, unit)
    (file,) = run.units.glob("*.json")
    content = json.loads(file.read_text())["content"]
    for record in content["records"]:
        record |= {"schema_version": 7, "flags": "throttled", "throttle_reasons": "sw_power_cap"}
    file.write_bytes(seal(content))
    stored = file.read_bytes()
    (read,), problems = read_units(run)
    assert not problems
    assert {(row.flags, row.schema_version) for row in read.records} == {("power_capped", 7)}
    assert set(load_rows(run.path)["flags"]) == {"power_capped"}
    assert file.read_bytes() == stored

    older = rows_table([replace(row, flags="throttled") for row in read.records])
    pq.write_table(older, tmp_path / "rows.parquet")
    assert set(load_rows(tmp_path / "rows.parquet")["flags"]) == {"power_capped"}

    lacking = older.drop(["error_share"])  # which came with version 8
    pq.write_table(lacking, tmp_path / "lacking.parquet")
    assert load_rows(tmp_path / "lacking.parquet")["error_share"].isna().all()
    newer = older.set_column(0, "schema_version", pa.array([SCHEMA_VERSION] * len(older), pa.int64()))
    pq.write_table(newer, tmp_path / "newer.parquet")
    with pytest.raises(StoreError, match="throttle_reasons 'sw_power_cap', which are power_capped"):
        load_rows(tmp_path / "newer.parquet")
