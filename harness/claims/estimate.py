"""The quantity of a claim, with its interval, from measured rows of one reading of it.

Every number rests on medians over repeats and on the hierarchical bootstrap of `analysis.resample`: a draw gives a
whole curve for every backend, launches are shared where backends shared them, and intervals are widened for few.
Too few launches or repeats to call a difference are an objection, which ends in no verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import pandas as pd

from epcross.harness.analysis import crossover
from epcross.harness.analysis.resample import (
    Float64,
    Int64,
    Support,
    Trials,
    ends,
    resampled_medians,
    support,
    widened,
)
from epcross.harness.claims.claim import Batches, Claim, Quantity
from epcross.harness.measuring.stats import IntervalKind
from epcross.harness.planning.tokens import counted
from epcross.harness.terms import Phase

MIN_POINTS = 3
"""Batches below which a slope is no trend, and a lead no crossover."""


class NotEnough(Exception):
    """The rows do not hold what the quantity needs; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 95 % interval."""

    at: str  # which batch or value; empty if it is about all of them
    value: float
    low: float
    high: float
    objection: str = ""  # why nothing may be called on it
    contrary: str = ""  # why the claim fails whatever the number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A value at each batch and its draws."""

    tokens: Int64  # [points]
    value: Float64  # [points]
    draws: Float64  # [points, resamples]

    def at(self, tokens: Int64) -> "_Curve":
        place = np.searchsorted(self.tokens, tokens)
        return _Curve(tokens=tokens, value=self.value[place], draws=self.draws[place])


Series = Sequence[pd.DataFrame]
"""Rows of one phase, a frame for each backend; together they stand for the fastest of them at each batch."""


def of_one(claim: Claim, rows: Series, *, nominal_gbps: float) -> list[Estimate]:
    """Quantities of the subject alone: latency, spread, multiples of the wire time, share of nominal bandwidth.

    Raises:
        NotEnough: a batch has no remote bytes, so no wire time.
    """
    (curve,), base = _curves([rows])
    if claim.quantity is Quantity.SPREAD:
        return [_of_all(curve, lambda value: value.max(axis=0) / value.min(axis=0), base)]
    if claim.quantity is Quantity.LATENCY:
        return _at_each(_widened(curve, base), base)
    view = "wire_bytes" if claim.quantity is Quantity.WIRE_MULTIPLE else "rank_bytes"
    bytes_of_rank = _bytes_of_rank(rows, view, curve.tokens)
    if not (bytes_of_rank > 0).all():
        raise NotEnough(f"no bytes were counted at {counted(curve.tokens[~(bytes_of_rank > 0)][0])}")
    nominal_us = bytes_of_rank / nominal_gbps / 1e3
    if claim.quantity is Quantity.WIRE_MULTIPLE:
        scaled = _Curve(tokens=curve.tokens, value=curve.value / nominal_us, draws=curve.draws / nominal_us[:, None])
    else:
        scaled = _Curve(tokens=curve.tokens, value=nominal_us / curve.value, draws=nominal_us[:, None] / curve.draws)
    return _batches(claim, scaled, base)


def over_baseline(claim: Claim, subject: Series, baseline: Series) -> list[Estimate]:
    """Speedup, its trend, or the batch up to which the subject leads.

    Raises:
        NotEnough: no batch is common to both, or too few for a trend.
    """
    (own, other), base = _curves([subject, baseline])
    ratio = _ratio(other, own)
    if claim.quantity is Quantity.SPEEDUP_TREND:
        return [_slope(ratio, base)]
    if claim.quantity is Quantity.CROSSOVER:
        _require_points(ratio, "crossover")
        return [_crossing(_widened(ratio, base), base)]
    return _batches(claim, ratio, base)


def share(claim: Claim, rows: Series) -> list[Estimate]:
    """Communication over the layer at each batch, or its trend; of the backend whose layer is fastest there.

    Raises:
        NotEnough: a phase is missing, or there are too few batches for a trend.
    """
    pairs = [[own[own["phase"] == phase] for phase in (Phase.LAYER_COMM, Phase.LAYER)] for own in rows]
    pairs = [pair for pair in pairs if all(len(own) for own in pair)]
    if not pairs:
        raise NotEnough(f"the phases {Phase.LAYER_COMM} and {Phase.LAYER} are needed, measured together")
    curves, base = _curves([[own] for pair in pairs for own in pair])
    shares = [_ratio(curves[2 * number], curves[2 * number + 1]) for number in range(len(pairs))]
    layers = [curves[2 * number + 1].at(one.tokens) for number, one in enumerate(shares)]
    tokens = np.unique(np.concatenate([one.tokens for one in shares]))
    chosen = [
        min(
            (layer.value[at[0]], number, at[0])
            for number, layer in enumerate(layers)
            if (at := np.flatnonzero(layer.tokens == token)).size
        )
        for token in tokens
    ]
    curve = _Curve(
        tokens=tokens,
        value=np.array([shares[number].value[at] for _, number, at in chosen]),
        draws=np.stack([shares[number].draws[at] for _, number, at in chosen]),
    )
    if claim.quantity is Quantity.SHARE_TREND:
        return [_slope(curve, base)]
    return _batches(claim, curve, base)


