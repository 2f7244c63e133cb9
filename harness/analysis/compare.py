"""Two runs, point by point: which became slower, which faster, and which cannot be compared, with the reason.

A verdict needs the same point and phase on both sides, under conditions that make latencies comparable. `slower` and
`faster` are called only if the medians differ by more than the margin and the 95 % interval of their ratio leaves 1
out, `equal` only if the whole interval lies within the margin; what is left is `unclear`, never a silent pass. With
fewer than `CALLING_LAUNCHES` launches or `MIN_TRIALS` trials on a side nothing is called (`resample` says why). Flagged
rows are left out, but for those flagged `within_launch` alone. Of many points that did not change, up to 5 % may be
called changed by chance, and launches of one run do not see what changes between runs (other load, another clock): take
both runs in the same hour.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from epcross.harness.analysis.crossover import MARGIN
from epcross.harness.analysis.factors import FACTORS, telling
from epcross.harness.analysis.frame import CONDITIONS, INPUTS, headline
from epcross.harness.analysis.resample import RESAMPLES, RNG_SEED, Trials, ends, resampled_medians, support, widened
from epcross.harness.errors import NOTHING_SHOWN, InputError
from epcross.harness.measuring.stats import IntervalKind
from epcross.harness.terms import CAPTIONED, HEADLINES, Flag, Status

SAME_POINT = ["point_id", "phase"]

ALIKE = ["backend", "phase", "regime", "model", "ep_size", "tokens_per_rank"]
"""Points that agree in these and differ in other factors are named as not comparable rather than as missing."""

MUST_AGREE = ("machine", "boundary", "weights_by", "tuned", "ids_hash", "transport")
"""Columns besides the point's factors in which the two sides must agree, or latencies do not compare."""

NOTED = ("measure_hash", "backend_version", "compute_version", "algorithm", "num_sms")
"""Columns whose difference may be the very thing that is looked at: noted, no obstacle."""

_FACTORS = (
    "options",
    "kind",
    "compute",
    "compute_options",
    *(name for name in CONDITIONS if name not in ("machine", "measure_hash", *INPUTS)),  # these follow from options
)


class Verdict(StrEnum):
    """What became of a point from A to B, worst first."""

    SLOWER = "slower"
    UNCLEAR = "unclear"
    NOT_COMPARABLE = "not comparable"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    EQUAL = "equal"
    FASTER = "faster"


DECIDED = (Verdict.SLOWER, Verdict.FASTER, Verdict.EQUAL, Verdict.UNCLEAR)
"""Verdicts of points that could be compared."""

