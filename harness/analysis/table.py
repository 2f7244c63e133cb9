"""The tables a terminal shows: what a run measured, and how far it is. At most `WIDTH` columns, piped or not."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from epcross.harness.analysis.captions import provenance
from epcross.harness.analysis.cells import PHASE_WORDS, experts_words, headline_flags
from epcross.harness.analysis.inputs import option_words
from epcross.harness.measuring.stats import median
from epcross.harness.planning.tokens import nominal_words
from epcross.harness.record import Record
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import HEADLINES, Flag, Phase, Sharing, Status

WIDTH = 100
"""Columns of a terminal that every table fits."""

_BACKENDS_PER_TABLE = 4  # at 18 columns each, with the tokens beside them, 80 columns hold a table
_SHOWN_PROBLEMS = 20

_GROUP = (
    "phase", "ep_size", "domain", "sharing", "scope", "regime", "model", "hidden", "num_experts", "num_slots", "top_k",
    "routing", "routing_params", "placement", "dispatch_format", "combine_format",
)  # fmt: skip
"""What all numbers of one table share."""

_LINE = ("tokens_per_rank", "tokens_min", "tokens_total", "max_tokens_per_rank")
"""What the numbers of one line share besides."""


@dataclass(slots=True)
class Footnotes:
    """Remarks under a table: each sentence has one letter, however often it is pointed at."""

    sentences: list[str] = field(default_factory=list)

    def mark(self, sentence: str) -> str:
        """The mark, such as `(a)`, that points at `sentence`."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
        return f"({self._letters(self.sentences.index(sentence))})"

    def lines(self) -> list[str]:
        """The footnotes in order, each with its mark."""
        return [f"({self._letters(index)}) {sentence}" for index, sentence in enumerate(self.sentences)]

    @staticmethod
    def _letters(index: int) -> str:
        return ("" if index < 26 else chr(ord("a") + index // 26 - 1)) + chr(ord("a") + index % 26)


def run_table(rows: Iterable[Record]) -> RenderableType:
    """One table of median round-trip (or layer) times for each EP size, domain, regime and further setting of `rows`.

    A cell is the median of the repeats in microseconds and their [lowest..highest]. Flagged repeats do not enter it;
    where there are no others they are shown, marked. Where no repeat is ok, the status stands as a word.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in rows:
        if row.phase in HEADLINES:
            groups[tuple(getattr(row, name) for name in _GROUP)].append(row)
    if not groups:
        return Text("No round trips were planned.")
    order = sorted(groups, key=lambda key: (HEADLINES.index(Phase(key[0])), *key[1:]))
    parts = [part for key in order for part in _group_parts(groups[key])]
    return Constrain(Group(*parts[:-1]), WIDTH)  # no blank line after the last


def status_table(
    rows: Iterable[Record], *, planned_units: int, done_units: int, problems: Sequence[object] = ()
) -> RenderableType:
    """How far a run is: units done of those planned, rows of each backend by status, files that cannot be used."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row.backend][row.status] += 1
    seen = [status for status in Status if any(count[status] for count in counts.values())]
    parts: list[Any] = []
    if counts:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("rows of", overflow="fold", max_width=30)
        for status in seen:
            table.add_column(status.value, justify="right", overflow="fold")
        for backend in sorted(counts):
            table.add_row(Text(backend), *(str(counts[backend][status] or "") for status in seen))
        parts.append(table)
    percent = f" ({100 * done_units // planned_units} %)" if planned_units else ""
    parts.append(Text(f"units: {done_units} done of {planned_units} planned{percent}"))
    if problems:
        parts.append(Text(f"files that cannot be used: {len(problems)}"))
        parts += [Text(f"  - {problem}") for problem in problems[:_SHOWN_PROBLEMS]]
        if len(problems) > _SHOWN_PROBLEMS:
            parts.append(Text(f"  ... and {len(problems) - _SHOWN_PROBLEMS} more"))
    return Constrain(Group(*parts), WIDTH)


def microseconds(value_us: float) -> str:
    """A time with three significant digits and none of the noise below: 1.23, 12.3, 123, 1234."""
    decimals = 2 if value_us < 9.995 else 1 if value_us < 99.95 else 0
    return f"{value_us:.{decimals}f}"


def _group_parts(rows: Sequence[Record]) -> list[Any]:
    columns = _columns(rows)
    names = list(columns)
    everywhere = _flags_everywhere(rows)
    parts: list[Any] = []
    for start in range(0, len(names), _BACKENDS_PER_TABLE):
        shown = {name: columns[name] for name in names[start : start + _BACKENDS_PER_TABLE]}
        footnotes = Footnotes()
        parts.append(Text(_title(rows[0]), style="bold"))
        parts.append(_table(rows, shown, footnotes, everywhere))
        parts += [Text(line, style="dim") for line in footnotes.lines()]
    if everywhere:
        parts.append(Text(f"* every row is flagged {join_words(everywhere)}: no headline", style="dim"))
    places = (
        [row for row in column if _line(row) == line] for column in columns.values() for line in {*map(_line, column)}
    )
    repeats, *rest = provenance([row for place in places for row in _shown(place)] or rows)
    parts += [Text(line) for line in (f"median [lowest..highest] over {repeats}", *rest)]
    parts.append(Text(""))
    return parts


def _columns(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """The rows under each column head: the backend and its experts, with those options that differ among its rows."""
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        for name, value in _options(row).items():
            seen[_who(row), name].add(json.dumps(value))
    shapes = Counter(who for who, _ in {(_who(row), tuple(_options(row))) for row in rows})

    def head(row: Record) -> str:
        who = _who(row)
        several = shapes[who] > 1  # an option that some rows have and others have not tells them apart too
        words = [
            option_words(name, value) for name, value in _options(row).items() if several or len(seen[who, name]) > 1
        ]
        return " ".join([who, *words])

    columns: dict[str, list[Record]] = defaultdict(list)
    for row in sorted(rows, key=head):
        columns[head(row)].append(row)
    return columns


def _who(row: Record) -> str:
    return f"{row.backend} {experts_words(row)}".rstrip()


def _options(row: Record) -> dict[str, Any]:
    return {**json.loads(row.options), **json.loads(row.compute_options or "{}")}


def _table(
    rows: Sequence[Record], columns: Mapping[str, Sequence[Record]], footnotes: Footnotes, everywhere: Set[str]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tokens\nper rank", justify="right", max_width=16)
    for name in columns:
        table.add_column(Text(name), justify="right", overflow="fold", max_width=30, min_width=10)
    lines = sorted({_line(row) for row in rows})
    for line in lines:
        cells = [
            _cell([row for row in column if _line(row) == line], footnotes, everywhere) for column in columns.values()
        ]
        table.add_row(_line_label(line, lines, rows[0].ep_size), *cells)
    return table


def _line(row: Record) -> tuple[int, ...]:
    return tuple(getattr(row, name) for name in _LINE)


def _title(row: Record) -> str:
    domain = row.domain if row.sharing == Sharing.NONE else f"{row.domain} ({row.sharing})"
    params = "" if row.routing_params == "{}" else f" {row.routing_params}"
    return (
        f"EP {row.ep_size}, {domain}, {row.regime}: {PHASE_WORDS[Phase(row.phase)]} in us\n"
        f"{row.model}: {row.num_experts} experts in {row.num_slots} slots, top {row.top_k}, hidden {row.hidden}; "
        f"{row.routing}{params} routing, {row.placement}; {row.dispatch_format} out, {row.combine_format} back"
    )


def _line_label(line: tuple[int, ...], lines: Sequence[tuple[int, ...]], ep_size: int) -> str:
    """The nominal tokens; what ranks really have where it differs, the capacity where lines differ by it alone."""
    nominal, least, total, capacity = line
    label = nominal_words(nominal, least, total, ep_size)
    if least != nominal or total != nominal * ep_size:
        label += f" (min {least}, all {total})"
    if sum(other[:3] == line[:3] for other in lines) > 1:
        label += f" cap {capacity}"
    return label


def _cell(rows: Sequence[Record], footnotes: Footnotes, everywhere: Set[str]) -> Text:
    if not rows:
        return Text("-", style="dim")
    ok = [row for row in rows if row.status == Status.OK]
    plain = [row for row in ok if not headline_flags(row)]
    shown = _shown(rows)
    marks = [footnotes.mark(sentence) for sentence in _remarks(rows, ok, plain, everywhere)]
    if not shown:
        words = " ".join(sorted({row.status for row in rows}))
        return Text(" ".join([words, *marks]), style="red")
    times = [row.latency_us for row in shown if row.latency_us is not None]
    star = "*" if everywhere else ""
    words = f"{microseconds(median(times))}{star} [{microseconds(min(times))}..{microseconds(max(times))}]"
    return Text(" ".join([words, *marks]), style="" if plain else "dim")


def _shown(rows: Iterable[Record]) -> list[Record]:
    """The rows behind the number of a cell: the ok ones without a flag, or all ok ones where each has one."""
    ok = [row for row in rows if row.status == Status.OK]
    return [row for row in ok if not headline_flags(row)] or ok


def _remarks(rows: Sequence[Record], ok: Sequence[Record], plain: Sequence[Record], everywhere: Set[str]) -> list[str]:
    """What must be said about a cell: failures with their reasons, then flags that not every row has."""
    remarks = []
    failures = Counter((row.status, row.reason or "") for row in rows if row.status != Status.OK)
    for (status, reason), count in sorted(failures.items()):
        share = "" if count == len(rows) else f"{count} of {len(rows)} repeats "
        remarks.append(f"{share}{status}: {reason}")
    flagged = [row for row in ok if headline_flags(row) - everywhere]
    flags = join_words(flag for row in flagged for flag in headline_flags(row) - everywhere)
    if flagged and plain:
        remarks.append(f"{len(flagged)} of {len(rows)} repeats left out, flagged {flags}")
    elif flagged:
        remarks.append(f"flagged {flags}: no headline")
    if any(Flag.POWER_CAPPED in row.flags.split() for row in plain or ok):
        remarks.append("at the GPU's power limit")
    return remarks


def _flags_everywhere(rows: Sequence[Record]) -> frozenset[str]:
    """Flags that every ok row has, such as oversubscribed: said once instead of in each cell."""
    flags = [headline_flags(row) for row in rows if row.status == Status.OK]
    return frozenset.intersection(*flags) if flags else frozenset()
