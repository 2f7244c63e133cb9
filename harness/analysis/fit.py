"""A fixed cost and a bandwidth for each series, with intervals, and the regime each of its points is in.

The model is a sum: `latency = fixed + bytes / bandwidth` (Hockney, The communication challenge for MPP, 1994; also
called alpha-beta or postal model). A maximum of the two would be right if flags and rows travelled side by side; in an
exchange a row is followed by the flag that announces it, and what is done once per call comes before both, so the costs
add up. The sum is also smooth: near the knee, where decode works, every point has a say in both parameters.

Fitted are the medians of the points, by relative error, so that 5 us and 5 ms count alike. The loss is Huber's at
`HUBER_SCALE`: where the model is off by more (a cache that is too small, a switch of algorithm), a point pulls with a
bounded force. Neither parameter is negative. Intervals: see `resample`.
"""

import math
from collections.abc import Iterable
from enum import StrEnum

import numpy as np
import pandas as pd

from epcross.harness.analysis.frame import SERIES, gbps, headline
from epcross.harness.analysis.resample import (
    RESAMPLES,
    RNG_SEED,
    Float64,
    Trials,
    ends,
    resampled_medians,
    support,
    widened,
)
from epcross.harness.measuring.stats import IntervalKind
from epcross.harness.terms import Flag

VIEW = "rank_bytes"
"""The bytes of the model unless told otherwise: the rows that land, which local routing moves too."""

HUBER_SCALE = 0.1
"""Relative error up to which a point counts by its square."""

MIN_POINTS = 3
"""Token counts that a fit needs: two of them any line hits."""

DOMINANT = 0.8
"""Share of the modelled latency from which one part gives the regime its name: it is four times the other."""

_ITERATIONS = 50


class CostRegime(StrEnum):
    """What a point pays for: `fixed` from a share of `DOMINANT` on, `bandwidth` likewise, `between` otherwise."""

    FIXED = "fixed"
    BETWEEN = "between"
    BANDWIDTH = "bandwidth"


def fit(
    frame: pd.DataFrame,
    *,
    view: str = VIEW,
    keep: Iterable[Flag | str] = (),
    resamples: int = RESAMPLES,
    rng_seed: int = RNG_SEED,
) -> pd.DataFrame:
    """One line for each series of `frame` (see `frame.load`; flagged rows are left out unless in `keep`).

    Columns: those of `SERIES`; `view`; `points` (token counts); `fixed_us`, `fixed_low_us`, `fixed_high_us`;
    `bandwidth_gbps`, `bandwidth_low_gbps`, `bandwidth_high_gbps` (infinite where bytes cost nothing that shows);
    `half_bytes`, where both parts cost the same; `residual_rms` and `residual_max`, relative; `launches`, `seeds`,
    `chains`, `trials`, `within_launch`, `interval`; `problem`, a sentence where nothing could be fitted and the
    numbers are NaN; `holds`, whether `residual_rms` is at most `HUBER_SCALE`: where not, the numbers describe the
    points that agree, and `points` tells which do not. `attrs["note"]` says what was left out.

    Raises:
        InputError: the view or a flag is unknown.
    """
    gbps(view)  # names an unknown view
    rows, note, _ = headline(frame, keep)
    lines = []
    for key, own in rows.groupby(list(SERIES), observed=True, sort=True):
        line = dict(zip(SERIES, key, strict=True)) | {"view": view}
        lines.append(line | _fit_series(own, view, resamples, rng_seed))
    result = pd.DataFrame(lines, columns=None if lines else [*SERIES, "view"])
    result.attrs["note"] = note
    return result


def points(frame: pd.DataFrame, fits: pd.DataFrame, *, keep: Iterable[Flag | str] = ()) -> pd.DataFrame:
    """One line for each point of the fitted series, from the `frame` that was fitted.

    Columns: those of `SERIES`; `tokens_per_rank`; `bytes` of the view; `latency_us`, the median; `model_us`;
    `residual`, (latency - model) / latency; `fixed_share` of the model; `regime`, a `CostRegime`. Points of series
    that have no fit keep their medians and have NaN and no regime.
    """
    rows, _, _ = headline(frame, keep)
    parts = []
    for view, own in fits.groupby("view", observed=True):
        keys = [*SERIES, "tokens_per_rank"]
        medians = rows.groupby(keys, observed=True, as_index=False)[["latency_us", view]].median()
        parts.append(medians.rename(columns={view: "bytes"}).merge(own[[*SERIES, "fixed_us", "bandwidth_gbps"]]))
    if not parts:
        return pd.DataFrame(columns=[*SERIES, "tokens_per_rank", "bytes", "latency_us", "model_us", "residual",
                                     "fixed_share", "regime"])  # fmt: skip
    result = pd.concat(parts, ignore_index=True)
    result["model_us"] = result["fixed_us"] + result["bytes"] / result["bandwidth_gbps"] / 1e3
    result["residual"] = 1 - result["model_us"] / result["latency_us"]
    result["fixed_share"] = result["fixed_us"] / result["model_us"]
    result["regime"] = [regime(share) for share in result["fixed_share"]]
    return result.drop(columns=["fixed_us", "bandwidth_gbps"])


