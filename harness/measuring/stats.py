"""From samples to a number, and from numbers to an interval. No sample is ever left out.

Two steps, never mixed: `estimate` turns the samples of one repeat into its latency, and `interval` says how far the
latencies of many repeats pin a point down. Iterations of one series are not independent and are never resampled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epcross.harness.terms import Regime

Float64 = NDArray[np.float64]

RepeatKey = tuple[int, int, int]
"""(launch, seed, chain)"""

STEADY_ESTIMATOR = "median over ranks of the chain period"
ENTRY_ESTIMATOR = "median over iterations of the maximum over ranks"

MIN_TRIALS = 8
"""Below this many values an interval is their range: resampling three values only draws the smallest and largest."""

MIN_LAUNCHES = 5
"""Below this many launches an interval says nothing about the variance between launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The latency of one repeat. Minimum and maximum are over all samples of all ranks."""

    latency_us: float
    latency_min_us: float
    latency_max_us: float
    estimator: str
    n_samples: int  # per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTiming:
    """Samples that give no latency, and why: the row is `no_timing` with this reason."""

    reason: str


def estimate(regime: Regime, values_us: Sequence[Sequence[float]]) -> Estimate | NoTiming:
    """The latency of one repeat from `values_us[rank][iteration]`.

    Steady: each rank's chain period is the mean of its samples (one sample for an undivided chain; parts of equal
    length otherwise), and ranks phase-lock, so the median over ranks is taken. Entry and spans: an exchange is over
    when its last rank is, so the maximum over ranks comes first, iteration by iteration, and then the median.
    One sample that is no time (zero, negative, not finite, missing) spoils the repeat: the clock cannot be trusted.
    """
    problem = _sample_problem(values_us)
    if problem:
        return NoTiming(reason=problem)
    values = np.asarray(values_us, dtype=np.float64)
    steady = regime is Regime.STEADY
    latency_us = median(values.mean(axis=1)) if steady else median(max_over_ranks(values))
    low, high = float(values.min()), float(values.max())
    return Estimate(
        latency_us=min(max(latency_us, low), high),  # a mean of equal values may round past them
        latency_min_us=low,
        latency_max_us=high,
        estimator=STEADY_ESTIMATOR if steady else ENTRY_ESTIMATOR,
        n_samples=values.shape[1],
    )


def max_over_ranks(values_us: ArrayLike) -> Float64:
    """The time of each iteration, [iterations], from [ranks, iterations]: that of its slowest rank."""
    return np.asarray(values_us, dtype=np.float64).max(axis=0)


def median(values: ArrayLike) -> float:
    """The middle value, or the mean of the two middle ones."""
    return float(np.median(np.asarray(values, dtype=np.float64)))


def interquartile_range(values: ArrayLike) -> float:
    """75th minus 25th percentile, by the method of `percentile`; of fewer than 4 values it says little."""
    low, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 75])
    return float(high - low)


def minimum_samples(percent: float) -> int:
    """How many samples a percentile needs so that at least one lies beyond it: 100 for p99, 20 for p95, 1 for p50.

    Raises:
        ValueError: `percent` is not between 0 and 100.
    """
    if not 0 < percent < 100:
        raise ValueError(f"percentile {percent} is not between 0 and 100; use the minimum or the maximum instead")
    beyond = min(percent, 100 - percent)
    return 1 if percent == 50 else math.ceil(round(100 / beyond, 9))  # 100 / (100 - 99.9) is 1000 and a little more


def percentile(values: ArrayLike, percent: float) -> float | None:
    """A percentile, linear between the two nearest order statistics; None below `minimum_samples`.

    Source: Hyndman and Fan, Sample quantiles in statistical packages (1996), definition 7; numpy's default.
    """
    samples = np.asarray(values, dtype=np.float64)
    return float(np.percentile(samples, percent)) if samples.size >= minimum_samples(percent) else None


def tail(values: ArrayLike) -> tuple[str, float]:
    """The slow end and its name: ("p99", ...) where there are samples for it, else ("max", ...)."""
    p99 = percentile(values, 99)
    return ("max", float(np.max(np.asarray(values, dtype=np.float64)))) if p99 is None else ("p99", p99)


class IntervalKind(StrEnum):
    """What the ends of an interval are."""

    BOOTSTRAP = "bootstrap"  # percentiles of the resampled median
    RANGE = "range"  # smallest and largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The median of the repeats of a point and how far it is pinned down."""

    median_us: float
    low_us: float
    high_us: float
    kind: IntervalKind
    within_launch: bool  # too few launches: it misses the variance between them
    launches: int
    seeds: int  # most in a launch
    chains: int  # most in a seed
    trials: int


