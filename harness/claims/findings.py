"""What a judgement is made of, and its words: which number was found where, and why it comes to that verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epcross.harness.claims.basis import Repeats
from epcross.harness.claims.book import Book
from epcross.harness.claims.claim import Claim, Way
from epcross.harness.claims.hardware import is_one
from epcross.harness.claims.verdict import HOLDS, JUDGED, Verdict

_WIDTH = 20  # of an interval in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One number held against the bounds."""

    at: str  # which batch or value; empty if it is about all of them
    value: float
    low: float
    high: float
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A claim under one combination of open factors, for one subject and one baseline."""

    subject: str
    baseline: str = ""
    headline: bool = True  # counts for the verdict; the others show each backend by itself
    factors: Mapping[str, Any]  # the open ones
    conditions: Mapping[str, Any] = field(default_factory=dict)  # all that its rows agree in, besides the next three
    product: str = ""  # GPUs; empty for published numbers
    machine: str = ""  # hash of what makes two machines comparable
    measure_hash: str = ""  # of the sources that can change a number
    runs: tuple[str, ...] = ()  # whose rows it rests on
    points: Mapping[str, Repeats] = field(default_factory=dict)  # that it rests on
    taken_at: str = ""  # when the last of these rows was begun, UTC
    superseded: str = ""  # why it counts no more: which newer run answers the same
    verdict: Verdict
    reason: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found of a claim, one way."""

    claim: Claim
    way: Way
    verdict: Verdict
    reason: str  # a sentence, or several
    found: str = ""  # the number, as text
    readings: tuple[Reading, ...] = ()


def why(findings: Sequence[Finding], verdict: Verdict) -> str:
    """What decided, where several numbers were held against the bounds or none could be called."""
    decisive = [one for one in findings if one.verdict is verdict]
    words = "; ".join(dict.fromkeys(one.reason for one in decisive if one.reason))
    places = [one.at for one in decisive if one.at]
    where = f"at {listed(places)}" if places and len(decisive) < len(findings) else ""
    if verdict is Verdict.INCONCLUSIVE and not words:
        words = "the interval straddles a bound"
    return ": ".join(filter(None, [where, words]))


def reason(claim: Claim, book: Book, heads: Sequence[Reading], verdict: Verdict) -> str:
    """For which open factors it holds and for which not, which were not measured, and on what hardware it was."""
    counted = [one for one in heads if one.verdict in JUDGED] or list(heads)
    sentences = [_by_reading(claim, counted, verdict)]
    if verdict in JUDGED:
        seen = {name: {str(one.factors.get(name)) for one in counted} for name in claim.open}
        gaps = [
            f"{name} {', '.join(unseen)}"
            for name, values in claim.open.items()
            if (unseen := [str(value) for value in values if str(value) not in seen[name]])
        ]
        sentences.append(f"Left open and not measured: {'; '.join(gaps)}" if gaps else "")
        products = sorted({one.product for one in counted if one.product})
        others = [name for name in products if not is_one(book.systems[claim.hardware], name)]
        sentences.append(f"On {', '.join(others)}, where the source has {claim.hardware}" if others else "")
    return ". ".join(filter(None, sentences))


def _by_reading(claim: Claim, counted: Sequence[Reading], verdict: Verdict) -> str:
    labels = labels_of(claim, counted)
    texts: dict[str, list[str]] = {}
    for label, one in zip(labels, counted, strict=True):
        texts.setdefault(f"{one.verdict} ({one.reason})" if one.reason else str(one.verdict), []).append(label)
    if len(texts) == 1:
        return counted[0].reason
    words = "; ".join(f"{text} for {listed(own)}" for text, own in texts.items())
    verdicts = {one.verdict for one in counted}
    depends = verdict is not Verdict.OUTSIDE and Verdict.OUTSIDE in verdicts and bool(verdicts & set(HOLDS))
    return f"it depends: {words}" if depends else words


def labels_of(claim: Claim, readings: Sequence[Reading]) -> list[str]:
    """What sets each reading apart from the others."""
    varying = [name for name in claim.open if len({str(one.factors.get(name)) for one in readings}) > 1]
    apart = [name for name in ("subject", "product") if len({getattr(one, name) for one in readings}) > 1]
    labels = [
        " ".join([*(getattr(one, name) for name in apart), *(f"{name}={one.factors.get(name)}" for name in varying)])
        for one in readings
    ]
    if len(set(labels)) < len(labels):  # the same on another machine, or with other sources
        tails = [f"machine {one.machine[:8]} sources {one.measure_hash[:8]}" for one in readings]
        labels = [f"{label} {tail}".strip() for label, tail in zip(labels, tails, strict=True)]
    return labels


def listed(words: Sequence[str], shown: int = 6) -> str:
    """Words in a row, the first few of many."""
    return ", ".join(words[:shown]) + (f" and {len(words) - shown} more" if len(words) > shown else "")


def found_text(findings: Sequence[Finding]) -> str:
    """One number with its interval, or the range of several."""
    known = [one for one in findings if not math.isnan(one.value)]
    if not known:
        return ""
    if len({(one.value, one.low, one.high) for one in known}) == 1:
        return interval_text(known[0])
    values = [one.value for one in known]
    return f"{number(min(values))}..{number(max(values))}"


def interval_text(one: Finding) -> str:
    """The number of a finding and its interval, with two digits where three are too wide for a table."""
    if one.low == one.high:
        return number(one.value)
    text = f"{number(one.value)} [{number(one.low)}..{number(one.high)}]"
    return text if len(text) <= _WIDTH else f"{number(one.value, 2)} [{number(one.low, 2)}..{number(one.high, 2)}]"


def number(value: float, digits: int = 3) -> str:
    """The digits that matter; `inf` where a crossover lies above the range, `?` where there is none."""
    if not math.isfinite(value):
        return "?" if math.isnan(value) else f"{value:g}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"
