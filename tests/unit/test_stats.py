import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.harness.measuring.stats import (
    Estimate,
    IntervalKind,
    NoTiming,
    estimate,
    interquartile_range,
    interval,
    max_over_ranks,
    median,
    minimum_samples,
    percentile,
    tail,
)
from epcross.harness.terms import Regime

times = st.floats(min_value=0.01, max_value=1e6)


def test_the_slowest_rank_of_each_iteration_counts():
    # the maximum of the ranks' medians, rank 0 and the least loaded rank would all say 10
    values = [[10.0, 30.0, 10.0], [30.0, 10.0, 10.0]]
    assert max_over_ranks(values).tolist() == [30.0, 30.0, 10.0]
    assert estimate(Regime.ENTRY, values) == Estimate(
        latency_us=30.0,
        latency_min_us=10.0,
        latency_max_us=30.0,
        estimator="median over iterations of the maximum over ranks",
        n_samples=3,
    )


def test_steady_is_the_median_of_the_ranks_periods():
    assert estimate(Regime.STEADY, [[10.0], [12.0], [30.0]]) == Estimate(
        latency_us=12.0,
        latency_min_us=10.0,
        latency_max_us=30.0,
        estimator="median over ranks of the chain period",
        n_samples=1,
    )
    divided = estimate(Regime.STEADY, [[10.0, 20.0], [1.0, 3.0]])  # periods 15 and 2
    assert isinstance(divided, Estimate)
    assert divided.latency_us == 8.5


@given(st.integers(1, 4), st.lists(times, min_size=1, max_size=20), st.sampled_from([Regime.STEADY, Regime.ENTRY]))
def test_an_estimate_lies_within_its_samples_and_ignores_the_order_of_ranks(
    ranks: int, values: list[float], regime: Regime
):
    samples = [[value * (rank + 1) for value in values] for rank in range(ranks)]
    result = estimate(regime, samples)
    assert isinstance(result, Estimate)
    assert 0 < result.latency_min_us <= result.latency_us <= result.latency_max_us
    assert result == estimate(regime, samples[::-1])
    assert result.n_samples == len(values)


@pytest.mark.parametrize("regime", [Regime.STEADY, Regime.ENTRY])
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "no rank has samples"),
        ([[1.0], []], "rank 1 has no samples"),
        ([[1.0, 2.0], [1.0]], "different numbers of samples: [2, 1]"),
        ([[1.0, 2.0], [1.0, 0.0]], "sample 1 of rank 1 is 0 us, which is no time"),
        ([[-3.0, 2.0], [1.0, 0.0]], "sample 0 of rank 0 is -3 us, which is no time (and 1 more)"),
        ([[math.nan]], "is nan us"),
        ([[math.inf]], "is inf us"),
        ([[None]], "is nan us"),
    ],
)
def test_what_is_no_time_gives_no_latency(regime: Regime, values: list[list[float]], reason: str):
    result = estimate(regime, values)
    assert isinstance(result, NoTiming)
    assert reason in result.reason


def test_one_slow_sample_is_not_left_out():
    result = estimate(Regime.ENTRY, [[1.0] * 9 + [1000.0]])
    assert isinstance(result, Estimate)
    assert result.latency_max_us == 1000.0
    assert result.n_samples == 10


def test_percentiles_need_samples():
    assert [minimum_samples(p) for p in (50, 90, 95, 99, 99.9, 25, 1)] == [1, 10, 20, 100, 1000, 4, 100]
    assert percentile(range(1, 100), 99) is None
    assert percentile(range(1, 101), 99) == pytest.approx(99.01)  # 1 + 0.99 * 99
    assert percentile([3.0], 50) == 3.0
    assert tail(range(15)) == ("max", 14.0)
    assert tail(np.arange(101)) == ("p99", 99.0)
    for percent in (0, 100, -1):
        with pytest.raises(ValueError, match="between 0 and 100"):
            minimum_samples(percent)


