"""Tables that no run leaves are refused when they are read: each row once, by its own rules and by its plan."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.errors import StoreError
from epcross.harness.point import Placement, Routing
from epcross.harness.record import UnitResult
from epcross.harness.storing.parquet import read_stored_rows, rows_table, samples_table, write_tables
from epcross.harness.storing.planned_rows import FACTORS
from epcross.harness.storing.rows import base_record, failed_records
from epcross.harness.storing.store import RunDirectory, create_run, load_rows, merge, release, write_unit
from epcross.harness.terms import BackendKind, Regime, RoutingKind, Status, WeightFormat

MEASURED = Path(__file__).parents[2] / "results" / "measured"
POINT = make_point()
FAILED = make_point(tokens=8)


def with_value(table: pa.Table, column: str, value: Any) -> pa.Table:
    """`table` with one value in all rows of a column."""
    field = table.schema.field(column)
    return table.set_column(table.schema.get_field_index(column), field, pa.array([value] * len(table), field.type))


@pytest.fixture
def table() -> pa.Table:
    """Four ok rows."""
    return rows_table(make_unit(POINT).records)


def store(folder: Path, rows: pa.Table) -> Path:
    folder.mkdir(exist_ok=True)
    write_tables(folder, rows, samples_table("run-a", []))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(StoreError) as caught:
        load_rows(folder)
    words = str(caught.value)
    assert words.startswith(f"{folder / 'rows.parquet'} was changed: ")
    assert words.endswith(". Restore it from a copy or from version control, or merge its runs again into a new folder")
    return words


def test_every_committed_table_keeps_the_rules() -> None:
    folders = sorted(path.parent for path in MEASURED.glob("*/rows.parquet"))
    assert len(folders) >= 10
    for folder in folders:
        assert len(read_stored_rows(folder)) > 0


def test_a_row_is_there_once(table: pa.Table, tmp_path: Path) -> None:
    assert len(load_rows(store(tmp_path / "once", table))) == 4
    words = refusal(store(tmp_path / "twice", pa.concat_tables([table, table.slice(1, 2)])))
    assert "2 rows are there more than once, where each is there once; the first: run_id run-a, point_id" in words
    other_run = with_value(table, "run_id", "run-b")  # the same point in another run is another row
    assert len(load_rows(store(tmp_path / "both", pa.concat_tables([table, other_run])))) == 8


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (
            "latency_us",
            5.0,
            "4 rows are ok with a latency_us outside their own latency_min_us to latency_max_us, above 0",
        ),
        ("latency_us", 99.0, "4 rows are ok with a latency_us outside"),
        ("latency_min_us", 0.0, "4 rows are ok with a latency_us outside"),
        ("latency_max_us", None, "4 rows are ok with a latency_us outside"),
        ("latency_max_us", float("inf"), "latency_max_us is infinite or no number somewhere"),
        ("estimator", "", "4 rows are ok without an estimator"),
        ("n_samples", 0, "4 rows are ok with n_samples below 1"),
        ("error_share", 1.01, "4 rows are ok with an error_share above 1"),
        ("reason", "rank 1 died", "4 rows are ok with a reason why they are not"),
        ("status", "error", "4 rows have a latency though they are not ok"),
        ("tokens_per_rank", -3, "tokens_per_rank is -3, where only numbers from 0 on are allowed"),
        ("workspace_bytes", -1, "workspace_bytes is -1, where only numbers from 0 on are allowed"),
        ("error_share", -0.1, "error_share is -0.1, where only numbers from 0 on are allowed"),
        ("num_sms", -5, "num_sms is -5, where only numbers from 0 on are allowed"),
        ("nvlink_wire_bytes", -0.5, "nvlink_wire_bytes is -0.5, where only numbers from 0 on are allowed"),
        ("gini", float("nan"), "gini is infinite or no number somewhere"),
        ("flags", "weird", "flags has 'weird', where only oversubscribed, unpinned, "),
        ("flags", "warm_l2 throttled", "flags is 'warm_l2 throttled', where words stand sorted, once each"),
        ("boundary", "moon", "boundary has 'moon', where only layout, "),
        ("phase", "dispatch", "phase is 'dispatch', which regime steady of kind exchange does not time"),
    ],
)
def test_a_row_keeps_its_own_rules(table: pa.Table, tmp_path: Path, column: str, value: Any, words: str) -> None:
    assert words in refusal(store(tmp_path / "rows", with_value(table, column, value)))


@pytest.mark.parametrize(
    ("flags", "reasons", "others", "words"),
    [
        ("", "sw_power_cap", None, "flags is '' with throttle_reasons 'sw_power_cap', which are power_capped"),
        ("throttled", "sw_power_cap", 0, "which are power_capped"),
        (
            "power_capped",
            "hw_slowdown",
            0,
            "flags is 'power_capped' with throttle_reasons 'hw_slowdown', which are throttled",
        ),
        ("power_capped", None, 0, "flags is 'power_capped' with throttle_reasons None, which are not power_capped"),
        ("power_capped", "", 0, "which are not power_capped"),
        ("warm_l2", "", 2, "flags is 'warm_l2' with other_processes 2, which is not_alone"),
        ("power_capped", "sw_power_cap", 0, ""),
        ("not_alone throttled", "sw_power_cap sw_thermal_slowdown", 1, ""),
        ("not_alone", "", 0, ""),  # by another run on its core
        ("throttled", None, None, ""),
    ],
)
def test_a_row_tells_what_was_seen_on_its_gpus(table, tmp_path, flags, reasons, others, words) -> None:
    for column, value in (("flags", flags), ("throttle_reasons", reasons), ("other_processes", others)):
        table = with_value(table, column, value)
    rows = store(tmp_path / "rows", table)
    if words:
        assert words in refusal(rows)
    else:
        assert len(load_rows(rows)) == len(table)


@pytest.mark.parametrize(
    ("kind", "phase"), [("layer", "layer"), ("layer", "layer_comm"), ("fused", "layer"), ("experts", "experts")]
)
def test_an_ok_layer_says_how_near_it_is_to_the_bound(table, tmp_path: Path, kind: str, phase: str) -> None:
    """From the version on that has the column; older rows are not to blame, nor are failed ones."""

    def rows(**columns: Any) -> pa.Table:
        own = table
        for column, value in {"kind": kind, "phase": phase, **columns}.items():
            own = with_value(own, column, value)
        return own

    words = refusal(store(tmp_path / "null", rows()))
    assert "4 rows of schema version 8 or later are ok layers or expert stages without an error_share" in words
    mixed = with_value(rows(schema_version=7).slice(0, 3), "error_share", None)
    assert len(load_rows(store(tmp_path / "older", mixed))) == 3
    assert len(load_rows(store(tmp_path / "told", rows(error_share=0.3)))) == 4
    exchange = with_value(table, "kind", "exchange")
    assert len(load_rows(store(tmp_path / "exchange", exchange))) == 4
    failed = failed_records(FAILED, TIMING, 0, CONTEXT, Status.ERROR, "rank 0 died")
    failed_rows = with_value(with_value(rows_table(failed), "kind", kind), "phase", phase)
    assert len(load_rows(store(tmp_path / "failed", failed_rows))) == 4


def test_what_a_run_may_leave_is_read(table: pa.Table, tmp_path: Path) -> None:
    for column, value in [
        ("flags", "throttled warm_l2"), ("gpu_temperature_c", -3), ("latency_min_us", 10.0), ("workspace_bytes", 0),
        ("workspace_bytes", None), ("boundary", None), ("error_share", 1.0),
    ]:  # fmt: skip
        rows = with_value(table.slice(0, 1), column, value)
        assert len(load_rows(store(tmp_path / "rows", rows))) == 1
    failed = rows_table(failed_records(FAILED, TIMING, 0, CONTEXT, Status.ERROR, "rank 0 died"))
    assert len(load_rows(store(tmp_path / "failed", failed))) == 4
    assert "4 rows are not ok and give no reason" in refusal(
        store(tmp_path / "mute", with_value(failed, "reason", None))
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose plan has two points and names them; one was measured and one failed."""
    points = [{"point_id": of.point_id, **of.to_json()} for of in (POINT, FAILED)]
    timing = {"launches": TIMING.launches, "seeds": TIMING.seeds, "chains": TIMING.chains}
    run = create_run(tmp_path / "runs", "s", {"points": points, "timing": timing}, {})
    context = replace(CONTEXT, run_id=run.run_id)
    write_unit(run, make_unit(POINT, context=context))
    failed = failed_records(FAILED, TIMING, 0, context, Status.ERROR, "rank 0 died")
    write_unit(run, UnitResult(point_id=FAILED.point_id, launch=0, records=failed))
    release(run.path)
    return run


