import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_values import point, record, write
from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.analysis import frame
from epcross.harness.errors import InputError, StoreError
from epcross.harness.record import COLUMNS, Record, Samples, UnitResult
from epcross.harness.storing.parquet import rows_table, samples_table, write_tables
from epcross.harness.storing.rows import failed_records
from epcross.harness.storing.store import create_run, merge, release, write_floor, write_unit
from epcross.harness.terms import Domain, Flag, Phase, Regime, Status

FLOOR = {
    "cpu_ep2": {
        "domain": "cpu", "ep_size": 2, "empty_pair_us": 0.2, "flag_one_way_us": 0.5, "flag_pairs_us": [0.5],
        "copy_gbps": 20.0, "copy_bytes_per_rank": 64,
    },
    "cpu_ep1": {"domain": "cpu", "ep_size": 1, "empty_pair_us": 0.1, "flag_one_way_us": None, "copy_gbps": 9.0},
}  # fmt: skip


def failed(tokens: int = 8) -> tuple[Record, ...]:
    return failed_records(
        make_point(tokens=tokens), TIMING, 0, CONTEXT, Status.UNAVAILABLE, "no compiler", flags=[Flag.UNPINNED]
    )


@pytest.fixture
def rows(tmp_path: Path) -> pd.DataFrame:
    """Four ok rows at 4 tokens and four unavailable ones at 8."""
    return frame.load(write(tmp_path / "rows", [*make_unit(make_point()).records, *failed()]))


def test_every_column_is_there_and_typed(rows: pd.DataFrame) -> None:
    assert tuple(rows.columns[: len(COLUMNS)]) == COLUMNS
    assert rows["status"].dtype.ordered
    assert rows["status"].cat.categories.tolist() == [status.value for status in Status]
    assert (rows["phase"] >= Phase.DISPATCH).all()
    assert rows["tokens_per_rank"].dtype == np.int64
    assert rows["pairs_sum"].dtype == pd.Int64Dtype()
    assert rows["tuned"].dtype == np.bool_
    assert rows["latency_us"].dtype == np.float64
    missing = [name for name in rows.columns if rows[name].isna().any()]
    keys = {*frame.SERIES, *frame.LAUNCH, "tokens_per_rank", "flags", "weights_by", "failed_stage"}
    assert set(missing) & keys == set()


def test_grouping_by_any_key_loses_no_row(rows: pd.DataFrame) -> None:
    keys = [*frame.SERIES, "tokens_per_rank", "transport", "algorithm", "boundary", "weights_by", "ids_hash"]
    assert rows.groupby(keys, observed=True).size().sum() == len(rows) == 8
    assert set(rows["backend_version"]) == {"not reported"}
    assert set(frame.SERIES) == set(frame.SUBJECT) | set(frame.CONDITIONS)
    assert "tokens_per_rank" not in frame.SERIES


def test_a_series_is_one_curve_over_tokens(tmp_path: Path) -> None:
    records = [record(point("x", tokens)) for tokens in (1, 8, 64)]
    fixed = [record(point("x", tokens), max_tokens_per_rank=128) for tokens in (1, 8)]
    uneven = [record(point("x", 3), tokens_min=1)]
    own = frame.load(write(tmp_path, records))
    assert own.groupby(list(frame.SERIES), observed=True).ngroups == 1
    own = frame.load(write(tmp_path / "b", fixed))
    assert own["capacity"].tolist() == ["128", "128"]
    own = frame.load(write(tmp_path / "c", uneven))
    assert own["token_spread"].tolist() == ["1 of 6"]


def test_flags_are_columns(tmp_path: Path) -> None:
    marked = [
        record(point("x", 1), flags=flags) for flags in ("", "late_start", "late_start within_launch", "within_launch")
    ]
    own = frame.load(write(tmp_path, [with_repeat(row, i) for i, row in enumerate(marked)]))
    assert own["is_late_start"].tolist() == [False, True, True, False]
    assert own["is_within_launch"].tolist() == [False, False, True, True]
    assert {f"is_{flag}" for flag in Flag} <= set(own.columns)
    assert not own["is_throttled"].any()


def with_repeat(row: Record, repeat: int) -> Record:
    return replace(row, repeat=repeat, chain=repeat)