def regime(fixed_share: float) -> CostRegime | None:
    """The regime at this share of the fixed cost; None without a fit."""
    if math.isnan(fixed_share):
        return None
    if fixed_share >= DOMINANT:
        return CostRegime.FIXED
    return CostRegime.BANDWIDTH if 1 - fixed_share >= DOMINANT else CostRegime.BETWEEN


def fit_lines(moved_bytes: Float64, latency_us: Float64) -> tuple[Float64, Float64]:
    """Fixed cost (us) and bandwidth (10^9 bytes/s) of each line of `latency_us` [lines, points] over the same bytes.

    Minimises the sum of Huber's loss of `1 - model / latency` over non-negative fixed cost and time per byte, by
    iteratively reweighted least squares; two unknowns, so each step has a closed form. NaN where a latency is NaN.
    """
    scale = float(moved_bytes.max()) or 1.0  # of the order of 1: the two columns would differ by 10^9
    constant, slope = 1 / latency_us, (moved_bytes / scale) / latency_us
    weight = np.ones_like(latency_us)
    fixed_us = per_scale = np.zeros(len(latency_us))
    for _ in range(_ITERATIONS):
        a, b, d = ((weight * x * y).sum(axis=1) for x, y in ((constant, constant), (constant, slope), (slope, slope)))
        u, v = (weight * constant).sum(axis=1), (weight * slope).sum(axis=1)
        determinant = a * d - b * b
        with np.errstate(divide="ignore", invalid="ignore"):
            fixed_us, per_scale = (u * d - v * b) / determinant, (a * v - b * u) / determinant
            # the optimum of a convex problem that leaves the quadrant lies on the side it left by
            fixed_us, per_scale = (
                np.where(per_scale < 0, u / a, np.where(fixed_us < 0, 0.0, fixed_us)),
                np.where(per_scale < 0, 0.0, np.where(fixed_us < 0, v / d, per_scale)),
            )
            error = np.abs(1 - fixed_us[:, None] * constant - per_scale[:, None] * slope)
            weight = np.minimum(1.0, HUBER_SCALE / error)
    with np.errstate(divide="ignore"):
        return np.asarray(fixed_us), np.asarray(scale / per_scale / 1e3)


def _fit_series(rows: pd.DataFrame, view: str, resamples: int, rng_seed: int) -> dict[str, object]:
    trials = Trials(rows)
    base = support([trials])
    moved_bytes = rows.groupby("tokens_per_rank")[view].median().to_numpy(np.float64)
    problem = ""
    if len(trials.points) < MIN_POINTS:
        problem = f"{len(trials.points)} token counts; a fit needs {MIN_POINTS}"
    elif np.isnan(moved_bytes).any():
        problem = f"{view} of some points is not known"
    elif len(np.unique(moved_bytes)) < 2:
        problem = f"{view} is the same at all points"
    fixed_us = bandwidth_gbps = rms = largest = math.nan
    fixed_ends = bandwidth_ends = (math.nan, math.nan)
    if not problem:
        medians_us = trials.medians_us()
        (drawn_us,) = resampled_medians([trials], resamples=resamples, rng_seed=rng_seed)
        if base.kind is IntervalKind.BOOTSTRAP:
            drawn_us = widened(medians_us, drawn_us, base.launches)
        fixed, bandwidth = fit_lines(moved_bytes, np.concatenate([medians_us[None], drawn_us.T]))
        fixed_us, bandwidth_gbps = float(fixed[0]), float(bandwidth[0])
        fixed_ends, bandwidth_ends = ends(fixed[1:], base.kind), ends(bandwidth[1:], base.kind)
        residual = 1 - (fixed_us + moved_bytes / bandwidth_gbps / 1e3) / medians_us
        rms, largest = float(np.sqrt((residual**2).mean())), float(np.abs(residual).max())
    return {
        "points": len(trials.points),
        "fixed_us": fixed_us,
        "fixed_low_us": fixed_ends[0],
        "fixed_high_us": fixed_ends[1],
        "bandwidth_gbps": bandwidth_gbps,
        "bandwidth_low_gbps": bandwidth_ends[0],
        "bandwidth_high_gbps": bandwidth_ends[1],
        "half_bytes": fixed_us * bandwidth_gbps * 1e3,
        "residual_rms": rms,
        "residual_max": largest,
        "holds": rms <= HUBER_SCALE,
        **base.columns(),
        "problem": problem,
    }