def change(claim: Claim, base_rows: Series, to_rows: Series, label: str) -> list[Estimate]:
    """Latency (or logical bandwidth) at another value of a factor over that at its base, at each common batch.

    Raises:
        NotEnough: no batch is common to both.
    """
    (before, after), base = _curves([base_rows, to_rows])
    if claim.change is not None and claim.change.factor == "tokens_per_rank":  # one batch each, and not the same
        after = _Curve(tokens=before.tokens, value=after.value, draws=after.draws)
    ratio = _ratio(after, before)
    if claim.quantity is Quantity.BANDWIDTH_CHANGE:
        bytes_ratio = _bytes_of_rank(to_rows, "rank_bytes", ratio.tokens) / _bytes_of_rank(
            base_rows, "rank_bytes", ratio.tokens
        )
        ratio = _Curve(tokens=ratio.tokens, value=bytes_ratio / ratio.value, draws=bytes_ratio[:, None] / ratio.draws)
    return [
        Estimate(
            at=label if len(ratio.tokens) == 1 else f"{label}, {one.at}",
            value=one.value,
            low=one.low,
            high=one.high,
            objection=one.objection,
        )
        for one in _batches(claim, ratio, base)
    ]


def _curves(groups: Sequence[Series]) -> tuple[list[_Curve], Support]:
    """The fastest curve of each group, drawn together, and what all of them rest on."""
    trials = [[Trials(rows) for rows in group] for group in groups]
    flat = [own for group in trials for own in group]
    drawn = iter(resampled_medians(flat))
    curves = []
    for group in trials:
        tokens = np.unique(np.concatenate([own.points for own in group]))
        values, draws = [], []
        for own in group:
            sample = next(drawn)
            place = np.searchsorted(tokens, own.points)
            value, draw = np.full(len(tokens), np.nan), np.full((len(tokens), sample.shape[1]), np.nan)
            value[place], draw[place] = own.medians_us(), sample
            values.append(value)
            draws.append(draw)
        curves.append(_Curve(tokens=tokens, value=np.fmin.reduce(values), draws=np.fmin.reduce(draws)))
    return curves, support(flat)


def _ratio(over: _Curve, under: _Curve) -> _Curve:
    tokens = np.intersect1d(over.tokens, under.tokens)
    if tokens.size == 0:
        raise NotEnough("no number of tokens per rank was measured on both sides")
    over, under = over.at(tokens), under.at(tokens)
    return _Curve(tokens=tokens, value=over.value / under.value, draws=over.draws / under.draws)


def _whole(draws: Float64) -> Float64:
    """Without draws that left a batch without any trial."""
    return draws[:, ~np.isnan(draws).any(axis=0)]


def _widened(curve: _Curve, base: Support) -> _Curve:
    draws = _whole(curve.draws)
    if base.kind is IntervalKind.BOOTSTRAP:
        draws = widened(curve.value, draws, base.launches)
    return _Curve(tokens=curve.tokens, value=curve.value, draws=draws)


def _batches(claim: Claim, curve: _Curve, base: Support) -> list[Estimate]:
    if claim.batches is Batches.LARGEST and len(curve.tokens) > 1:
        return [_of_all(curve, lambda value: value.max(axis=0), base)]
    return _at_each(_widened(curve, base), base)


def _at_each(curve: _Curve, base: Support) -> list[Estimate]:
    return [
        _estimate(counted(tokens), value, draws, base)
        for tokens, value, draws in zip(curve.tokens, curve.value, curve.draws, strict=True)
    ]


def _of_all(curve: _Curve, statistic: Callable[[Float64], Float64], base: Support) -> Estimate:
    """A positive number about all batches. It is widened itself: extremes of widened curves would drift outwards."""
    value = statistic(curve.value[:, None])
    draws = statistic(_whole(curve.draws))[None, :]
    if base.kind is IntervalKind.BOOTSTRAP:
        draws = widened(value, draws, base.launches)
    return _estimate("", float(value[0]), draws[0], base)


