"""What measured runs say of statements: published | ours | ratio | verdict."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from epcross.harness.claims.book import read_book
from epcross.harness.claims.claim import Claim
from epcross.harness.claims.evaluate import evaluate
from epcross.harness.claims.findings import Judgement
from epcross.harness.claims.judge import exit_code
from epcross.harness.claims.sources import reference_folders
from epcross.harness.claims.verdict import JUDGED
from epcross.harness.reproduction.statements import Task

_NUMBER = r"\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """One statement, judged one way."""

    claim: str
    statement: str
    way: str
    published: str
    ours: str
    ratio: tuple[float, float] | None  # least and greatest of ours over published; 1 within a published range
    verdict: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def judge_runs(tasks: Sequence[Task], runs: Sequence[Path]) -> tuple[list[VerdictRow], str, int]:
    """A row for each statement and way, a sentence on what was judged by, and the exit code that it comes to.

    Raises:
        EpcrossError: a run cannot be read.
    """
    folders = reference_folders(())
    judgements, note = evaluate(read_book(folders), folders, runs)
    wanted = {claim.id for task in tasks for claim in task.claims}
    mine = [one for one in judgements if one.claim.id in wanted]
    return [_row(one) for one in mine], note, exit_code(mine)


def table(rows: Sequence[VerdictRow]) -> Table:
    """The rows, for a terminal."""
    found = Table(expand=True)
    found.add_column("claim", no_wrap=True)
    found.add_column("statement", ratio=2)
    for heading in ("published", "ours", "ratio", "verdict"):
        found.add_column(heading, ratio=1)
    for row in rows:
        cells = (row.claim, row.statement, row.published, row.ours or "-", ratio_text(row.ratio))
        found.add_row(*map(Text, cells), Text(f"{row.verdict} ({row.way})"))
    return found


def ratio_text(ratio: tuple[float, float] | None) -> str:
    """One number, or two where a statement is about several."""
    if ratio is None:
        return "-"
    low, high = (f"{value:.2f}" for value in ratio)
    return low if low == high else f"{low} to {high}"


def published_range(claim: Claim) -> tuple[float, float] | None:
    """The number that a statement gives, or the ends of its range; None if its words hold none that can be divided by.

    A number counts if the bounds admit it, for a statement also names batches and other things.
    """
    inside = re.findall(rf"\(({_NUMBER})\)", claim.stated)  # the quotient beside what it is of
    span = re.match(rf"({_NUMBER}) to ({_NUMBER})", claim.stated)
    found = inside or (list(span.groups()) if span else re.findall(_NUMBER, claim.stated))
    numbers = [float(number.replace(",", "")) for number in found]
    if not numbers or len(numbers) > (2 if span and not inside else 1) or min(numbers) <= 0:
        return None
    low, high = min(numbers), max(numbers)
    admitted = (claim.lower is None or claim.lower <= low) and (claim.upper is None or high <= claim.upper)
    return (low, high) if admitted else None


def ratio_to(published: tuple[float, float] | None, values: Sequence[float]) -> tuple[float, float] | None:
    """Least and greatest of `values` over the published number, or over the nearer end of its range."""
    if published is None or not values:
        return None
    low, high = published
    ratios = [value / low if value < low else value / high if value > high else 1.0 for value in values]
    return min(ratios), max(ratios)


def _row(one: Judgement) -> VerdictRow:
    values = [
        finding.value
        for reading in one.readings
        if reading.headline
        for finding in reading.findings
        if finding.verdict in JUDGED
    ]
    return VerdictRow(
        claim=one.claim.id,
        statement=one.claim.statement,
        way=str(one.way),
        published=one.claim.stated,
        ours=one.found,
        ratio=ratio_to(published_range(one.claim), values),
        verdict=str(one.verdict),
        reason=one.reason,
    )
