"""The tables of a source: CSV files, one published measurement a row, read strictly."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from epcross.harness.claims.documents import NUMBER, control_characters, read_text
from epcross.harness.claims.sources import ByteConvention
from epcross.harness.errors import ConfigError
from epcross.harness.planning.typed import suggest
from epcross.harness.terms import Phase, RowFormat
from epcross.kernels.formats import row_size

QUOTED_FILE = "quoted.csv"

PHASES = (*(str(word) for word in Phase), "prepare", "link")
"""Ours, and `prepare` (a routing step of its own) and `link` (no exchange: a property of the hardware)."""

FORMATS = (*(str(word) for word in RowFormat), "low_precision")
"""Ours, and a reduced combine format whose width its source does not name."""

_SHOWN = 12  # problems of a file that one error names


class Metric(StrEnum):
    """What a value is."""

    LATENCY = "latency_us"
    BANDWIDTH = "bandwidth_gbps"
    SPEEDUP = "speedup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One published measurement. None or empty: the source does not state it."""

    system: str
    phase: str = ""
    hardware: str = ""
    ep_size: int | None = None
    tokens_per_rank: int | None = None
    hidden: int | None = None
    top_k: int | None = None
    num_experts: int | None = None
    dispatch_dtype: str = ""
    combine_dtype: str = ""
    metric: Metric
    value: float
    comparator: str = ""
    note: str = ""


COLUMNS = tuple(f.name for f in fields(Value))
"""Of published.csv, in order."""

NEEDED = ("system", "metric", "value")
"""Columns that every table has; one that is left out is stated nowhere in it."""

QUOTED_COLUMNS = ("about", "quantity", "value", "unit", "scope")
"""Of quoted.csv, in order; a value is text, as it stands in the source."""

COUNTS = ("ep_size", "tokens_per_rank", "hidden", "top_k", "num_experts")
_WORDS: Mapping[str, tuple[str, ...]] = {"phase": PHASES, "dispatch_dtype": FORMATS, "combine_dtype": FORMATS}


def tables(folder: Path) -> list[Path]:
    """The tables of a source: every CSV file of its folder but the numbers of its text."""
    return sorted(path for path in folder.glob("*.csv") if path.name != QUOTED_FILE)


def read_tables(folder: Path) -> list[tuple[str, Value]]:
    """Every measurement of a source, and where it stands.

    Raises:
        ConfigError: with every line that cannot be used, up to a dozen in each table.
    """
    found: dict[Value, str] = {}
    problems: list[str] = []
    for path in tables(folder):
        try:
            values = read_values(path)
        except ConfigError as error:
            problems += error.problems
            continue
        for value, line in values.items():
            if value in found:
                problems.append(f"{path} line {line}: stands in {found[value]} already; a measurement stands once")
            found.setdefault(value, f"{path.name}:{line}")
    if problems:
        raise ConfigError(problems[:_SHOWN])
    return [(place, value) for value, place in found.items()]


def read_values(path: Path) -> dict[Value, int]:
    """The measurements of a CSV file, each with its line; columns are `COLUMNS`, of which `NEEDED` must be there.

    Raises:
        ConfigError: with every line that cannot be used, up to a dozen.
    """
    values: dict[Value, int] = {}
    problems: list[str] = []
    for line, cells in lines(path, COLUMNS, NEEDED):
        value = _value({**dict.fromkeys(COLUMNS, ""), **cells}, f"{path} line {line}", problems)
        if value is not None and value in values:
            problems.append(f"{path} line {line}: the same as line {values[value]}; a measurement stands once")
        elif value is not None:
            values[value] = line
    if problems:
        rest = len(problems) - _SHOWN
        raise ConfigError(problems[:_SHOWN] + [f"and {rest} more of this kind"] * (rest > 0))
    if not values:
        raise ConfigError(f"{path} has no line besides its header; enter at least one measurement")
    return values


def recomputed_gbps(value: Value, convention: ByteConvention) -> float:
    """Bandwidth of a rank from `value`'s latency by its source's convention; NaN where that cannot be told."""
    formats = {"dispatch": value.dispatch_dtype, "combine": value.combine_dtype}
    row_format = formats.get(value.phase, "")
    needed = (value.tokens_per_rank, value.ep_size, value.top_k, value.hidden)
    if convention is not ByteConvention.BALANCED_PAIRS or row_format not in set(RowFormat) or None in needed:
        return math.nan
    if value.metric is not Metric.LATENCY:
        return math.nan
    tokens, ep_size, top_k, hidden = (int(number or 0) for number in needed)
    row = row_size(RowFormat(row_format), hidden)
    return tokens * min(ep_size, top_k) * (row.row_bytes + row.scale_bytes) / value.value / 1e3


def lines(path: Path, columns: Sequence[str], needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells of each line of a CSV file with these columns, of which some are needed.

    Raises:
        ConfigError: it is no such file.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    found: list[tuple[int, dict[str, str]]] = []
    problems: list[str] = []
    try:
        header = next(reader, [])
        missing = [name for name in needed if name not in header]
        extra = [name[:40] for name in header if name not in columns or header.count(name) > 1]
        if missing or extra:
            words = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra[:8])}"] * bool(extra)
            raise ConfigError(f"{path}: the header {' and '.join(words)}; allowed, once each: {','.join(columns)}")
        for cells in reader:
            if len(cells) == len(header):
                found.append((reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
            elif cells:
                problems.append(f"{path} line {reader.line_num} has {len(cells)} cells; the header has {len(header)}")
    except csv.Error as error:
        problems.append(f"{path} line {reader.line_num} cannot be read as CSV: {error}")
    if problems:
        raise ConfigError(problems[:_SHOWN])
    return found


def _value(cells: Mapping[str, str], where: str, problems: list[str]) -> Value | None:
    before = len(problems)
    typed: dict[str, Any] = dict(cells)
    for name in COUNTS:
        text = cells[name]
        typed[name] = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if text and not typed[name]:
            problems.append(f"{where}: {name} is {text[:40]!r}, but must be a positive whole number or empty")
    for name, words in _WORDS.items():
        if cells[name] and cells[name] not in words:
            problems.append(f"{where}: {name} is {cells[name][:40]!r}{suggest(cells[name], words)}")
    if any(map(control_characters, cells.values())):
        problems.append(f"{where}: a cell has control characters; a terminal would obey them")
    if not cells["system"]:
        problems.append(f"{where}: system is empty; name what was measured")
    if cells["metric"] in set(Metric):
        typed["metric"] = Metric(cells["metric"])
    else:
        problems.append(f"{where}: metric is {cells['metric'][:40]!r}{suggest(cells['metric'], list(Metric))}")
    typed["value"] = float(cells["value"]) if NUMBER.fullmatch(cells["value"]) else math.nan
    if not 0 < typed["value"] < math.inf:
        problems.append(f"{where}: value is {cells['value'][:40]!r}, but must be a positive number")
    return Value(**typed) if len(problems) == before else None
