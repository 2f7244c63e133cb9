"""The hierarchical bootstrap: how far launches, seeds and chains pin down what is computed from their medians.

Variance has levels, so resampling follows them: launches are drawn with replacement, then seeds within each launch
drawn, then chains within each seed drawn. Iterations of one chain are not independent and are never resampled.

One draw serves all points of a series: what a launch has in common at all token counts stays together, whether it is
much or nothing. Two backends measured in the same launches share the draw of launches and seeds too, since they shared
the machine's mood and the routing; otherwise they are drawn apart.

**Few launches.** A bootstrap over n launches sees (n - 1) / n of their variance, and takes it for known. Intervals are
therefore widened about the estimate by `widening(n)`, Student's quantile with n - 1 degrees of freedom over the normal
one, times sqrt(n / (n - 1)): 2.7 at 3 launches, 1.6 at 5, 1.1 at 20. Source: Hesterberg, What Teachers Should
Know About the Bootstrap (2015), on narrowness bias and t; draws are scaled here rather than read at a wider percentile,
because a handful of launches has no such percentile. Two launches have but three outcomes, whose ends lie one standard
error away: there it is Student's quantile itself, 12.7. One launch says nothing about launches: its interval is that of
its own seeds and chains, and no difference may be called on it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special

from epcross.harness.analysis.frame import LAUNCH
from epcross.harness.measuring.stats import MIN_LAUNCHES, MIN_TRIALS, IntervalKind

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

RESAMPLES = 2000
CONFIDENCE = 0.95
RNG_SEED = 0

CALLING_LAUNCHES = 3
"""Launches from which a difference may be called: two agree by chance too often (8 % of equal pairs, in simulation)."""


class Trials:
    """The latencies of one series: `table[point, launch, seed, chain]` in microseconds, NaN where there is none.

    `points` are the sorted values of tokens per rank, `launches` the sorted (run, launch) pairs, `seeds` the sorted
    seeds of any launch.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        """From ok rows of one series (or point). Chains of a seed are put together from the front.

        Raises:
            ValueError: two rows are the same trial, or a latency is missing.
        """
        latency_us = rows["latency_us"].to_numpy(np.float64)
        if not np.isfinite(latency_us).all():
            raise ValueError("trials need ok rows: a latency is missing")
        self.points, point = np.unique(rows["tokens_per_rank"].to_numpy(np.int64), return_inverse=True)
        labels = list(zip(*(rows[name].tolist() for name in LAUNCH), strict=True))
        self.launches: list[tuple[str, int]] = sorted(set(labels))
        number = {label: index for index, label in enumerate(self.launches)}
        launch = np.array([number[label] for label in labels], np.int64)
        self.seeds, seed = np.unique(rows["seed"].to_numpy(np.int64), return_inverse=True)
        chains, chain = np.unique(rows["chain"].to_numpy(np.int64), return_inverse=True)
        shape = (len(self.points), len(self.launches), len(self.seeds), len(chains))
        if len(np.unique(np.ravel_multi_index((point, launch, seed, chain), shape))) != len(rows):
            raise ValueError("trials must be of one series: two rows are the same point, launch, seed and chain")
        self.table: Float64 = np.full(shape, np.nan)
        self.table[point, launch, seed, chain] = latency_us

    @property
    def levels(self) -> tuple[int, int, int]:
        """Launches, most seeds of a launch, most chains of a seed: what a caption states."""
        chains = (~np.isnan(self.table)).any(axis=0).sum(axis=2)
        return len(self.launches), int((chains > 0).sum(axis=1).max()), int(chains.max())

    @property
    def fewest(self) -> int:
        """Trials of the point that has the fewest."""
        return int((~np.isnan(self.table)).sum(axis=(1, 2, 3)).min())

    def medians_us(self) -> Float64:
        """The median of each point's trials, [points]."""
        return nan_median(self.table.reshape(len(self.points), -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What an interval rests on, the fewest of all that enter it."""

    launches: int
    seeds: int
    chains: int
    trials: int  # of the point that has the fewest

    @property
    def within_launch(self) -> bool:
        """Whether the launches are too few to know their variance."""
        return self.launches < MIN_LAUNCHES

    @property
    def kind(self) -> IntervalKind:
        """`range` below `MIN_TRIALS` trials: resampling a few values only draws the smallest and largest."""
        return IntervalKind.BOOTSTRAP if self.trials >= MIN_TRIALS else IntervalKind.RANGE

    @property
    def objection(self) -> str:
        """Why no difference may be called on so little; empty if one may."""
        if self.launches < 2:
            return "one launch says nothing about the variance between launches"
        if self.launches < CALLING_LAUNCHES:
            return f"{self.launches} launches are fewer than {CALLING_LAUNCHES}: they agree by chance too often"
        if self.trials < MIN_TRIALS:
            return f"{self.trials} trials are fewer than {MIN_TRIALS}"
        return ""

    def columns(self) -> dict[str, object]:
        """As columns of a result."""
        names = ("launches", "seeds", "chains", "trials", "within_launch")
        return {**{name: getattr(self, name) for name in names}, "interval": str(self.kind)}


def support(trials: Sequence[Trials]) -> Support:
    """The fewest launches, seeds, chains and trials among these series."""
    launches, seeds, chains = (min(own.levels[level] for own in trials) for level in range(3))
    return Support(launches=launches, seeds=seeds, chains=chains, trials=min(own.fewest for own in trials))


def resampled_medians(
    trials: Sequence[Trials], *, resamples: int = RESAMPLES, rng_seed: int = RNG_SEED
) -> list[Float64]:
    """Medians of every point of each series under `resamples` draws, each [points, resamples].

    Series with the same launches share the draws of launches and seeds; others are drawn apart. A point that a draw
    leaves without any trial is NaN there. The same arguments give the same numbers, on every machine.
    """
    together = all(own.launches == trials[0].launches for own in trials[1:])
    drawn = []
    for number, own in enumerate(trials):
        there = ~np.isnan(own.table).all(axis=0)
        upper = 0 if together else number
        places = _draw(there.tobytes(), there.shape, resamples, rng_seed, upper, number)
        drawn.append(_medians_at(own.table.reshape(len(own.points), -1), places))
    return drawn


def widening(launches: int) -> float:
    """By how much the ends of a 95 % interval over so many launches are moved away from the estimate (see above)."""
    if launches < 2:
        return 1.0
    quantile = (1 + CONFIDENCE) / 2
    student = float(special.stdtrit(launches - 1, quantile))
    if launches == 2:
        return student
    return student / float(special.ndtri(quantile)) * math.sqrt(launches / (launches - 1))


def widened(estimates: Float64, resampled: Float64, launches: int) -> Float64:
    """`resampled` [points, resamples], moved away from `estimates` [points] by the factor `widening(launches)`.

    On a logarithmic scale, so latencies stay positive. Whatever is computed from these draws has the right spread.
    """
    centre = estimates[:, None]
    return centre * (resampled / centre) ** widening(launches)


def ends(values: Float64, kind: IntervalKind) -> tuple[float, float]:
    """The middle 95 % of draws, or their range; infinite draws are allowed, NaN are left out. NaN if none is left."""
    values = values[~np.isnan(values)]
    if values.size == 0:
        return math.nan, math.nan
    if kind is IntervalKind.RANGE:
        return float(values.min()), float(values.max())
    # order statistics: between a number and infinity there is nothing to interpolate
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    return float(low), float(high)


def nan_median(values: Float64) -> Float64:
    """Median along the last axis of what is not NaN; NaN where nothing is. Sorts: quick on many short rows."""
    ordered = np.sort(values, axis=-1)  # NaN comes last
    size = ordered.shape[-1]
    if not np.isnan(ordered[..., -1]).any():
        return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2
    count = (~np.isnan(ordered)).sum(axis=-1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, size - 1), axis=-1)
    return ((low + high) / 2)[..., 0]


@lru_cache(maxsize=64)
def _draw(there: bytes, shape: tuple[int, int, int], resamples: int, rng_seed: int, upper: int, lower: int) -> Int64:
    """Places in the flattened [launch, seed, chain] table, [resamples, places]; the place after the last is no trial.

    Levels may be ragged: a drawn parent gives as many children as it has.

    Args:
        there: which trials any point of the series has, as the bytes of a bool array of this `shape`.
        upper, lower: numbers of the random streams of launches and seeds, and of chains.
    """
    exists = np.frombuffer(there, np.bool_).reshape(shape)
    launches, seeds, chains = shape
    chain_order = np.argsort(~exists, axis=2, kind="stable")  # those that are there first
    num_chains = exists.sum(axis=2)
    seed_order = np.argsort(num_chains == 0, axis=1, kind="stable")
    num_seeds = (num_chains > 0).sum(axis=1)

    outer = np.random.Generator(np.random.Philox(key=np.array([rng_seed, 2 * upper], np.uint64)))
    inner = np.random.Generator(np.random.Philox(key=np.array([rng_seed, 2 * lower + 1], np.uint64)))
    launch = outer.integers(launches, size=(resamples, launches, 1, 1))
    nth_seed = (outer.random((resamples, launches, seeds, 1)) * num_seeds[launch]).astype(np.int64)
    seed = seed_order[launch, nth_seed]
    nth_chain = (inner.random((resamples, launches, seeds, chains)) * num_chains[launch, seed]).astype(np.int64)
    chain = chain_order[launch, seed, nth_chain]
    place = (launch * seeds + seed) * chains + chain
    surplus = (np.arange(seeds)[:, None] >= num_seeds[launch]) | (np.arange(chains) >= num_chains[launch, seed])
    place[surplus] = exists.size
    flat = place.reshape(resamples, -1)
    return flat[:, (flat != exists.size).any(axis=0)]


def _medians_at(table: Float64, places: Int64) -> Float64:
    """Medians [points, resamples] of `table[points, trials]` at `places[resamples, drawn]`."""
    padded = np.concatenate([table, np.full((len(table), 1), np.nan)], axis=1)
    return np.stack([nan_median(line[places]) for line in padded])