@pytest.fixture
def merged(run: RunDirectory, tmp_path: Path) -> Path:
    merge(tmp_path / "merged", [run.path])
    return tmp_path / "merged"


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("backend", "ghost", "backend is 'ghost' in rows of point {first}, where only 'shm_fence' is allowed"),
        ("tokens_per_rank", 3, "tokens_per_rank is 3 in rows of point "),
        ("ep_size", 4, "ep_size is 4 in rows of point {first}, where only 2 is allowed"),
        ("kind", None, "kind is None in rows of point {first}, where only 'exchange' is allowed"),
        ("weight_format", "bf16", "weight_format is 'bf16' in rows of point {first}, where only None is allowed"),
        ("options", "[]", "options is '[]' in rows of point {first}, where only '{{}}' is allowed"),
        ("point_id", "feed", "point_id is feed, where only those of the plan's points are allowed"),
        ("launch", 2, "launch is 2, where only numbers below 2 are allowed"),
        ("seed", 2, "seed is 2, where only numbers below 2 are allowed"),
        ("chain", 2, "chain is 2, where only numbers below 2 are allowed"),
    ],
)
def test_rows_are_as_the_plan_beside_them_says(
    merged: Path, run: RunDirectory, column: str, value: Any, words: str
) -> None:
    assert len(load_rows(merged)) == 8
    rows = read_stored_rows(merged)
    first = rows["point_id"].to_pylist()[0]
    changed = with_value(rows, column, value)
    if column == "point_id":  # else rows would be there twice as well
        changed = changed.filter(pc.equal(changed["status"], "ok"))
    write_tables(merged, changed, samples_table(run.run_id, []))
    found = refusal(merged)
    assert words.format(first=first) in found
    assert f"(plan of {run.run_id})" in found