def test_bytes_follow_the_stated_rule(tmp_path: Path) -> None:
    """2 ranks x 4 tokens, rows of 64 bf16 values: 16 selections, 16 pairs, 8 of them remote; 128 bytes a row."""
    phases = [(Phase.ROUND_TRIP, Regime.STEADY), (Phase.DISPATCH, Regime.ENTRY), (Phase.COMBINE, Regime.ENTRY)]
    records = [
        record(point("x", 4, regime=regime), 10.0, phase, padded_bytes=112, combine_row_bytes=128)
        for phase, regime in phases
    ]
    records.append(
        record(point("x", 4, regime=Regime.STEADY), 10.0, Phase.LAYER, repeat=1, kind="layer", error_share=0.5)
    )
    own = frame.load(write(tmp_path, records)).set_index("phase")
    assert own["selection_bytes"].tolist()[:3] == [16 * 240, 16 * 112, 16 * 128]
    assert own["rank_bytes"].tolist()[:3] == [16 * 240, 16 * 112, 16 * 128]
    assert own["wire_bytes"].tolist()[:3] == [8 * 240, 8 * 112, 8 * 128]
    # bytes per microsecond are 10^6 bytes per second
    assert own["wire_gbps"].tolist()[:3] == pytest.approx([8 * 240 / 10e3, 8 * 112 / 10e3, 8 * 128 / 10e3])
    assert own.loc["layer", list(frame.VIEWS)].isna().all()
    assert frame.gbps("selection_bytes") == "selection_gbps"


@pytest.mark.parametrize(
    ("exact", "tokens", "share"), [(7.75, 4, 8 / 7.75), (None, 4, None), (None, 32, 1.0)], ids=["exact", "few", "many"]
)
def test_counted_bytes_are_set_beside_what_had_to_cross(tmp_path: Path, exact, tokens, share) -> None:
    """Two ranks; a pair for each token, stored as a whole number."""
    row = record(point("x", tokens), padded_bytes=100, combine_row_bytes=156)
    wire = None if exact is None else exact * 256
    counted = replace(row, nvlink_tx_bytes=2 * tokens * 256, nvlink_wire_bytes=wire)
    assert counted.pairs_remote_sum == 2 * tokens
    found = frame.load(write(tmp_path, [counted]))["nvlink_ratio"][0]
    assert np.isnan(found) if share is None else found == pytest.approx(share)


def test_rows_without_counts_have_no_bytes(rows: pd.DataFrame) -> None:
    assert rows[["rank_bytes", "rank_gbps"]].isna().all(axis=None)
    assert rows["rank_bytes"].dtype == np.float64


def test_headlines_leave_flagged_rows_out_and_say_so(tmp_path: Path) -> None:
    flags = ["", "within_launch", "late_start oversubscribed", "oversubscribed within_launch"]
    marked = [with_repeat(record(point("x", 1), flags=words), i) for i, words in enumerate(flags)]
    own = frame.load(write(tmp_path, [*marked, *failed()]))
    rows, note, left_out = frame.headline(own)
    assert rows["repeat"].tolist() == [0, 1]
    assert left_out == {"unavailable": 4, "oversubscribed": 2, "late_start": 1}
    assert note == "6 of 8 rows left out: 4 unavailable, 2 oversubscribed, 1 late_start"
    assert frame.headline(own, keep=["oversubscribed"]).rows["repeat"].tolist() == [0, 1, 3]
    assert frame.headline(own[own["flags"] == ""]).note == ""
    with pytest.raises(InputError, match="flag oversubscribd is unknown; allowed: oversubscribed, unpinned"):
        frame.headline(own, keep=["oversubscribd"])


def test_a_gpu_at_its_power_limit_stays_in_headlines_which_say_so(tmp_path: Path) -> None:
    told = [("", ""), ("power_capped", "sw_power_cap"), ("throttled", "hw_slowdown"),
            ("power_capped within_launch", "sw_power_cap")]  # fmt: skip
    marked = [
        with_repeat(record(point("x", 1), flags=words, throttle_reasons=reasons), i)
        for i, (words, reasons) in enumerate(told)
    ]
    rows, note, left_out = frame.headline(frame.load(write(tmp_path, marked)))
    assert rows["repeat"].tolist() == [0, 1, 3]
    assert left_out == {"throttled": 1}
    assert note == ("1 of 4 rows left out: 1 throttled; 2 of 3 rows at the power limit of a GPU (power_capped)")


def test_domains_load_together_and_are_told_apart(tmp_path: Path) -> None:
    gpu = record(point("y", 1), domain="nvlink")
    folder = write(tmp_path, [record(point("x", 1)), gpu])
    own = frame.load(folder)
    assert own["domain"].tolist() == ["cpu", "nvlink"]
    assert frame.load(folder, domains=[Domain.NVLINK])["backend"].tolist() == ["y"]
    assert frame.load(folder, domains="cpu")["backend"].tolist() == ["x"]
    with pytest.raises(InputError, match="domain gpu is unknown; allowed: cpu, nvlink"):
        frame.load(folder, domains=["gpu"])
    frame.require_one_domain(own[own["domain"] == "cpu"])
    frame.require_one_domain(own, mixed=True)
    with pytest.raises(InputError, match=r"rows of the domains cpu, nvlink are not comparable. Load one of them"):
        frame.require_one_domain(own)
    with pytest.raises(InputError, match="cpu, nvlink are not comparable"):
        frame.require_one_domain(own[own["domain"] == "cpu"], own[own["domain"] == "nvlink"])


