"""Verdicts as a terminal shows them, in at most `WIDTH` columns, and as plain JSON values."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from epcross.harness.analysis.table import WIDTH, Footnotes
from epcross.harness.claims.claim import Way
from epcross.harness.claims.findings import Finding, Judgement, Reading, interval_text
from epcross.harness.claims.judge import exit_code
from epcross.harness.claims.verdict import Verdict

_STYLES = {Verdict.INSIDE: "green", Verdict.EXCEEDED: "green", Verdict.OUTSIDE: "red", Verdict.INCONCLUSIVE: "yellow"}

_FOUND_WIDTH = 20

MEANINGS = {
    0: "no claim is outside its bounds, as far as it can be told",
    1: "at least one claim is outside its bounds",
    3: "nothing measured here could be held against a claim",
}
"""Of the exit codes."""


def claims_table(judgements: Sequence[Judgement], note: str) -> RenderableType:
    """A line for each claim and way, the reasons as footnotes, and what it comes to."""
    footnotes = Footnotes()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column("claim", no_wrap=True, min_width=5)
    table.add_column("statement", ratio=1, overflow="fold")
    table.add_column("bounds", max_width=12, overflow="fold")
    for name, width in (("way", 10), ("found", _FOUND_WIDTH), ("verdict", 19)):
        table.add_column(name, no_wrap=True, max_width=width)
    for _, group in itertools.groupby(judgements, key=lambda one: one.claim.id):
        ways = list(group)  # stacked in one line of the table, so that a statement stands once
        claim = ways[0].claim
        verdicts = Text()
        for number_of, one in enumerate(ways):
            mark = f" {footnotes.mark(one.reason)}" if one.reason else ""
            verdicts.append("\n" * bool(number_of) + f"{one.verdict}{mark}", style=_STYLES.get(one.verdict, "dim"))
        table.add_row(
            Text(claim.id, style="bold"),
            Text(claim.statement),
            Text(str(claim.bounds)),
            Text("\n".join(one.way for one in ways)),
            Text("\n".join(one.found for one in ways)),
            verdicts,
        )
    parts: list[RenderableType] = [table, *(Text(line, style="dim") for line in footnotes.lines()), Text("")]
    return Constrain(Group(*parts, *(Text(line) for line in _sums(judgements, note))), WIDTH)


def claim_page(judgement: Judgement) -> RenderableType:
    """Everything that was found of one claim, one way: each reading, each backend by itself."""
    claim = judgement.claim
    head = [
        f"{claim.id} ({claim.kind}, {judgement.way}): {claim.statement}",
        f"source {claim.source}: {claim.stated}; bounds {claim.bounds} from {claim.bounds_from}; on {claim.hardware}",
    ]
    if claim.note:
        head.append(claim.note)
    if claim.sweep:
        head.append(f"measured by: epcross run sweep={claim.sweep}")
    parts: list[RenderableType] = [Text(line) for line in head]
    if judgement.readings:
        parts += _readings(judgement.readings)
        if not all(one.headline for one in judgement.readings):
            parts.append(Text("* counts for the verdict; other lines show each backend by itself, or an older run"))
    verdict = f"Verdict: {judgement.verdict}" + (f": {judgement.reason}" if judgement.reason else "")
    return Constrain(Group(*parts, Text(verdict), Text("")), WIDTH)


def as_json(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    """One object for each judgement; what is missing or infinite is null."""
    found = []
    for one in judgements:
        claim = asdict(one.claim)
        found.append(
            {
                **{
                    name: claim[name]
                    for name in ("id", "statement", "source", "kind", "quantity", "operator", "stated")
                },
                **{
                    name: claim[name]
                    for name in ("lower", "upper", "better", "bounds_from", "hardware", "sweep", "note")
                },
                "way": one.way,
                "verdict": one.verdict,
                "reason": one.reason,
                "found": one.found,
                "readings": [_without_points(reading) for reading in one.readings],
            }
        )
    return _plain(found)


def _without_points(reading: Reading) -> dict[str, Any]:
    """Its fields but the repeats of every point, which are longer than all the others."""
    return {name: value for name, value in asdict(reading).items() if name != "points"}


def _readings(readings: Sequence[Reading]) -> list[RenderableType]:
    """What all readings share, and a line for each number."""
    values = {name: {str(one.factors.get(name)) for one in readings} for name in readings[0].factors}
    varied = [name for name, found in values.items() if len(found) > 1]
    shared = [f"{name}={min(found)}" for name, found in values.items() if len(found) == 1]
    places = sorted({one.product for one in readings if one.product})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    for name, width in (("subject", 20), ("against", 13), *([("left open", 20)] if varied else [])):
        table.add_column(name, overflow="fold", max_width=width)
    for name, width in (("at", 16), ("found", 20), ("verdict", 14)):
        table.add_column(name, overflow="fold", max_width=width)
    for reading in readings:
        for nth, finding in enumerate(reading.findings or (None,)):
            table.add_row(*_line(reading, finding, varied, first=nth == 0))
    alike = [Text(f"in all readings: {', '.join([*places, *shared])}")] if places or shared else []
    return [*alike, table]


def _line(reading: Reading, finding: Finding | None, varied: Sequence[str], *, first: bool) -> list[Text]:
    star = "*" if reading.headline else " "
    factors = " ".join(f"{name}={reading.factors.get(name)}" for name in varied)
    verdict = reading.verdict if finding is None else finding.verdict
    return [
        Text(f"{star}{reading.subject}" if first else ""),
        Text(reading.baseline if first else ""),
        *([Text(factors if first else "")] if varied else []),
        Text(finding.at if finding else ""),
        Text(interval_text(finding) if finding else reading.reason),
        Text(str(verdict), style=_STYLES.get(verdict, "dim")),
    ]


def _sums(judgements: Sequence[Judgement], note: str) -> list[str]:
    lines = []
    for way, words in (
        (Way.REPRODUCES, "with shipped kernels (reproduces)"),
        (Way.REPLICATES, "with this repository's (replicates)"),
        (Way.CHECKS, "facts that follow from published numbers"),
    ):
        counts = Counter(one.verdict for one in judgements if one.way is way)
        if counts:
            lines.append(
                f"{words}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
            )
    return [*lines, *([note] if note else []), f"Verdict: {MEANINGS[exit_code(judgements)]}"]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float) else str(value)