def interval(
    values_us: Mapping[RepeatKey, float], *, resamples: int = 2000, rng_seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Interval of the median of `values_us`, one latency for each (launch, seed, chain).

    Variance has levels, so resampling follows them: launches are drawn with replacement, then seeds within each
    launch drawn, then chains within each seed drawn. The same arguments give the same interval.

    Raises:
        ValueError: there are no values, or one is not finite.
    """
    if not values_us or not all(math.isfinite(value) for value in values_us.values()):
        raise ValueError(f"an interval needs at least one value and finite ones only, not {dict(values_us)}")
    nested: dict[int, dict[int, list[float]]] = {}
    for (launch, seed, _), value in sorted(values_us.items()):
        nested.setdefault(launch, {}).setdefault(seed, []).append(value)
    values = np.array(list(values_us.values()), dtype=np.float64)
    if values.size < MIN_TRIALS:
        kind, low, high = IntervalKind.RANGE, float(values.min()), float(values.max())
    else:
        medians = _resampled_medians(nested, resamples, np.random.default_rng(rng_seed))
        ends = np.percentile(medians, [50 * (1 - confidence), 50 * (1 + confidence)])
        kind, low, high = IntervalKind.BOOTSTRAP, float(ends[0]), float(ends[1])
    return Interval(
        median_us=median(values),
        low_us=low,
        high_us=high,
        kind=kind,
        within_launch=len(nested) < MIN_LAUNCHES,
        launches=len(nested),
        seeds=max(len(seeds) for seeds in nested.values()),
        chains=max(len(chains) for seeds in nested.values() for chains in seeds.values()),
        trials=values.size,
    )


def _resampled_medians(
    nested: Mapping[int, Mapping[int, Sequence[float]]], resamples: int, rng: np.random.Generator
) -> Float64:
    """Medians of `resamples` draws. Levels may be ragged: a drawn parent gives as many children as it has."""
    launches = [[np.asarray(chains, dtype=np.float64) for chains in seeds.values()] for seeds in nested.values()]
    num_launches = len(launches)
    max_seeds = max(len(seeds) for seeds in launches)
    max_chains = max(len(chains) for seeds in launches for chains in seeds)
    table = np.full((num_launches, max_seeds, max_chains), np.nan)
    num_chains = np.zeros((num_launches, max_seeds), dtype=np.int64)
    for i, seeds in enumerate(launches):
        for j, chains in enumerate(seeds):
            table[i, j, : len(chains)] = chains
            num_chains[i, j] = len(chains)
    num_seeds = (num_chains > 0).sum(axis=1)

    launch = rng.integers(num_launches, size=(resamples, num_launches, 1, 1))
    seed = rng.integers(num_seeds[launch], size=(resamples, num_launches, max_seeds, 1))
    chain = rng.integers(num_chains[launch, seed], size=(resamples, num_launches, max_seeds, max_chains))
    drawn = table[launch, seed, chain]
    surplus_seed = np.arange(max_seeds)[:, None] >= num_seeds[launch]
    surplus_chain = np.arange(max_chains) >= num_chains[launch, seed]
    drawn[surplus_seed | surplus_chain] = np.nan
    flat = drawn.reshape(resamples, -1)
    return np.nanmedian(flat, axis=1) if np.isnan(flat).any() else np.median(flat, axis=1)


def _sample_problem(values_us: Sequence[Sequence[float]]) -> str | None:
    """Why the samples give no latency, naming the first that does not; None if they do."""
    if len(values_us) == 0:
        return "no rank has samples"
    lengths = [len(rank) for rank in values_us]
    if min(lengths) == 0:
        return f"rank {lengths.index(0)} has no samples"
    if len(set(lengths)) > 1:
        return f"ranks have different numbers of samples: {lengths}"
    values = np.asarray(values_us, dtype=np.float64)
    bad = np.argwhere(~(np.isfinite(values) & (values > 0)))
    if len(bad) == 0:
        return None
    rank, iteration = bad[0]
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"sample {iteration} of rank {rank} is {values[rank, iteration]:g} us, which is no time{more}"