def test_a_run_and_what_was_merged_of_it_carry_its_floor(tmp_path: Path) -> None:
    run = create_run(tmp_path, "quickstart", {"points": [make_point().to_json()]}, {"hostname": "here"})
    try:
        write_unit(run, make_unit(make_point(), context=replace(CONTEXT, run_id=run.run_id)))
        write_floor(run, FLOOR)
    finally:
        release(run.path)
    own = frame.load(run.path)
    assert [name for name in own.columns if name.startswith("floor_")] == [
        "floor_empty_pair_us", "floor_flag_one_way_us", "floor_copy_gbps",
    ]  # fmt: skip
    merge(tmp_path / "merged", [run.path])
    both = frame.load(tmp_path / "merged", str(run.path))
    assert len(both) == len(own) == 4
    assert own["floor_copy_gbps"].tolist() == both["floor_copy_gbps"].tolist() == [20.0] * 4
    assert frame.load(tmp_path / "merged")["floor_flag_one_way_us"].tolist() == [0.5] * 4


def test_floors_are_those_of_the_rows_run_domain_and_size(tmp_path: Path) -> None:
    run = create_run(tmp_path, "quickstart", {"points": [make_point().to_json()]}, {"hostname": "here"})
    try:
        write_floor(run, FLOOR)
    finally:
        release(run.path)
    records = [
        record(point("x", 1), run_id=run.run_id),
        record(point("x", 1, ep_size=4), run_id=run.run_id),
        replace(record(point("x", 1)), run_id="another"),
    ]
    own = frame.load(write(tmp_path / "other", records), run.path)
    assert own["floor_copy_gbps"].tolist()[0] == 20
    assert own["floor_empty_pair_us"].isna().tolist() == [False, True, True]
    assert own["floor_flag_one_way_us"].dtype == np.float64


def test_a_row_given_twice_counts_once_and_two_truths_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [record(point("x", 1), 10.0)])
    assert len(frame.load(one, one)) == 1
    two = write(tmp_path / "b", [record(point("x", 1), 11.0)])
    with pytest.raises(InputError, match="1 rows are there twice with different values, the first: run_id run-a"):
        frame.load(one, two)


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no runs given"):
        frame.load()
    with pytest.raises(InputError, match="no runs given"):
        frame.load_samples()
    with pytest.raises(StoreError, match="does not exist"):
        frame.load(tmp_path / "absent")
    with pytest.raises(InputError, match="view 'bytes' is unknown"):
        frame.gbps("bytes")


def test_empty_tables_load(tmp_path: Path) -> None:
    own = frame.load(write(tmp_path, []))
    assert len(own) == 0
    assert set(frame.SERIES) <= set(own.columns)
    assert frame.headline(own).left_out == {}


def test_samples_join_with_rows(tmp_path: Path) -> None:
    unit = make_unit(make_point())
    write_tables(tmp_path, rows_table(unit.records), samples_table("run-a", [unit]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = frame.load_samples(tmp_path)
        joined = samples.merge(
            frame.load(tmp_path), on=["run_id", "point_id", "phase", "repeat"], validate="many_to_one"
        )
    assert len(joined) == len(samples) == 4 * 2 * 2
    assert joined["phase"].dtype.ordered
    assert joined.loc[joined["repeat"] == 3, "latency_us"].unique().tolist() == [13.0]


@pytest.mark.timing
def test_a_million_samples_load_quickly(tmp_path: Path) -> None:
    of = make_point()
    records = make_unit(of).records
    values = np.random.default_rng(0).random((4, 62_500)).tolist()
    samples = tuple(Samples(phase=r.phase, repeat=r.repeat, values_us=values) for r in records)
    unit = UnitResult(point_id=of.point_id, launch=0, records=records, samples=samples)
    write_tables(tmp_path, rows_table(records), samples_table("run", [unit]))
    start_s = time.process_time()
    own = frame.load_samples(tmp_path)
    elapsed_s = time.process_time() - start_s
    assert len(own) == 1_000_000
    assert own["value_us"].iloc[62_500 * 4 + 1] == values[0][1]
    assert elapsed_s < 2
