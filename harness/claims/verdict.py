"""What an interval says of a claim's bounds. Pure: numbers in, one word out.

    bounds        |----------|
    inside          |----|                 the whole interval lies within
    exceeded                     |---|     the whole interval lies beyond, on the side that is better
    outside  |--|                          the whole interval lies beyond, on the other side (or neither is better)
    inconclusive          |-----|          it straddles a bound, or the launches are too few to call anything

A bound that a source does not give is open. "Up to X" has two: a factor that is not reached is outside.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What was found of a claim."""

    INSIDE = "inside"
    EXCEEDED = "exceeded"  # better than the bound
    OUTSIDE = "outside"
    INCONCLUSIVE = "inconclusive"
    NOT_MEASURED = "not measured"
    NOT_COMPARABLE = "not comparable"  # measured, under other conditions than the claim's


HOLDS = (Verdict.INSIDE, Verdict.EXCEEDED)
JUDGED = (*HOLDS, Verdict.OUTSIDE, Verdict.INCONCLUSIVE)
"""Verdicts that rest on numbers."""


class Better(StrEnum):
    """Which side of the bounds is the better one for the subject of a claim."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """From `lower` to `upper`, both included; None is open, and one of them is given."""

    lower: float | None
    upper: float | None
    better: Better = Better.NEITHER

    def __str__(self) -> str:
        if self.lower is None or self.upper is None:
            return f">= {self.lower:g}" if self.lower is not None else f"<= {self.upper:g}"
        return f"{self.lower:g}" if self.lower == self.upper else f"{self.lower:g}..{self.upper:g}"


def call(bounds: Bounds, low: float, high: float) -> Verdict:
    """The verdict on an interval from `low` to `high`, ends included; an end may be infinite.

    Raises:
        ValueError: the interval is none.
    """
    if not low <= high:
        raise ValueError(f"{low} to {high} is no interval")
    lower = -math.inf if bounds.lower is None else bounds.lower
    upper = math.inf if bounds.upper is None else bounds.upper
    if high < lower:
        return Verdict.EXCEEDED if bounds.better is Better.LOWER else Verdict.OUTSIDE
    if low > upper:
        return Verdict.EXCEEDED if bounds.better is Better.HIGHER else Verdict.OUTSIDE
    return Verdict.INSIDE if lower <= low and high <= upper else Verdict.INCONCLUSIVE


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """Of a claim about every batch, say: it fails where one fails, and is open where one is open.

    Raises:
        ValueError: there is none, or one that rests on no number.
    """
    found = set(verdicts)
    if not found or not found <= set(JUDGED):
        raise ValueError(f"verdicts that rest on numbers are needed, not {sorted(found)}")
    for verdict in (Verdict.OUTSIDE, Verdict.INCONCLUSIVE, Verdict.EXCEEDED):
        if verdict in found:
            return verdict
    return Verdict.INSIDE


def whichever(verdicts: Iterable[Verdict]) -> Verdict:
    """Of a claim whose source leaves a factor open, over the values of it: where they differ, nobody can tell.

    Verdicts that rest on no number count only if there is no other.

    Raises:
        ValueError: there is none.
    """
    found = list(verdicts)
    judged = [verdict for verdict in found if verdict in JUDGED]
    if not found:
        raise ValueError("a verdict is needed")
    if not judged:
        return Verdict.NOT_COMPARABLE if Verdict.NOT_COMPARABLE in found else Verdict.NOT_MEASURED
    if all(verdict in HOLDS for verdict in judged):
        return every(judged)
    return judged[0] if len(set(judged)) == 1 else Verdict.INCONCLUSIVE
