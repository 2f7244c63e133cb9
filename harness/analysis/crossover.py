"""At how many tokens per rank one backend overtakes another: an interval with a state, or an honest "cannot tell".

Everything follows from the ratio `b / a` of medians along the token counts that both have. A point counts as equal
within the margin, and as a lead of `a` or `b` outside it. Each draw of the bootstrap (`resample`; widened for few
launches) gives a whole curve of ratios, and a state is called only if `AGREEMENT` of the curves share it.
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from epcross.harness.analysis.frame import CONDITIONS, FORMATS, INPUTS, headline, require_columns
from epcross.harness.analysis.resample import (
    CONFIDENCE,
    RESAMPLES,
    RNG_SEED,
    Float64,
    Int64,
    Trials,
    ends,
    resampled_medians,
    support,
    widened,
)
from epcross.harness.analysis.sides import Sides, Subject, formats_of, inputs_of, matched, name_of, require_two
from epcross.harness.errors import InputError
from epcross.harness.measuring.stats import IntervalKind
from epcross.harness.terms import Flag

MARGIN = 0.03
"""Two latencies count as equal if the larger is at most this share above the smaller."""

AGREEMENT = (1 + CONFIDENCE) / 2
"""Share of curves that must agree: a wrong call has two sides, and 2.5 % are left for each."""


class State(StrEnum):
    """What can be said of a pair."""

    CROSSED = "crossed"  # one leads below, the other above
    MULTIPLE = "multiple"  # the lead changes more than once
    NONE_IN_RANGE = "none in range"  # one leads wherever they differ, or they are equal throughout
    AMBIGUOUS = "ambiguous"  # the launches at hand do not tell


def find(
    frame: pd.DataFrame,
    a: Subject,
    b: Subject,
    *,
    by: Sequence[str] | None = None,
    margin: float = MARGIN,
    resamples: int = RESAMPLES,
    rng_seed: int = RNG_SEED,
    keep: Iterable[Flag | str] = (),
    mixed: bool = False,
    mixed_formats: bool = False,
    mixed_inputs: bool = False,
) -> pd.DataFrame:
    """One line for each group of `frame` that holds both `a` and `b` at a common token count.

    Columns: those of `by`; `a`, `b`; `state`, a `State`; `reason`, a sentence where ambiguous; `bracket_low`,
    `bracket_high`, the measured token counts around the change of lead (outermost ones if there are several);
    `estimate`, the tokens where the ratio crosses 1, log-log between the points (geometric mean of first and last,
    if the ratio wavers), NaN if nowhere; `low`, `high`, its 95 % interval, 0 or infinite where it leaves the range;
    `faster_below`, `faster_above`, a name or `equal`, empty where it cannot be told; `leads_from`, `leads_to`,
    where none crossed: the outermost token counts at which that one leads, beyond which the two count as equal;
    `a_leads`, `b_leads`, the token counts at which each surely leads, also where the state is ambiguous, as in
    "1..8 64" (see `spans`), empty where the launches are too few to call anything; `medians_lead`, who leads by the
    medians alone, `a` or `b`, in the order of the tokens, as in "a b", whatever is sure of it;
    `agreement`, the share of curves with this state; `margin`; `tokens_low`, `tokens_high`, `points`, the common
    range; `launches`, `seeds`, `chains`, `trials`, `within_launch`, `interval`; `cross_allocation`, whether the two
    were measured in different allocations, and so at different times or places: no headline. `attrs["note"]` says
    what was left out.

    Args:
        a, b: e.g. "shm_fence", or {"backend": "shm_fence", "options": '{"x":1}'}.
        by: columns that make a group; None: every condition (`frame.CONDITIONS`).
        margin: relative difference up to which two latencies count as equal.
        keep: flags whose rows are not left out.
        mixed: allow several domains.
        mixed_formats: allow the two to differ in `frame.FORMATS`; the column `formats` then says how, and is empty
            where they do not.
        mixed_inputs: the same for `frame.INPUTS`: what was done before the window of one may lie inside the other's;
            the column `inputs` then says how.

    Raises:
        InputError: a column, flag or subject is unknown, the two are one, domains are mixed, or a group of `by` mixes
            what must not be (regimes, say): then every such column is named.
    """
    require_two(a, b)
    unlike = [*(FORMATS if mixed_formats else ()), *(INPUTS if mixed_inputs else ())]
    by = [name for name in (CONDITIONS if by is None else by) if name not in unlike]
    if not by:
        raise InputError("`by` names no column; leave it out to group by every condition, or name one, such as ep_size")
    require_columns(frame, by)
    if not 0 <= margin < math.inf:
        raise InputError(f"margin {margin} must be a share from 0 on, such as 0.03")
    rows, note, _ = headline(frame, keep)
    names = (name_of(a), name_of(b))
    lines = []
    for key, sides in matched(rows, frame, (a, b), by, mixed=mixed, unlike=unlike):
        if line := _line(sides, names, margin, resamples, rng_seed):
            told = {"formats": formats_of(sides)} if mixed_formats else {}
            told |= {"inputs": inputs_of(sides)} if mixed_inputs else {}
            lines.append(key | line | told)
    result = pd.DataFrame(lines, columns=None if lines else [*by, "a", "b", "state"])
    result.attrs["note"] = note
    return result


def _line(sides: Sides, names: tuple[str, str], margin: float, resamples: int, rng_seed: int) -> dict[str, Any] | None:
    tokens = np.intersect1d(*(own["tokens_per_rank"].to_numpy(np.int64) for own in sides))
    if tokens.size == 0:
        return None
    trials = [Trials(own[own["tokens_per_rank"].isin(tokens)]) for own in sides]
    base = support(trials)
    medians = [own.medians_us() for own in trials]
    drawn = resampled_medians(trials, resamples=resamples, rng_seed=rng_seed)
    ratio, ratios = medians[1] / medians[0], drawn[1] / drawn[0]
    ratios = ratios[:, ~np.isnan(ratios).any(axis=0)]
    if base.kind is IntervalKind.BOOTSTRAP:
        ratios = widened(ratio, ratios, base.launches)
    allocations = [frozenset(own["allocation_id"].unique()) for own in sides]
    return {
        "a": names[0],
        "b": names[1],
        **judge(tokens, ratio, ratios, names, margin, base.kind, base.objection),
        "margin": margin,
        "tokens_low": int(tokens[0]),
        "tokens_high": int(tokens[-1]),
        "points": len(tokens),
        **base.columns(),
        "cross_allocation": allocations[0] != allocations[1],
    }


def judge(
    tokens: Sequence[int] | np.ndarray,
    ratio: Float64,
    ratios: Float64,
    names: tuple[str, str],
    margin: float,
    kind: IntervalKind = IntervalKind.BOOTSTRAP,
    objection: str = "",
) -> dict[str, Any]:
    """State, bracket, estimate, interval and leads from `ratio` [points] and its draws [points, draws].

    `objection`: why nothing may be called; the estimate and its interval are given all the same.
    """
    tokens = np.asarray(tokens, np.float64)
    signs = lead(ratio, margin)
    first_lead, last_lead, changed, at_low, at_high = _changes(signs[:, None])
    first, last, changes = float(first_lead[0]), float(last_lead[0]), int(changed[0])
    drawn_first, drawn_last, drawn_changes, *drawn_brackets = _changes(lead(ratios, margin))
    estimate, low, high, bracket = math.nan, math.nan, math.nan, (math.nan, math.nan)
    if changes:
        log_tokens = np.log(tokens)
        estimate = float(np.exp(_crossings(log_tokens, np.log(ratio)[:, None], at_low, at_high, before=first)[0]))
        low, high = ends(np.exp(_crossings(log_tokens, np.log(ratios), *drawn_brackets, before=first)), kind)
        bracket = float(tokens[at_low[0]]), float(tokens[at_high[0]])

    opposite = (drawn_first * drawn_last == -1) & (drawn_first == first)
    if changes >= 2 and (share := float((drawn_changes >= 2).mean())) >= AGREEMENT:
        state = State.MULTIPLE
    elif changes and first == -last:
        state, share = State.CROSSED, float(opposite.mean())
    elif changes:
        state, share = State.MULTIPLE, float((drawn_changes >= 2).mean())
    else:
        state, share = State.NONE_IN_RANGE, float(((drawn_first == first) & (drawn_changes == 0)).mean())
    reason = objection
    if not reason and share < AGREEMENT:
        reason = f"only {share:.1%} of the resampled curves are '{state}'"
    leads = _leads(first, last, names)
    drawn_leads = lead(ratios, margin)
    surely = [
        np.zeros(len(tokens), bool)
        if objection
        else (signs == sign) & ((drawn_leads == sign).mean(axis=1) >= AGREEMENT)
        for sign in (1.0, -1.0)
    ]
    leads_from, leads_to = math.nan, math.nan
    if not reason and state is State.NONE_IN_RANGE:
        sure = tokens[surely[0] | surely[1]]  # of one, as nothing changed
        if first and sure.size:
            leads_from, leads_to = float(sure[0]), float(sure[-1])
        leads = tuple(
            name if led == end else "equal"
            for name, led, end in zip(leads, (leads_from, leads_to), (tokens[0], tokens[-1]), strict=True)
        )
    if reason:
        state, leads = State.AMBIGUOUS, ("", "")
    return {
        "state": str(state),
        "reason": reason,
        "bracket_low": bracket[0],
        "bracket_high": bracket[1],
        "estimate": estimate,
        "low": low,
        "high": high,
        "faster_below": leads[0],
        "faster_above": leads[1],
        "leads_from": leads_from,
        "leads_to": leads_to,
        "a_leads": spans(tokens, surely[0]),
        "b_leads": spans(tokens, surely[1]),
        "medians_lead": " ".join(side for side, _ in groupby("a" if sign > 0 else "b" for sign in signs if sign)),
        "agreement": share,
    }


def spans(tokens: Sequence[float] | np.ndarray, there: Sequence[bool] | np.ndarray) -> str:
    """The token counts `there`, neighbours among `tokens` joined: "1..8 64"."""
    parts: list[list[int]] = []
    before = False
    for count, here in zip(tokens, there, strict=True):
        if here and before:
            parts[-1][1:] = [int(count)]
        elif here:
            parts.append([int(count)])
        before = bool(here)
    return " ".join("..".join(map(str, part)) for part in parts)


def ends_of(text: str) -> list[tuple[int, int]]:
    """The first and last token count of each part that `spans` wrote."""
    return [(int(part.split("..")[0]), int(part.split("..")[-1])) for part in text.split()]


def lead(ratio: Float64, margin: float) -> Float64:
    """1 where a is faster (b / a above 1 + margin), -1 where b is, 0 where they count as equal."""
    return np.where(ratio > 1 + margin, 1.0, np.where(ratio < 1 / (1 + margin), -1.0, 0.0))


def _changes(signs: Float64) -> tuple[Float64, Float64, Float64, Int64, Int64]:
    """Of each curve in `signs` [points, curves]: first and last lead, changes of lead, and the bracket of the changes:
    the last point that leads before the first change and the first one after the last. Equal points are passed over.
    Without a change the bracket is the whole range.
    """
    points, curves = signs.shape
    first, last, changes = np.zeros(curves), np.zeros(curves), np.zeros(curves)
    led_at = np.zeros(curves, np.int64)
    low, high = np.zeros(curves, np.int64), np.full(curves, points - 1, np.int64)
    for index, sign in enumerate(signs):
        leads = sign != 0
        changed = leads & (last != 0) & (sign != last)
        low = np.where(changed & (changes == 0), led_at, low)
        high = np.where(changed, index, high)
        changes += changed
        last, led_at = np.where(leads, sign, last), np.where(leads, index, led_at)
        first = np.where(first == 0, last, first)
    return first, last, changes, low, high


def _crossings(log_tokens: Float64, log_ratios: Float64, low: Int64, high: Int64, *, before: float) -> Float64:
    """Where each curve of `log_ratios` [points, curves] is 0 between its points `low` and `high`, as log tokens.

    Midway between the first and the last zero there. A curve without a zero crosses outside: beyond the range if it
    still has the sign `before`, below it if not.
    """
    left, right = log_ratios[:-1], log_ratios[1:]
    segment = np.arange(len(left))[:, None]
    crosses = (np.signbit(left) != np.signbit(right)) & (segment >= low) & (segment < high)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = log_tokens[:-1, None] + left / (left - right) * np.diff(log_tokens)[:, None]
    first = np.where(crosses, place, np.inf).min(axis=0, initial=np.inf)
    last = np.where(crosses, place, -np.inf).max(axis=0, initial=-np.inf)
    outside = np.where(np.sign(log_ratios[0]) == before, np.inf, -np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(first), outside, (first + last) / 2)


def _leads(first: float, last: float, names: tuple[str, str]) -> tuple[str, str]:
    """Who is faster at the low and at the high end."""
    words = {1.0: names[0], -1.0: names[1], 0.0: "equal"}
    return words[first], words[last]
