from pathlib import Path

import pytest
from analysis_values import simulate

from epcross.harness.analysis import frame, summary
from epcross.harness.analysis.resample import Trials, ends, resampled_medians, widened
from epcross.harness.errors import InputError
from epcross.harness.measuring.stats import IntervalKind

CURVES = {"a": lambda tokens: 10.0 + tokens, "b": lambda tokens: 5.0 + 2 * tokens}


def test_a_line_for_each_point_of_each_series(tmp_path: Path) -> None:
    rows = simulate(tmp_path, CURVES, tokens=[1, 8], repeats=(6, 2, 3), spread=(0.1, 0.03, 0.03))
    table = summary.points(rows)
    assert list(zip(table["backend"], table["tokens_per_rank"], strict=True)) == [
        ("a", 1), ("a", 8), ("b", 1), ("b", 8),
    ]  # fmt: skip
    assert set(frame.SERIES) <= set(table.columns)
    for line in table.to_dict("records"):
        own = rows[(rows["backend"] == line["backend"]) & (rows["tokens_per_rank"] == line["tokens_per_rank"])]
        assert line["median_us"] == own["latency_us"].median()
        assert (line["lowest_us"], line["highest_us"]) == (own["latency_us"].min(), own["latency_us"].max())
        trials = Trials(own)
        (drawn,) = resampled_medians([trials])
        low, high = ends(widened(trials.medians_us(), drawn, 6)[0], IntervalKind.BOOTSTRAP)
        assert (line["low_us"], line["high_us"]) == (low, high)
        assert line["low_us"] < line["median_us"] < line["high_us"]
        assert (line["launches"], line["seeds"], line["chains"], line["trials"]) == (6, 2, 3, 36)
        assert not line["within_launch"]


def test_flagged_rows_are_left_out_and_said(tmp_path: Path) -> None:
    rows = simulate(tmp_path, CURVES, tokens=[1], repeats=(6, 1, 3), spread=(0.1, 0.0, 0.03))
    rows["is_throttled"] = rows["backend"] == "b"
    table = summary.points(rows)
    assert table["backend"].tolist() == ["a"]
    assert table.attrs["note"] == "18 of 36 rows left out: 18 throttled"
    assert summary.points(rows, keep=["throttled"])["backend"].tolist() == ["a", "b"]
    with pytest.raises(InputError, match="flag hot is unknown"):
        summary.points(rows, keep=["hot"])


def test_a_few_trials_have_a_range(tmp_path: Path) -> None:
    rows = simulate(tmp_path, CURVES, tokens=[1], repeats=(1, 1, 3), spread=(0.1, 0.0, 0.1))
    line = summary.points(rows).iloc[0]
    assert (line["interval"], line["within_launch"]) == ("range", True)
    assert line["low_us"] >= line["lowest_us"]
    assert line["high_us"] <= line["highest_us"]


def test_no_rows_give_no_lines(tmp_path: Path) -> None:
    rows = simulate(tmp_path, CURVES, tokens=[1], repeats=(1, 1, 1), spread=(0.1, 0.0, 0.0))
    table = summary.points(rows.iloc[:0])
    assert table.empty
    assert [*frame.SERIES, "tokens_per_rank"] == list(table.columns)
