from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_values import simulate
from scipy import stats

from epcross.harness.analysis.resample import (
    Trials,
    ends,
    nan_median,
    resampled_medians,
    support,
    widened,
    widening,
)
from epcross.harness.measuring.stats import IntervalKind, interval


def trials(folder: Path, repeats: tuple[int, int, int], **more: object) -> Trials:
    spread = more.pop("spread", (0.1, 0.05, 0.05))
    drop = more.pop("drop", None)
    rows = simulate(folder, {"x": float}, tokens=[8, 1, 64], repeats=repeats, spread=spread, **more)  # type: ignore[arg-type]
    return Trials(rows if drop is None else rows[~drop(rows)])  # type: ignore[operator]


def test_trials_are_laid_out_by_level(tmp_path: Path) -> None:
    rows = simulate(tmp_path, {"x": float}, tokens=[8, 1], repeats=(3, 2, 4), spread=(0.1, 0.1, 0.1))
    shuffled = rows.sample(frac=1, random_state=3)
    own = Trials(shuffled)
    assert own.points.tolist() == [1, 8]
    assert own.table.shape == (2, 3, 2, 4)
    assert own.levels == (3, 2, 4)
    one = rows[(rows.tokens_per_rank == 8) & (rows.launch == 2) & (rows.seed == 1) & (rows.chain == 3)]
    assert own.table[1, 2, 1, 3] == one["latency_us"].item()
    assert own.medians_us().tolist() == rows.groupby("tokens_per_rank")["latency_us"].median().tolist()


def test_launches_of_two_runs_are_different_launches(tmp_path: Path) -> None:
    rows = simulate(tmp_path, {"x": float}, tokens=[1], repeats=(3, 1, 2), spread=(0.1, 0.1, 0.1))
    both = Trials(pd.concat([rows, rows.assign(run_id="run-b")]))
    assert both.levels == (6, 1, 2)
    with pytest.raises(ValueError, match="the same point, launch, seed and chain"):
        Trials(pd.concat([rows, rows]))
    with pytest.raises(ValueError, match="a latency is missing"):
        Trials(rows.assign(latency_us=np.nan))


def test_a_draw_takes_whole_launches_then_seeds_then_chains(tmp_path: Path) -> None:
    own = trials(tmp_path, (4, 1, 1), spread=(0.2, 0, 0))
    (drawn,) = resampled_medians([own], resamples=4000)
    # every draw of 4 launches has one of the medians of 4 values with replacement, at all points from the same launches
    values = own.table[:, :, 0, 0]
    choices = np.array(np.meshgrid(*[range(4)] * 4)).reshape(4, -1)
    possible = np.median(values[:, choices], axis=1)
    for curve in drawn.T[:200]:
        assert np.isclose(possible, curve[:, None], rtol=1e-12).all(axis=0).any()
    # and with the right frequencies: the mean over draws is that over all 4^4 of them
    assert drawn.mean(axis=1) == pytest.approx(possible.mean(axis=1), rel=0.01)
    assert drawn.std(axis=1) == pytest.approx(possible.std(axis=1), rel=0.05)


def test_ragged_levels_give_as_many_children_as_they_have(tmp_path: Path) -> None:
    def gone(rows):
        return ((rows.launch == 1) & (rows.seed == 0)) | ((rows.launch == 2) & (rows.chain > 0))

    own = trials(tmp_path, (3, 2, 3), drop=gone)
    (drawn,) = resampled_medians([own], resamples=500)
    assert not np.isnan(drawn).any()
    low, high = np.nanmin(own.table, axis=(1, 2, 3)), np.nanmax(own.table, axis=(1, 2, 3))
    assert (drawn >= low[:, None]).all()
    assert (drawn <= high[:, None]).all()
    assert support([own]).trials == 3 * (6 + 3 + 2) // 3


def test_a_point_that_one_launch_lacks_is_missing_where_only_that_is_drawn(tmp_path: Path) -> None:
    own = trials(tmp_path, (2, 1, 1), drop=lambda rows: (rows.launch == 0) & (rows.tokens_per_rank == 8))
    (drawn,) = resampled_medians([own], resamples=2000)
    assert np.isnan(drawn[1]).mean() == pytest.approx(1 / 4, abs=0.04)  # both draws are launch 0
    assert not np.isnan(drawn[[0, 2]]).any()