def test_median_and_quartiles():
    assert median([4, 1, 3, 2]) == 2.5
    assert interquartile_range([1, 2, 3, 4, 5]) == 2.0


def repeats(launches: int, seeds: int, chains: int, value) -> dict[tuple[int, int, int], float]:
    return {(i, j, k): value(i, j, k) for i in range(launches) for j in range(seeds) for k in range(chains)}


def test_few_trials_give_their_range():
    result = interval(repeats(7, 1, 1, lambda i, j, k: 10.0 + i))
    assert (result.kind, result.low_us, result.median_us, result.high_us) == (IntervalKind.RANGE, 10.0, 13.0, 16.0)
    assert result.trials == 7
    assert not result.within_launch


def test_few_launches_are_named():
    assert interval(repeats(4, 3, 10, lambda i, j, k: 1.0)).within_launch
    full = interval(repeats(5, 3, 10, lambda i, j, k: 1.0))
    assert not full.within_launch
    assert (full.launches, full.seeds, full.chains, full.trials) == (5, 3, 10, 150)
    assert (full.low_us, full.median_us, full.high_us, full.kind) == (1.0, 1.0, 1.0, IntervalKind.BOOTSTRAP)


def test_variance_between_launches_widens_the_interval_as_much_as_it_should():
    # all variance lies between launches: 300 chains are still only 6 independent values
    rng = np.random.default_rng(1)
    level = rng.normal(100, 10, 6)
    noise = rng.normal(0, 0.01, (6, 5, 10))
    nested = interval(repeats(6, 5, 10, lambda i, j, k: level[i] + noise[i, j, k]))
    naive = interval(repeats(300, 1, 1, lambda i, j, k: level[i // 50] + noise.flat[i]))
    assert nested.median_us == naive.median_us
    assert nested.high_us - nested.low_us > 2 * (naive.high_us - naive.low_us)
    assert level.min() - 1 < nested.low_us < nested.high_us < level.max() + 1


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(100):
        data = rng.normal(50, 5, (12, 1, 1)) + rng.normal(0, 1, (12, 2, 1)) + rng.normal(0, 1, (12, 2, 3))
        result = interval(repeats(12, 2, 3, lambda i, j, k, d=data: d[i, j, k]), resamples=300, rng_seed=trial)
        hits += result.low_us <= 50 <= result.high_us
    assert 85 <= hits <= 100  # 95 expected


def test_the_same_seed_gives_the_same_interval_and_the_order_of_values_does_not_matter():
    noise = np.random.default_rng(0).random((5, 2, 3))
    values = repeats(5, 2, 3, lambda i, j, k: float(noise[i, j, k]))
    shuffled = dict(reversed(values.items()))
    assert interval(values, rng_seed=3) == interval(shuffled, rng_seed=3)
    assert interval(values, rng_seed=3) != interval(values, rng_seed=4)


def test_missing_repeats_are_neither_invented_nor_dropped():
    values = repeats(6, 3, 4, lambda i, j, k: 10.0 + i)
    for key in [(0, 0, 0), (0, 0, 1), (1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 2, 3)]:
        del values[key]
    result = interval(values)
    assert result.trials == 66
    assert (result.launches, result.seeds, result.chains) == (6, 3, 4)
    assert 10.0 <= result.low_us <= result.median_us <= result.high_us <= 15.0
    lone = {(0, 0, 0): 1.0, **{(i, 0, k): 2.0 for i in range(1, 5) for k in range(8)}}
    assert interval(lone).high_us == 2.0  # never a number that no repeat holds


@pytest.mark.parametrize("values", [{}, {(0, 0, 0): math.nan}, {(0, 0, 0): math.inf}])
def test_an_interval_of_nothing_is_refused(values: dict[tuple[int, int, int], float]):
    with pytest.raises(ValueError, match="at least one value and finite"):
        interval(values)
