"""Published measurements as rows of the same tidy frame as measured ones, in the domain `published`.

    from epcross.harness.claims import published
    rows = published.load()                       # columns of `frame.load`, and those of `ADDED`
    both = published.beside(frame.load(RUN))      # measured and published in one frame, never on one line

A source says less than a run: numbers it does not state are missing (group with `dropna=False`), words are `not
reported`. `backend` is the name of
the system in the source, `run_id` and `source` the source, `machine` the hardware as named there. A latency stands in
`latency_us`, a bandwidth of the source's own convention in `stated_gbps`, a factor in `stated_speedup` (over
`comparator`). `recomputed_gbps` is what the source's latency gives by its own byte convention.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epcross.harness.claims.sources import Source, Sources, read_source, reference_folders, source_folders
from epcross.harness.claims.values import (
    COUNTS,
    FORMATS,
    PHASES,
    QUOTED_COLUMNS,
    QUOTED_FILE,
    Metric,
    Value,
    lines,
    read_tables,
    recomputed_gbps,
)
from epcross.harness.errors import InputError
from epcross.harness.planning.typed import suggest
from epcross.harness.terms import Domain, Flag, Status

if TYPE_CHECKING:
    import pandas as pd

ADDED = ("source", "hardware", "metric", "stated_gbps", "stated_speedup", "recomputed_gbps", "comparator", "note")
"""Columns that measured rows have not."""


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
    rows: list[dict[str, Any]] = []
    found = Sources()
    for name, folder in places.items():
        if sources is None or name in sources:
            found[name] = read_source(folder)
            rows += [_row(value, found[name], place) for place, value in read_tables(folder)]
    frame = _frame(rows)
    frame.attrs["sources"] = found
    return frame


def quoted(folders: Sequence[Path] | None = None) -> "pd.DataFrame":
    """Every number that the text of a source states: source, and `QUOTED_COLUMNS`, all text.

    Raises:
        ConfigError: a file is wrong.
    """
    import pandas as pd

    found = []
    for name, folder in source_folders(reference_folders() if folders is None else folders).items():
        if (folder / QUOTED_FILE).exists():
            found += [
                {"source": name, **cells} for _, cells in lines(folder / QUOTED_FILE, QUOTED_COLUMNS, QUOTED_COLUMNS)
            ]
    return pd.DataFrame(found, columns=["source", *QUOTED_COLUMNS], dtype="string")


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


def _row(value: Value, source: Source, place: str) -> dict[str, Any]:
    return {
        "run_id": source.name,
        "point_id": f"{source.name}:{place}",
        "domain": str(Domain.PUBLISHED),
        "status": str(Status.OK),
        "backend": value.system,
        "phase": value.phase or None,
        "machine": value.hardware or None,
        **{name: getattr(value, name) for name in COUNTS},
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


def _frame(rows: list[dict[str, Any]]) -> "pd.DataFrame":
    """The rows with every column that `frame.load` gives, typed as there; what no source states is missing."""
    import pandas as pd

    from epcross.harness.analysis.frame import INPUTS, NOT_REPORTED, VIEWS, gbps
    from epcross.harness.record import Record
    from epcross.harness.storing.parquet import ROWS_SCHEMA
    from epcross.harness.storing.rows import CLOSED_LISTS

    given = pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
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
    for name in ("reason", "nvlink_note"):
        columns[name] = pd.Series(pd.NA, index=given.index, dtype="string")
    for name in ("repeat", "launch", "seed", "chain"):
        columns[name] = pd.Series(0, index=given.index, dtype="Int64")
    for name in ("token_spread", "capacity", *INPUTS):
        columns[name] = pd.Series(NOT_REPORTED, index=given.index, dtype="string")
    for flag in Flag:
        columns[f"is_{flag}"] = pd.Series(False, index=given.index, dtype=bool)
    for view in VIEWS:
        columns[view] = columns[gbps(view)] = pd.Series(math.nan, index=given.index, dtype="float64")
    columns["nvlink_ratio"] = pd.Series(math.nan, index=given.index, dtype="float64")
    for name in ADDED:
        column = given[name] if name in given else pd.Series([None] * len(given), dtype="object")
        numeric = name in ("stated_gbps", "stated_speedup", "recomputed_gbps")
        columns[name] = column.astype("float64") if numeric else column.astype("string").fillna(NOT_REPORTED)
    return pd.DataFrame(columns)