def test_the_same_arguments_give_the_same_draws_whatever_came_before(tmp_path: Path) -> None:
    own, other = trials(tmp_path / "a", (3, 2, 2)), trials(tmp_path / "b", (4, 1, 2), rng_seed=5)
    first = resampled_medians([own], resamples=100)[0]
    resampled_medians([other], resamples=100)
    assert np.array_equal(first, resampled_medians([own], resamples=100)[0])
    assert not np.array_equal(first, resampled_medians([own], resamples=100, rng_seed=1)[0])


def test_series_of_the_same_launches_share_their_draws(tmp_path: Path) -> None:
    own = trials(tmp_path / "a", (6, 2, 1), spread=(0.3, 0.3, 0))
    a, b = resampled_medians([own, own], resamples=300)
    assert np.array_equal(a, b)
    elsewhere = trials(tmp_path / "b", (6, 2, 1), spread=(0.3, 0.3, 0), run_id="run-b")
    a, b = resampled_medians([own, elsewhere], resamples=300)
    assert (a != b).mean() > 0.5
    assert abs(np.corrcoef(a[0], b[0])[0, 1]) < 0.2


def test_without_widening_it_is_the_interval_of_the_tables(tmp_path: Path) -> None:
    rows = simulate(tmp_path, {"x": float}, tokens=[32], repeats=(6, 2, 3), spread=(0.1, 0.03, 0.03))
    (drawn,) = resampled_medians([Trials(rows)], resamples=20_000)
    keys = zip(rows["launch"], rows["seed"], rows["chain"], strict=True)
    expected = interval(dict(zip(keys, rows["latency_us"], strict=True)), resamples=20_000)
    assert ends(drawn[0], IntervalKind.BOOTSTRAP) == pytest.approx((expected.low_us, expected.high_us), rel=0.01)
    assert Trials(rows).medians_us()[0] == expected.median_us


@pytest.mark.parametrize("launches", [3, 5, 20, 1000])
def test_widening_is_students_quantile_and_the_missing_degree_of_freedom(launches: int) -> None:
    expected = stats.t.ppf(0.975, launches - 1) / stats.norm.ppf(0.975) * np.sqrt(launches / (launches - 1))
    assert widening(launches) == pytest.approx(expected)


def test_two_launches_have_ends_one_standard_error_away_and_one_has_none() -> None:
    assert widening(2) == pytest.approx(stats.t.ppf(0.975, 1))
    assert widening(1) == 1


def test_widened_draws_stay_positive_and_keep_the_centre() -> None:
    centre = np.array([10.0, 100.0])
    draws = np.array([[5.0, 10.0, 20.0], [100.0, 50.0, np.nan]])
    by = widening(3)
    wide = widened(centre, draws, 3)
    assert wide[0].tolist() == pytest.approx([10 * 0.5**by, 10, 10 * 2**by])
    assert wide[1, :2].tolist() == pytest.approx([100, 100 * 0.5**by])
    assert np.isnan(wide[1, 2])


def test_ends_of_draws() -> None:
    draws = np.arange(1.0, 1001.0)
    assert ends(draws, IntervalKind.BOOTSTRAP) == pytest.approx((25, 975), abs=1)
    assert ends(draws, IntervalKind.RANGE) == (1.0, 1000.0)
    assert ends(np.array([1.0, np.nan, np.inf]), IntervalKind.BOOTSTRAP) == (1.0, np.inf)
    assert np.isnan(ends(np.array([np.nan]), IntervalKind.RANGE)).all()


def test_nan_median_of_nothing_is_nan() -> None:
    values = np.array([[1.0, 5.0, np.nan], [np.nan] * 3, [4.0, 1.0, 3.0]])
    assert nan_median(values)[[0, 2]].tolist() == [3.0, 3.0]
    assert np.isnan(nan_median(values)[1])


def test_support_says_what_may_not_be_called(tmp_path: Path) -> None:
    one = support([trials(tmp_path / "1", (1, 3, 10))])
    assert one.within_launch
    assert one.objection == "one launch says nothing about the variance between launches"
    two = support([trials(tmp_path / "two", (2, 1, 4))])
    assert two.objection == "2 launches are fewer than 3: they agree by chance too often"
    few = support([trials(tmp_path / "2", (3, 1, 2))])
    assert (few.kind, few.objection) == (IntervalKind.RANGE, "6 trials are fewer than 8")
    assert few.columns() == {
        "launches": 3, "seeds": 1, "chains": 2, "trials": 6, "within_launch": True, "interval": "range",
    }  # fmt: skip
    enough = support([trials(tmp_path / "3", (5, 1, 2)), trials(tmp_path / "4", (6, 2, 3))])
    assert (enough.launches, enough.seeds, enough.chains, enough.trials) == (5, 1, 2, 10)
    assert not enough.within_launch
    assert enough.objection == ""
