"""Of several readings of a claim that ask the same of the same machine, the one of the newest run counts.

Runs of other code, whose `measure_hash` differs, are never in one reading. A run that was taken again with newer code
would stand beside its forerunner, and a difference between the two would leave the claim open for ever.
"""

from collections.abc import Sequence
from dataclasses import replace

from epcross.harness.analysis.older import differs_from, shown
from epcross.harness.claims.claim import Claim, Members
from epcross.harness.claims.findings import Reading
from epcross.harness.claims.verdict import JUDGED


def newest_counts(claim: Claim, readings: Sequence[Reading]) -> list[Reading]:
    """`readings`, of which those that count no more say which run supersedes them. One that rests on no number is no
    answer: it supersedes none, and says itself why it is none."""
    answers: dict[tuple[str, ...], Reading] = {}
    for one in readings:
        if one.headline and one.verdict in JUDGED:
            newest = answers.setdefault(_question(claim, one), one)
            if _age(one) > _age(newest):
                answers[_question(claim, one)] = one
    return [_superseded(one, answers.get(_question(claim, one))) for one in readings]


def left_out(readings: Sequence[Reading]) -> str:
    """Which runs do not count, in how many readings, and why; empty if all do."""
    counts: dict[tuple[str, str], int] = {}
    for one in readings:
        if one.superseded:
            key = ", ".join(one.runs), one.superseded
            counts[key] = counts.get(key, 0) + 1
    told = [
        f"{runs}, {count} {'reading' if count == 1 else 'readings'}: {words}" for (runs, words), count in counts.items()
    ]
    return f"Left out: {'; '.join(told)}" if told else ""


def _question(claim: Claim, one: Reading) -> tuple[str, ...]:
    """What is asked: readings of one question differ in the code that answers it."""
    subject = one.subject if claim.members is Members.EACH else ""
    return subject, str(dict(one.factors)), one.product, one.machine


def _age(one: Reading) -> tuple[str, tuple[str, ...]]:
    return one.taken_at, one.runs  # ids of runs begin with the second


def _superseded(one: Reading, newest: Reading | None) -> Reading:
    """`one`, as it counts beside the `newest` answer to its question."""
    if newest is None or newest.measure_hash == one.measure_hash or one.verdict not in JUDGED or not one.headline:
        return one
    own, there = ({"measure_hash": shown("measure_hash", each.measure_hash)} for each in (one, newest))
    return replace(one, headline=False, superseded=differs_from(", ".join(newest.runs), own, there))