def test_rows_that_are_doubled_as_further_repeats_are_not_planned(merged: Path, run: RunDirectory) -> None:
    rows = read_stored_rows(merged)
    number = rows.schema.get_field_index("repeat")
    shifted = rows.set_column(number, rows.schema.field(number), pc.add(rows["repeat"], 8))
    write_tables(merged, pa.concat_tables([rows, shifted]), samples_table(run.run_id, []))
    assert "repeat is 8 at launch 0, seed 0, chain 0, where only 0 is allowed" in refusal(merged)


def beside_the_plan(merged: Path, run: RunDirectory, folder: Path) -> Path:
    """As an unpacked deposit has it."""
    for name in ("run.json", "plan.json", "environment.json", "rows.parquet"):
        (folder / name).write_bytes((merged / name if name == "rows.parquet" else run.path / name).read_bytes())
    return folder


def as_a_link(merged: Path, run: RunDirectory, folder: Path) -> Path:
    """A link from a folder without a plan."""
    (folder / "rows.parquet").symlink_to(merged / "rows.parquet")
    return folder


@pytest.mark.parametrize("make", [beside_the_plan, as_a_link])
def test_the_plan_is_found_where_rows_lie(
    merged: Path, run: RunDirectory, tmp_path: Path, make: Callable[[Path, RunDirectory, Path], Path]
) -> None:
    (tmp_path / "other").mkdir()
    changed = with_value(read_stored_rows(merged), "backend", "ghost")
    write_tables(merged, changed, samples_table(run.run_id, []))
    folder = make(merged, run, tmp_path / "other")
    assert "backend is 'ghost' in rows of point" in refusal(folder)


def test_a_plan_that_was_edited_is_no_plan(merged: Path, run: RunDirectory) -> None:
    plan = merged / "runs" / run.run_id / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b"shm_fence", b"ghost    "))
    with pytest.raises(StoreError, match=r"holds a damaged plan .* Restore it from a copy or from version control"):
        load_rows(merged)


def test_rows_of_older_versions_have_no_columns_of_later_ones(merged: Path, run: RunDirectory) -> None:
    rows = with_value(read_stored_rows(merged), "schema_version", 3)
    for name in ("kind", "compute", "compute_options"):
        rows = with_value(rows, name, None)
    write_tables(merged, rows, samples_table(run.run_id, []))
    assert len(load_rows(merged)) == 8


def test_columns_of_a_point_are_those_that_rows_are_made_with() -> None:
    """The plan is read without making points of it, so that reading stays fast; the two must say the same."""
    points = [
        POINT,
        replace(POINT, tokens=(1, 7), tokens_per_rank=4, max_tokens_per_rank=8, options=(("b", 2.5), ("c", None))),
        replace(POINT, routing=Routing(kind=RoutingKind.ZIPF, exponent=1.2, masked_fraction=0.1)),
        replace(POINT, routing=Routing(kind=RoutingKind.TRACE, path="/a", content_sha256="ab")),
        replace(POINT, placement=Placement(num_slots=16), regime=Regime.ENTRY),
        replace(
            POINT,
            kind=BackendKind.LAYER,
            compute="grouped",
            compute_options=(("tall", True),),
            weight_format=WeightFormat.BF16,
        ),
    ]
    for of in points:
        record = base_record(of, CONTEXT)
        assert {name: value(of.to_json()) for name, value in FACTORS.items()} == {
            name: getattr(record, name) for name in FACTORS
        }
    older = {
        name: value for name, value in POINT.to_json().items() if not name.startswith(("kind", "compute", "weight"))
    }
    assert {name: value(older) for name, value in FACTORS.items()} == {
        name: value(POINT.to_json()) for name, value in FACTORS.items()
    }
    assert {"kind", "compute", "compute_options", "weight_format"} < FACTORS.keys()
