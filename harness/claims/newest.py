"""Which of several readings of a claim count that ask the same of the same machine.

Runs of other code, whose `measure_hash` differs, are never in one reading. A run that was taken again with newer code
would stand beside its forerunner, and a difference between the two would leave the claim open for ever. So a newer
reading supersedes an older one, provided that it answers all that the older one answered and no less surely: a run of a
few batches, or of too few launches to tell anything, cannot undo what was found. Otherwise both count.
"""

from collections.abc import Sequence
from dataclasses import replace

from epcross.harness.analysis.older import differs_from, shown
from epcross.harness.claims.claim import Claim, Members
from epcross.harness.claims.findings import Reading
from epcross.harness.claims.verdict import JUDGED, Verdict


def newest_counts(claim: Claim, readings: Sequence[Reading]) -> list[Reading]:
    """`readings`, of which those that count no more say which run supersedes them. One that rests on no number is no
    answer: it supersedes none, and says itself why it is none."""
    counting: dict[tuple[str, ...], list[Reading]] = {}
    found = list(readings)
    answers = [place for place, one in enumerate(readings) if one.headline and one.verdict in JUDGED]
    # from the newest on: one that is superseded itself supersedes none, or a chain could undo more than its last link
    for place in sorted(answers, key=lambda place: _age(readings[place]), reverse=True):
        one = found[place]
        newer = counting.setdefault(_question(claim, one), [])
        better = next((other for other in newer if _supersedes(other, one)), None)
        if better:
            found[place] = replace(one, headline=False, superseded=_why(one, better))
        else:
            newer.append(one)
    return found


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
    return subject, str(dict(one.conditions)), one.product, one.machine


def _age(one: Reading) -> tuple[str, tuple[str, ...]]:
    return one.taken_at, one.runs  # ids of runs begin with the second


def _supersedes(newer: Reading, older: Reading) -> bool:
    """Whether it is of other code, has every point of the older one, and can be told or was measured as often there."""
    if newer.measure_hash == older.measure_hash or not older.points.keys() <= newer.points.keys():
        return False
    as_often = all(newer.points[point].no_fewer_than(repeats) for point, repeats in older.points.items())
    return newer.verdict is not Verdict.INCONCLUSIVE or as_often


def _why(older: Reading, newer: Reading) -> str:
    own, there = ({"measure_hash": shown("measure_hash", each.measure_hash)} for each in (older, newer))
    return differs_from(", ".join(newer.runs), own, there, as_old=older.taken_at == newer.taken_at)
