"""Published measurements as rows of the same tidy frame as measured ones, in the domain `published`.

    from epcross.harness.claims import published
    rows = published.load()                       # columns of `frame.load`, and those of `ADDED`
    both = published.beside(frame.load(RUN))      # measured and published in one frame, never on one line

A source says less than a run: numbers it does not state are missing, words are `not reported`. `backend` is the name of
the system in the source, `run_id` and `source` the source, `machine` the hardware as named there. A latency stands in
`latency_us`, a bandwidth of the source's own convention in `stated_gbps`, a factor in `stated_speedup` (over
`comparator`). `recomputed_gbps` is what the source's latency gives by its own byte convention.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epcross.harness.claims.documents import read_text
from epcross.harness.claims.sources import ByteConvention, Source, read_source, reference_folders, source_folders
from epcross.harness.errors import ConfigError, InputError
from epcross.harness.planning.typed import suggest
from epcross.harness.terms import Domain, Flag, Phase, RowFormat, Status
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED_FILE = "published.csv"
QUOTED_FILE = "quoted.csv"

PHASES = (*(str(word) for word in Phase), "prepare", "link")
"""Ours, and `prepare` (a routing step of its own) and `link` (no exchange: a property of the hardware)."""

FORMATS = (*(str(word) for word in RowFormat), "low_precision")
"""Ours, and a reduced combine format whose width its source does not name."""

ADDED = ("source", "hardware", "metric", "stated_gbps", "stated_speedup", "recomputed_gbps", "comparator", "note")
"""Columns that measured rows have not."""

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

QUOTED_COLUMNS = ("about", "quantity", "value", "unit", "scope")
"""Of quoted.csv, in order; a value is text, as it stands in the source."""

_COUNTS = ("ep_size", "tokens_per_rank", "hidden", "top_k", "num_experts")
_WORDS: Mapping[str, tuple[str, ...]] = {"phase": PHASES, "dispatch_dtype": FORMATS, "combine_dtype": FORMATS}


def read_values(path: Path) -> list[Value]:
    """The measurements of a CSV file with the columns `COLUMNS`.

    Raises:
        ConfigError: with every line that cannot be used, up to a dozen.
    """
    values: list[Value] = []
    problems: list[str] = []
    seen: dict[Value, int] = {}
    for line, cells in _lines(path, COLUMNS):
        value = _value(cells, f"{path} line {line}", problems)
        if value is not None and value in seen:
            problems.append(f"{path} line {line}: the same as line {seen[value]}; a measurement stands once")
        elif value is not None:
            seen[value] = line
            values.append(value)
    if problems:
        rest = len(problems) - _SHOWN
        raise ConfigError(problems[:_SHOWN] + [f"and {rest} more of this kind"] * (rest > 0))
    if not values:
        raise ConfigError(f"{path} has no line besides its header; enter at least one measurement")
    return values


def load(folders: Sequence[Path] | None = None, *, sources: Sequence[str] | None = None) -> "pd.DataFrame":
    """Every published measurement as a tidy frame; `attrs["sources"]` has the `Source` of each name.

    Args:
        folders: folders with a folder for each source; None: the shipped one and `results/reference` here.
        sources: keep these only.

    Raises:
        ConfigError: a file is wrong; an unknown source.
    """
    places = source_folders(reference_folders() if folders is None else folders)
    if unknown := [name for name in sources or () if name not in places]:
        raise InputError(f"no source '{unknown[0]}'{suggest(unknown[0], places)}")
    found: dict[str, Source] = {}
    lines: list[dict[str, Any]] = []
    for name, folder in places.items():
        if sources is None or name in sources:
            found[name] = read_source(folder)
            if (folder / PUBLISHED_FILE).exists():
                values = read_values(folder / PUBLISHED_FILE)
                lines += [_row(value, found[name], number) for number, value in enumerate(values)]
    frame = _frame(lines)
    frame.attrs["sources"] = found
    return frame


def quoted(folders: Sequence[Path] | None = None) -> "pd.DataFrame":
    """Every number that the text of a source states: source, and `QUOTED_COLUMNS`, all text.

    Raises:
        ConfigError: a file is wrong.
    """
    import pandas as pd

    lines = []
    for name, folder in source_folders(reference_folders() if folders is None else folders).items():
        if (folder / QUOTED_FILE).exists():
            lines += [{"source": name, **cells} for _, cells in _lines(folder / QUOTED_FILE, QUOTED_COLUMNS)]
    return pd.DataFrame(lines, columns=["source", *QUOTED_COLUMNS], dtype="string")


def beside(measured: "pd.DataFrame", *published: "pd.DataFrame") -> "pd.DataFrame":
    """Measured rows and published ones (None given: all) in one frame; the column `domain` tells them apart.

    Closed lists stay ordered categories, extended by the words of the sources.
    """
    import pandas as pd

    frames = [measured, *(published or [load()])]
    for name in measured.columns:
        words = [own[name].cat.categories for own in frames if name in own and hasattr(own[name], "cat")]
        if words:
            kind = pd.CategoricalDtype(list(dict.fromkeys(word for own in words for word in own)), ordered=True)
            frames = [own.assign(**{name: own[name].astype(kind)}) if name in own else own for own in frames]
    return pd.concat(frames, ignore_index=True)


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


def _lines(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells of each line of a CSV file with exactly these columns.

    Raises:
        ConfigError: it is no such file.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    lines: list[tuple[int, dict[str, str]]] = []
    problems: list[str] = []
    try:
        header = next(reader, [])
        if sorted(header) != sorted(columns):
            missing = [name for name in columns if name not in header]
            extra = [name for name in header if name not in columns or header.count(name) > 1]
            words = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra)[:200]}"] * bool(extra)
            raise ConfigError(f"{path}: the header {' and '.join(words)}; it must be {','.join(columns)}")
        for cells in reader:
            if len(cells) == len(header):
                lines.append((reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
            elif cells:
                problems.append(f"{path} line {reader.line_num} has {len(cells)} cells; the header has {len(header)}")
    except csv.Error as error:
        problems.append(f"{path} line {reader.line_num} cannot be read as CSV: {error}")
    if problems:
        raise ConfigError(problems[:_SHOWN])
    return lines


def _value(cells: Mapping[str, str], where: str, problems: list[str]) -> Value | None:
    before = len(problems)
    typed: dict[str, Any] = dict(cells)
    for name in _COUNTS:
        text = cells[name]
        typed[name] = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if text and not typed[name]:
            problems.append(f"{where}: {name} is {text[:40]!r}, but must be a positive whole number or empty")
    for name, words in _WORDS.items():
        if cells[name] and cells[name] not in words:
            problems.append(f"{where}: {name} is {cells[name][:40]!r}{suggest(cells[name], words)}")
    if not cells["system"]:
        problems.append(f"{where}: system is empty; name what was measured")
    if cells["metric"] in set(Metric):
        typed["metric"] = Metric(cells["metric"])
    else:
        problems.append(f"{where}: metric is {cells['metric'][:40]!r}{suggest(cells['metric'], list(Metric))}")
    try:
        typed["value"] = float(cells["value"])
    except ValueError:
        typed["value"] = math.nan
    if not 0 < typed["value"] < math.inf:
        problems.append(f"{where}: value is {cells['value'][:40]!r}, but must be a positive number")
    return Value(**typed) if len(problems) == before else None


def _row(value: Value, source: Source, number: int) -> dict[str, Any]:
    return {
        "run_id": source.name,
        "point_id": f"{source.name}:{number}",
        "domain": str(Domain.PUBLISHED),
        "status": str(Status.OK),
        "backend": value.system,
        "phase": value.phase or None,
        "machine": value.hardware or None,
        **{name: getattr(value, name) for name in _COUNTS},
        "dispatch_format": value.dispatch_dtype or None,
        "combine_format": value.combine_dtype or None,
        "latency_us": value.value if value.metric is Metric.LATENCY else math.nan,
        "source": source.name,
        "hardware": value.hardware or None,
        "metric": str(value.metric),
        "stated_gbps": value.value if value.metric is Metric.BANDWIDTH else math.nan,
        "stated_speedup": value.value if value.metric is Metric.SPEEDUP else math.nan,
        "recomputed_gbps": recomputed_gbps(value, source.byte_convention),
        "comparator": value.comparator,
        "note": value.note,
    }


def _frame(lines: list[dict[str, Any]]) -> "pd.DataFrame":
    """The lines with every column that `frame.load` gives, typed as there; what no source states is missing."""
    import pandas as pd

    from epcross.harness.analysis.frame import NOT_REPORTED, VIEWS, gbps
    from epcross.harness.record import Record
    from epcross.harness.storing.parquet import ROWS_SCHEMA
    from epcross.harness.storing.rows import CLOSED_LISTS

    given = pd.DataFrame(lines, columns=list(dict.fromkeys(name for line in lines for name in line)))
    extended = {"phase": PHASES, "dispatch_format": FORMATS, "combine_format": FORMATS}
    columns: dict[str, pd.Series] = {}
    for field in fields(Record):
        name = field.name
        column = given[name] if name in given else pd.Series([None] * len(given), dtype="object")
        kind = str(ROWS_SCHEMA.field(name).type)
        if name in CLOSED_LISTS:
            words = [*extended.get(name, [str(word) for word in CLOSED_LISTS[name]]), NOT_REPORTED]
            column = column.fillna(NOT_REPORTED).astype(pd.CategoricalDtype(words, ordered=True))
        elif kind == "string":
            column = column.astype("string").fillna("" if name in ("flags", "git_sha", "started_at") else NOT_REPORTED)
        elif kind == "double":
            column = column.astype("float64")
        else:
            column = column.astype("boolean" if kind == "bool" else "Int64")
        columns[name] = column
    columns["reason"] = pd.Series(pd.NA, index=given.index, dtype="string")
    for name in ("repeat", "launch", "seed", "chain"):
        columns[name] = pd.Series(0, index=given.index, dtype="Int64")
    for name in ("token_spread", "capacity"):
        columns[name] = pd.Series(NOT_REPORTED, index=given.index, dtype="string")
    for flag in Flag:
        columns[f"is_{flag}"] = pd.Series(False, index=given.index, dtype=bool)
    for view in VIEWS:
        columns[view] = columns[gbps(view)] = pd.Series(math.nan, index=given.index, dtype="float64")
    for name in ADDED:
        column = given[name] if name in given else pd.Series([None] * len(given), dtype="object")
        numeric = name in ("stated_gbps", "stated_speedup", "recomputed_gbps")
        columns[name] = column.astype("float64") if numeric else column.astype("string").fillna(NOT_REPORTED)
    return pd.DataFrame(columns)