COLUMNS = (
    *ALIKE, "factors", "point_id", "headline", "verdict", "reason", "note", "a_us", "b_us", "ratio", "low", "high",
    "margin", "launches", "seeds", "chains", "trials", "within_launch", "interval",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    margin: float
    resamples: int
    rng_seed: int


def compare(
    frame_a: pd.DataFrame,
    frame_b: pd.DataFrame,
    *,
    margin: float = MARGIN,
    keep: Iterable[Flag | str] = (),
    resamples: int = RESAMPLES,
    rng_seed: int = RNG_SEED,
) -> pd.DataFrame:
    """One line for each (point, phase) of either frame (see `frame.load`), worst first.

    Columns (`COLUMNS`): what the point is, with `factors`, in words, what else varies among the points; `headline`,
    whether its phase decides; `verdict`, a `Verdict`; `reason` why it could not be compared or nothing is called;
    `note`, what else differs; `a_us` and `b_us`, medians; `ratio`, B over A, with its 95 % interval `low` to `high`
    (widened for few launches; the range below `MIN_TRIALS` trials); what it rests on. `attrs["note"]` says which rows
    were left out, `attrs["flags"]` for which flags. Domains never meet: such points are not comparable.

    Raises:
        InputError: the margin is no share, or a flag is unknown.
    """
    if not 0 <= margin < math.inf:
        raise InputError(f"margin {margin} must be a share from 0 on, such as 0.03")
    settings = _Settings(margin=margin, resamples=resamples, rng_seed=rng_seed)
    lines: list[dict[str, Any]] = []
    usable, notes, everything, flags = [], [], [], set()
    for name, frame in (("A", frame_a), ("B", frame_b)):
        rows, note, left_out = headline(frame, keep)
        flags |= left_out.keys() & set(Flag)
        usable.append(_points(rows))
        everything.append(_points(frame))
        notes += [f"{name}: {note}"] * bool(note)
    for key in sorted(everything[0].keys() & everything[1].keys()):
        pair = [points[key] for points in everything]
        lines.append(_identity(pair[0]) | _same_point(pair, [points.get(key) for points in usable], settings))
    only_a, only_b = (
        [own[key] for key in sorted(own.keys() - other.keys())] for own, other in (everything, everything[::-1])
    )
    lines += _without_counterpart(only_a, only_b)
    result = pd.DataFrame(lines, columns=list(COLUMNS))
    points = described([frame_a, frame_b])
    words = dict(zip((point["point_id"] for point in points), telling(points), strict=True))
    result["factors"] = result["point_id"].map(words).astype(object)
    rank = pd.Series([list(Verdict).index(Verdict(verdict)) for verdict in result["verdict"]], dtype="int64")
    result = result.assign(order=rank).sort_values(
        ["order", "ratio", *ALIKE], ascending=[True, False, *[True] * len(ALIKE)], ignore_index=True, kind="stable"
    )
    whole = dict.fromkeys(("launches", "seeds", "chains", "trials"), "Int64")
    floats = dict.fromkeys(("a_us", "b_us", "ratio", "low", "high"), "float64")
    result = result.drop(columns="order").assign(margin=margin).astype(whole | floats)
    result["within_launch"] = result["within_launch"].astype("boolean")
    result.attrs["note"] = "; ".join(notes)
    result.attrs["flags"] = [str(flag) for flag in Flag if flag in flags]
    return result


def exit_code(compared: pd.DataFrame) -> int:
    """0: no headline point is slower. 1: one is, beyond the margin. 3: no headline point could be compared."""
    verdicts = set(compared.loc[compared["headline"].astype(bool), "verdict"])
    if Verdict.SLOWER in verdicts:
        return 1
    return 0 if verdicts & set(DECIDED) else NOTHING_SHOWN


def _points(rows: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    return dict(iter(rows.groupby(SAME_POINT, observed=True)))


def described(frames: Iterable[pd.DataFrame]) -> list[dict[str, Any]]:
    """Each point once, with its factors."""
    columns = ["point_id", "backend", "ep_size", "tokens_per_rank", *FACTORS]
    points = pd.concat([frame[[name for name in columns if name in frame]] for frame in frames])
    return points.drop_duplicates("point_id").to_dict("records")


def _identity(rows: pd.DataFrame) -> dict[str, Any]:
    first = rows.iloc[0]
    values = {name: first[name] for name in (*ALIKE, "point_id")}
    return values | {"headline": values["phase"] in HEADLINES, "reason": "", "note": ""}


def _same_point(pair: list[pd.DataFrame], usable: list[pd.DataFrame | None], settings: _Settings) -> dict[str, Any]:
    absent = [
        f"{name} has no row to rest on: {_why_none(everything)}"
        for name, everything, rows in zip("AB", pair, usable, strict=True)
        if rows is None
    ]
    found = [rows for rows in usable if rows is not None]
    if len(found) < 2:
        return {"verdict": str(Verdict.NOT_COMPARABLE), "reason": "; ".join(absent)}
    differing = _differences(found, MUST_AGREE)
    note = "; ".join(_differences(found, NOTED))
    if differing:
        return {"verdict": str(Verdict.NOT_COMPARABLE), "reason": "; ".join(differing), "note": note}
    twice = [
        f"{name} holds the point under several {column}: give one run"
        for name, rows in zip("AB", found, strict=True)
        for column in ("measure_hash", "backend_version")
        if rows[column].nunique() > 1
    ]
    if twice:
        return {"verdict": str(Verdict.NOT_COMPARABLE), "reason": "; ".join(twice), "note": note}
    return {"note": note, **_judge(found, settings)}


def _judge(pair: list[pd.DataFrame], settings: _Settings) -> dict[str, Any]:
    trials = [Trials(rows) for rows in pair]
    base = support(trials)
    medians_us = [own.medians_us() for own in trials]
    drawn_us = resampled_medians(trials, resamples=settings.resamples, rng_seed=settings.rng_seed)
    if base.kind is IntervalKind.RANGE:
        # of few values, all that can be said is how far apart they lie at most
        low = np.nanmin(trials[1].table) / np.nanmax(trials[0].table)
        high = np.nanmax(trials[1].table) / np.nanmin(trials[0].table)
    else:
        ratios = widened(medians_us[1] / medians_us[0], drawn_us[1] / drawn_us[0], base.launches)
        low, high = ends(ratios[0], base.kind)
    ratio = float(medians_us[1][0] / medians_us[0][0])
    verdict = Verdict.UNCLEAR if base.objection else call(ratio, float(low), float(high), settings.margin)
    reason = base.objection
    if verdict is Verdict.UNCLEAR and not reason:
        reason = f"the interval of the ratio holds both 1 and more than the margin; {base.launches} launches"
    return {
        "verdict": str(verdict),
        "reason": reason,
        "a_us": float(medians_us[0][0]),
        "b_us": float(medians_us[1][0]),
        "ratio": ratio,
        "low": float(low),
        "high": float(high),
        **base.columns(),
    }


def call(ratio: float, low: float, high: float, margin: float) -> Verdict:
    """The verdict on a ratio B / A and its interval."""
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return Verdict.EQUAL
    if ratio > 1 + margin and low > 1:
        return Verdict.SLOWER
    if ratio < 1 / (1 + margin) and high < 1:
        return Verdict.FASTER
    return Verdict.UNCLEAR


def _why_none(rows: pd.DataFrame) -> str:
    failed = rows[rows["status"] != Status.OK]
    counts = [f"{count} {status}" for status, count in failed["status"].value_counts().items() if count]
    flagged = rows[rows["status"] == Status.OK]
    flags = sorted({flag for own in flagged["flags"] for flag in own.split()} - CAPTIONED)
    counts += [f"{len(flagged)} flagged {' '.join(flags)}"] * bool(len(flagged))
    return ", ".join(counts)


def _differences(pair: list[pd.DataFrame], names: Iterable[str]) -> list[str]:
    """`machine: x / y` for each column in which the two differ."""
    names = list(names)
    sides = [{name: " or ".join(sorted({_short(value) for value in rows[name]})) for name in names} for rows in pair]
    return [f"{name}: {sides[0][name]} / {sides[1][name]}" for name in names if sides[0][name] != sides[1][name]]


def _short(value: object) -> str:
    """A long hash by its head."""
    return text[:12] if len(text := str(value)) > 32 and text.isalnum() else text


def _without_counterpart(left_a: list[pd.DataFrame], left_b: list[pd.DataFrame]) -> list[dict[str, Any]]:
    """Lines of points that one side lacks. If the other has one that is alike, the differing factors are named."""
    alike: dict[tuple[Any, ...], tuple[list[pd.DataFrame], list[pd.DataFrame]]] = {}
    for side, points in enumerate((left_a, left_b)):
        for rows in points:
            alike.setdefault(tuple(rows.iloc[0][ALIKE]), ([], []))[side].append(rows)
    lines = []
    for own_a, own_b in alike.values():
        if len(own_a) == len(own_b) == 1:
            reason = "; ".join(_differences([own_a[0], own_b[0]], _FACTORS)) or "other factors differ"
            lines.append(_identity(own_a[0]) | {"verdict": str(Verdict.NOT_COMPARABLE), "reason": reason})
        else:
            lines += [_identity(rows) | {"verdict": str(Verdict.ONLY_A)} for rows in own_a]
            lines += [_identity(rows) | {"verdict": str(Verdict.ONLY_B)} for rows in own_b]
    return lines