def _require_points(curve: _Curve, what: str) -> None:
    if (points := len(curve.tokens)) < MIN_POINTS:
        raise NotEnough(f"a {what} needs {MIN_POINTS} token counts, measured on both sides; there are {points}")


def _slope(curve: _Curve, base: Support) -> Estimate:
    """Least-squares slope of the logarithm over the logarithm of the tokens: 1 doubles with every doubling."""
    _require_points(curve, "trend")
    wide = _widened(curve, base)
    x = np.log(curve.tokens.astype(np.float64))
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return _estimate("", float(weights @ np.log(wide.value)), weights @ np.log(wide.draws), base)


def _crossing(ratio: _Curve, base: Support) -> Estimate:
    """Up to how many tokens the subject leads: 0 if it never does, infinite beyond the range."""
    found = crossover.judge(
        ratio.tokens, ratio.value, ratio.draws, ("subject", "baseline"), crossover.MARGIN, base.kind, base.objection
    )
    state, below, above = found["state"], found["faster_below"], found["faster_above"]
    spread = f"between {found['bracket_low']:g} and {found['bracket_high']:g} tokens"
    if state == crossover.State.AMBIGUOUS:
        # the estimate is shown and nothing is called; NaN where the ratio crosses nowhere
        low, high = (0.0, inf) if np.isnan(found["low"]) else (found["low"], found["high"])
        objection = f"{found['reason']}; by the medians {_order(found['medians_lead'], spread)}"
        return Estimate(at="", value=found["estimate"], low=low, high=high, objection=objection)
    if state == crossover.State.MULTIPLE:
        return Estimate(
            at="", value=found["estimate"], low=0.0, high=inf, objection=_order(found["medians_lead"], spread)
        )
    if state == crossover.State.NONE_IN_RANGE:
        leaders = {below, above} - {"equal"}
        # a batch at which the two are equal is led by neither: up to there it could be either
        if leaders == {"subject"}:
            return Estimate(at="", value=inf, low=0.0 if np.isnan(found["leads_to"]) else found["leads_to"], high=inf)
        if leaders == {"baseline"}:
            high = inf if np.isnan(found["leads_from"]) else found["leads_from"]
            return Estimate(at="", value=0.0, low=0.0, high=high)
        return Estimate(
            at="", value=np.nan, low=0.0, high=inf, objection="the two are equal wherever they were measured"
        )
    if below == "baseline":
        contrary = f"the other way round: the baseline leads below, the subject above, {spread}"
        return Estimate(at="", value=found["estimate"], low=found["low"], high=found["high"], contrary=contrary)
    return Estimate(at="", value=found["estimate"], low=found["low"], high=found["high"])


def _order(sides: str, spread: str) -> str:
    """Who leads before the change of lead and who after it, and in which bracket it lies.

    Args:
        sides: as `crossover.judge` has them in `medians_lead`, of the subject and the baseline.
        spread: the bracket in words.
    """
    led = [{"a": "the subject", "b": "the baseline"}[side] for side in sides.split()]
    if not led:
        return f"the two are within {crossover.MARGIN:.0%} at every batch"
    if len(led) == 1:
        return f"{led[0]} leads wherever they are more than {crossover.MARGIN:.0%} apart"
    if len(led) == 2:
        return f"{led[0]} leads below, {led[1]} above, and the lead changes {spread}"
    ends = f"{led[0]} leads at both ends" if led[0] == led[-1] else f"{led[0]} leads below, {led[-1]} above"
    return f"the lead changes more than once, {spread}: {ends}"


def _estimate(at: str, value: float, draws: Float64, base: Support) -> Estimate:
    low, high = ends(draws, base.kind)
    objection = base.objection
    if np.isnan(low) or np.isnan(high):
        low, high, objection = -inf, inf, objection or "the repeats that are there allow no interval"
    return Estimate(at=at, value=float(value), low=low, high=high, objection=objection)


def _bytes_of_rank(rows: Series, view: str, tokens: Int64) -> Float64:
    """Median over the rows of a batch of the bytes of one rank, mean over ranks."""
    every = pd.concat(list(rows))
    found = (every[view] / every["ep_size"]).groupby(every["tokens_per_rank"]).median()
    return found.reindex(tokens).to_numpy(np.float64)
