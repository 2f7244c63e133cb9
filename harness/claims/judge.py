"""From measured rows and published numbers to a verdict on each claim, with the reason.

A claim is judged for each *reading*: each combination of the factors that its source leaves open, as far as it was
measured. Rows of one reading agree in every condition, so its ratios compare like with like: one machine, one domain,
the same routing. What the source states (`where`) selects rows; where it states several values, the claim must hold
at each. Only rows of one rank per GPU over NVLink count, and of these only those that a headline may rest on.

The headline of a baseline that its source does not name (a mode of DeepEP, say) is the fastest of its backends at each
batch; each of them is read by itself too, and does not count. Nor does a reading that a newer run answers again, and as
well (`newest`); rows that were counted as wrong stay counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from epcross.harness.claims.basis import basis
from epcross.harness.claims.book import Book
from epcross.harness.claims.claim import OF_PUBLISHED, OVER_BASELINE, Claim, Members, Quantity, Way
from epcross.harness.claims.findings import Finding, Judgement, Reading, found_text, listed, reason, why
from epcross.harness.claims.hardware import nominal_gbps
from epcross.harness.claims.lean import lean
from epcross.harness.claims.newest import left_out, newest_counts
from epcross.harness.claims.selection import (
    NoRows,
    axes,
    by_backend,
    issued,
    keys,
    lacking,
    of_layers,
    plain,
    select,
    staged,
    unlike,
)
from epcross.harness.claims.verdict import JUDGED, Verdict, call, every, whichever
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.terms import Flag, Status

if TYPE_CHECKING:
    import pandas as pd

    from epcross.harness.claims.estimate import Estimate

FASTEST = "fastest"
"""Label of several backends that stand for one."""

_TOLD_APART = ("product", "machine", "measure_hash")
"""Conditions that are fields of a reading."""


def judge(
    book: Book, measured: "pd.DataFrame", published: "pd.DataFrame", *, keep: Iterable[Flag | str] = ()
) -> list[Judgement]:
    """A judgement of each claim for each way it can be judged, in the order of the book.

    Args:
        measured: rows of `frame.load` with the column `product` (`hardware.with_products`).
        published: of `published.load`.
        keep: flags whose rows are not left out.

    Raises:
        InputError: a flag is unknown.
    """
    from epcross.harness.analysis.frame import headline

    usable, measured = lean(headline(measured, keep).rows), lean(measured)
    found = []
    for claim in book.claims:
        if claim.quantity in OF_PUBLISHED:
            found.append(_of_published(claim, book, published))
            continue
        actor = book.actors[claim.subject]
        ways = [way for way in (Way.REPRODUCES, Way.REPLICATES) if actor.members(way)]
        found += [_of_measured(claim, way, book, measured, usable, published) for way in ways]
    return found


def exit_code(judgements: Sequence[Judgement]) -> int:
    """0: no claim is outside. 1: one is. 3: nothing that was measured could be judged, and no fact is wrong."""
    if any(one.verdict is Verdict.OUTSIDE for one in judgements):
        return 1
    return 0 if any(one.verdict in JUDGED for one in judgements if one.way is not Way.CHECKS) else NOTHING_SHOWN


def _of_measured(
    claim: Claim, way: Way, book: Book, measured: "pd.DataFrame", usable: "pd.DataFrame", published: "pd.DataFrame"
) -> Judgement:
    try:
        subject = select(claim, book, book.actors[claim.subject].members(way), measured, usable)
        baseline = subject.iloc[:0]
        if claim.quantity in OVER_BASELINE:
            baseline = select(claim, book, book.actors[claim.baseline].members(Way.REPRODUCES), measured, usable)
    except NoRows as nothing:
        return Judgement(claim=claim, way=way, verdict=nothing.verdict, reason=nothing.reason)
    if claim.quantity is Quantity.INCORRECT_ROWS:
        readings = list(_counts(claim, subject))
    else:
        readings = newest_counts(claim, list(_readings(claim, book, subject, baseline, published)))
    heads = [one for one in readings if one.headline]
    verdict = _over(heads)
    return Judgement(
        claim=claim,
        way=way,
        verdict=verdict,
        reason=". ".join(filter(None, [reason(claim, book, heads, verdict), left_out(readings)])),
        found=found_text([finding for one in heads for finding in one.findings]),
        readings=tuple(readings),
    )


def _over(heads: Sequence[Reading]) -> Verdict:
    """Of subjects that must all hold, and of other code where neither supersedes the other, every one; of what a source
    leaves open, whichever it is."""
    alike: dict[tuple[str, ...], list[Verdict]] = {}
    for one in heads:
        key = (str(dict(one.factors)), one.product, one.machine)
        alike.setdefault(key, []).append(one.verdict)
    together = []
    for verdicts in alike.values():
        judged = [verdict for verdict in verdicts if verdict in JUDGED]
        together.append(every(judged) if judged else whichever(verdicts))
    return whichever(together)


def _readings(
    claim: Claim, book: Book, subject: "pd.DataFrame", baseline: "pd.DataFrame", published: "pd.DataFrame"
) -> Iterator[Reading]:
    agreed = keys(claim)
    sides = dict(iter(baseline.groupby(agreed, observed=True)))
    nominal = {product: nominal_gbps(book, published, product) for product in map(str, subject["product"].unique())}
    for key, rows in subject.groupby(agreed, observed=True):
        values = {name: plain(value) for name, value in zip(agreed, key, strict=True)}
        for names, own, against, other, head in _choices(claim, rows, sides.get(key, baseline.iloc[:0])):
            verdict, words, findings = _held(claim, own, other, nominal[str(values["product"])])
            yield Reading(
                subject=names,
                baseline=against,
                headline=head,
                factors={name: values[name] for name in claim.open if name in values},
                conditions={name: value for name, value in values.items() if name not in _TOLD_APART},
                product=str(values["product"]),
                machine=str(values["machine"]),
                measure_hash=str(values["measure_hash"]),
                runs=tuple(sorted({*map(str, own["run_id"]), *map(str, other["run_id"])})),
                points=basis(claim, own, other) if head else {},  # what supersedes what is asked of no others
                taken_at=str(own["started_at"].max()),
                verdict=verdict,
                reason=words,
                findings=findings,
            )


def _choices(
    claim: Claim, rows: "pd.DataFrame", other: "pd.DataFrame"
) -> "Iterator[tuple[str, pd.DataFrame, str, pd.DataFrame, bool]]":
    """Which subject against which baseline: label, rows, label, rows, and whether it counts for the verdict."""
    own, against = by_backend(rows), by_backend(other)
    whole = FASTEST if len(own) > 1 else "".join(own)
    versus = FASTEST if len(against) > 1 else "".join(against)
    each = claim.members is Members.EACH
    if not each:
        yield whole, rows, versus, other, True
    if each or len(own) > 1:
        for name, part in own.items():
            yield name, part, versus, other, each
    if len(against) > 1:
        for name, part in against.items():
            yield whole, rows, name, part, False


def _held(
    claim: Claim, rows: "pd.DataFrame", other: "pd.DataFrame", nominal: float
) -> tuple[Verdict, str, tuple[Finding, ...]]:
    """The verdict of one reading, over the values that the source states."""
    from epcross.harness.claims.estimate import NotEnough

    if problem := lacking(claim, rows):
        return Verdict.NOT_MEASURED, problem, ()
    if claim.quantity in OVER_BASELINE and other.empty:
        return Verdict.NOT_MEASURED, "the baseline was not measured under the same conditions", ()
    if problem := _unlike(claim, rows, other):
        return Verdict.NOT_COMPARABLE, problem, ()
    if claim.quantity in (Quantity.WIRE_MULTIPLE, Quantity.BANDWIDTH_SHARE) and not nominal > 0:
        return Verdict.NOT_COMPARABLE, "no published value says what is nominal for this GPU", ()
    stated = axes(claim)
    findings: list[Finding] = []
    try:
        for key, part in rows.groupby(stated, observed=True) if stated else [((), rows)]:
            against = other
            for name, value in zip(stated, key, strict=True):
                against = against[against[name] == value]
            label = ", ".join(f"{name} {plain(value)}" for name, value in zip(stated, key, strict=True))
            findings += [_finding(claim, one, label) for one in _estimates(claim, part, against, nominal)]
    except NotEnough as lack:
        return Verdict.NOT_MEASURED, str(lack), ()
    verdict = every(finding.verdict for finding in findings)
    apart = issued(rows, other) if claim.quantity in OVER_BASELINE else ""
    words = [why(findings, verdict), apart, staged(rows, other), of_layers(rows)]
    return verdict, "; ".join(filter(None, words)), tuple(findings)


def _unlike(claim: Claim, rows: "pd.DataFrame", other: "pd.DataFrame") -> str:
    """What keeps the two sides of a ratio from being compared. Two EP sizes are two allocations by nature."""
    if claim.quantity in OVER_BASELINE:
        return unlike(rows, other)
    if claim.change is None or claim.change.factor in ("ep_size", "tokens_per_rank"):
        return ""
    base = rows[rows[claim.change.factor] == claim.change.base]
    found = [unlike(base, rows[rows[claim.change.factor] == value]) for value in claim.change.to]
    return next(filter(None, found), "")


def _estimates(claim: Claim, rows: "pd.DataFrame", other: "pd.DataFrame", nominal: float) -> "list[Estimate]":
    from epcross.harness.claims import estimate

    series = list(by_backend(rows).values())
    if claim.quantity in OVER_BASELINE:
        return estimate.over_baseline(claim, series, list(by_backend(other).values()))
    if claim.quantity in (Quantity.SHARE, Quantity.SHARE_TREND):
        return estimate.share(claim, series)
    if claim.change is None:
        return estimate.of_one(claim, series, nominal_gbps=nominal)
    factor = claim.change.factor
    sides = {
        value: list(by_backend(rows[rows[factor] == value]).values()) for value in (claim.change.base, *claim.change.to)
    }
    base = sides[claim.change.base]
    return [one for value in claim.change.to for one in estimate.change(claim, base, sides[value], f"{factor} {value}")]


def _finding(claim: Claim, one: "Estimate", label: str) -> Finding:
    if one.contrary:
        verdict, words = Verdict.OUTSIDE, one.contrary
    elif one.objection:
        verdict, words = Verdict.INCONCLUSIVE, one.objection
    else:
        verdict, words = call(claim.bounds, one.low, one.high), ""
    at = ", ".join(filter(None, [label, one.at]))
    return Finding(at=at, value=one.value, low=one.low, high=one.high, verdict=verdict, reason=words)


def _counts(claim: Claim, rows: "pd.DataFrame") -> Iterator[Reading]:
    """Wrong rows among those verified. A count has no interval; what it rests on is the number of rounds."""
    for (name, product, machine, sources), own in rows.groupby(
        ["backend", "product", "machine", "measure_hash"], observed=True
    ):
        wrong = own[own["status"] == Status.INCORRECT]
        units = own.assign(rounds=own["verified_rounds"].fillna(0)).groupby(["run_id", "point_id", "launch"])
        rounds = int(units["rounds"].max().sum())
        words = f"{rounds} rounds of {name} verified"
        if len(wrong):
            verdict = call(claim.bounds, len(wrong), len(wrong))
            words += f"; the first wrong one: {wrong['reason'].iloc[0]}"
        else:
            verdict = call(claim.bounds, 0, 0) if rounds else Verdict.INCONCLUSIVE
        finding = Finding(at="", value=len(wrong), low=len(wrong), high=len(wrong), verdict=verdict, reason=words)
        yield Reading(
            subject=str(name),
            factors={},
            product=str(product),
            machine=str(machine),
            measure_hash=str(sources),
            verdict=verdict,
            reason=words,
            findings=(finding,),
        )


def _of_published(claim: Claim, book: Book, published: "pd.DataFrame") -> Judgement:
    from epcross.harness.claims.facts import facts

    readings: list[Reading] = []
    texts: dict[Verdict, list[str]] = {}
    for fact in facts(claim, book, published):
        if fact.value is None:
            verdict, findings = Verdict.NOT_MEASURED, ()
        else:
            verdict = call(claim.bounds, fact.value, fact.value)
            findings = (Finding(at=fact.at, value=fact.value, low=fact.value, high=fact.value, verdict=verdict),)
        words = "" if fact.value is not None else fact.at
        readings.append(
            Reading(subject=claim.source, factors=fact.factors, verdict=verdict, reason=words, findings=findings)
        )
        label = fact.at or " ".join(f"{name}={value}" for name, value in fact.factors.items())
        texts.setdefault(verdict, []).append(label)
    verdict = whichever(one.verdict for one in readings)
    if len(texts) > 1:
        words = "; ".join(f"{each} for {listed(labels)}" for each, labels in texts.items())
    else:
        words = "" if verdict in JUDGED else "; ".join(dict.fromkeys(one.reason for one in readings))
    found = found_text([finding for one in readings for finding in one.findings])
    return Judgement(claim=claim, way=Way.CHECKS, verdict=verdict, reason=words, found=found, readings=tuple(readings))
