"""Rows and samples as typed tables: derived from units at any time, kept as parquet beside them.

`rows.parquet` has the columns of `Record` in order. `samples.parquet` is long: one line per sample, with columns
run_id, point_id, phase, repeat, rank, iteration, value_us.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from epcross.harness.errors import StoreError
from epcross.harness.record import COLUMNS, SCHEMA_VERSION, Record, UnitResult
from epcross.harness.storing.regular_file import open_regular
from epcross.harness.storing.rows import CLOSED_LISTS
from epcross.harness.storing.run_directory import RunDirectory, open_run
from epcross.harness.storing.sealed import write_whole
from epcross.harness.storing.units import read_stored_units, read_units
from epcross.harness.storing.withdrawn import Withdrawal, flags_beside, withdrawn_beside
from epcross.harness.terms import Status

if TYPE_CHECKING:
    import pandas as pd

ROWS_FILE = "rows.parquet"
SAMPLES_FILE = "samples.parquet"
NAMED = 3
"""Damaged units that one warning names; the others are counted."""

_ARROW_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def _arrow_field(name: str, annotation: object) -> pa.Field:
    kinds = get_args(annotation) or (annotation,)
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    return pa.field(name, _ARROW_TYPES[kind], nullable=NoneType in kinds)


ROWS_SCHEMA = pa.schema([_arrow_field(f.name, f.type) for f in fields(Record)])
_WORD = pa.dictionary(pa.int32(), pa.string())  # few distinct words, millions of lines
SAMPLES_SCHEMA = pa.schema(
    [
        ("run_id", _WORD),
        ("point_id", _WORD),
        ("phase", _WORD),
        ("repeat", pa.int32()),
        ("rank", pa.int32()),
        ("iteration", pa.int32()),
        ("value_us", pa.float64()),
    ]
)


def rows_table(records: Iterable[Record]) -> pa.Table:
    """The records as a table of `ROWS_SCHEMA`."""
    rows = list(records)
    return pa.table({name: [getattr(row, name) for row in rows] for name in COLUMNS}, schema=ROWS_SCHEMA)


def samples_table(run_id: str, results: Iterable[UnitResult]) -> pa.Table:
    """The samples of `results` as a table of `SAMPLES_SCHEMA`; a sample that was not finite is NaN."""
    series = [
        (result.point_id, samples.phase, samples.repeat, rank, np.asarray(values, dtype=np.float64))
        for result in results
        for samples in result.samples
        for rank, values in enumerate(samples.values_us)
    ]
    lengths = np.array([len(values) for *_, values in series], dtype=np.int64)
    none = np.empty(0)
    columns = {
        "run_id": _words([run_id] * len(series), lengths),
        "point_id": _words([point_id for point_id, *_ in series], lengths),
        "phase": _words([phase for _, phase, *_ in series], lengths),
        "repeat": np.repeat(np.array([repeat for _, _, repeat, *_ in series], dtype=np.int32), lengths),
        "rank": np.repeat(np.array([rank for *_, rank, _ in series], dtype=np.int32), lengths),
        "iteration": np.concatenate([none, *(np.arange(length) for length in lengths)]).astype(np.int32),
        "value_us": np.concatenate([none, *(values for *_, values in series)]),
    }
    return pa.table(columns, schema=SAMPLES_SCHEMA)


def compact(run: RunDirectory) -> tuple[Path, Path]:
    """Write rows.parquet and samples.parquet from the units of `run`; both paths.

    Raises:
        StoreError: they cannot be written. The units stay what they are.
    """
    results, _ = read_stored_units(run)  # what is withdrawn is said beside them
    rows = rows_table(record for result in results for record in result.records)
    write_tables(run.path, rows, samples_table(run.run_id, results))
    return run.path / ROWS_FILE, run.path / SAMPLES_FILE


def write_tables(folder: Path, rows: pa.Table, samples: pa.Table) -> None:
    """Put both tables in `folder`. Samples first: rows say what a folder holds, so they come when all is there.

    Raises:
        StoreError: they cannot be written; each file is the old one or the new one, whole.
    """
    try:
        for name, table in ((SAMPLES_FILE, samples), (ROWS_FILE, rows)):
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink, compression="zstd")
            write_whole(folder / name, sink.getvalue().to_pybytes())
    except OSError as error:
        raise StoreError(
            f"cannot write tables to {folder}: {error.strerror}. What they are made from is untouched; "
            "free space or make the folder writable, and try again"
        ) from error


def read_rows_table(path: Path) -> pa.Table:
    """The rows at `path`: a run directory (its units), a folder of tables or a parquet file. Those that a file beside
    them withdraws carry the flag `known_issue`.

    Raises:
        StoreError: there are no rows, they are damaged or of a newer schema; or what withdraws some cannot be used.
    """
    if _has_units(path):
        return rows_table(record for result in _whole_units(open_run(path)) for record in result.records)
    rows, file = read_stored_rows(path), _file_of(path, ROWS_FILE)
    places = list(zip(*(rows[name].to_pylist() for name in ("run_id", "backend", "regime")), strict=True))
    flags = flags_beside(file, places, rows["flags"].to_pylist(), whole=file.name == ROWS_FILE)
    number = rows.schema.get_field_index("flags")
    field = rows.schema.field(number)
    return rows.set_column(number, field, pa.array(flags, field.type))


def read_withdrawn_of(path: Path) -> tuple[Withdrawal, ...]:
    """What the files beside the rows that `read_rows_table` gives for `path` withdraw.

    Raises:
        StoreError: such a file cannot be used.
    """
    return withdrawn_beside(path / "units" if _has_units(path) else _file_of(path, ROWS_FILE))


def read_stored_rows(path: Path) -> pa.Table:
    """The rows of a folder of tables or a parquet file as they stand there, withdrawn or not.

    Raises:
        StoreError: there are no rows, they are damaged or of a newer schema.
    """
    table = _read_parquet(_file_of(path, ROWS_FILE))
    if "schema_version" not in table.column_names:
        raise StoreError(f"{path} holds no rows: it has no column schema_version. Give a run directory or {ROWS_FILE}")
    versions = table["schema_version"].to_pylist()
    newest = max(versions, default=SCHEMA_VERSION)
    if newest > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has rows of schema version {newest}; this epcross reads up to {SCHEMA_VERSION}. "
            "Install a newer epcross to read it"
        )
    oldest = min(versions, default=SCHEMA_VERSION)
    for column in fields(Record):
        if column.metadata["since"] > oldest and column.name not in table.column_names:
            table = table.append_column(column.name, pa.nulls(len(table), ROWS_SCHEMA.field(column.name).type))
    table = _with_schema(table, ROWS_SCHEMA, path)
    _require_right(table, path)
    return table


def read_samples_table(path: Path) -> pa.Table:
    """The samples at `path`: a run directory (its units), a folder of tables or a parquet file.

    Raises:
        StoreError: there are no samples or they are damaged.
    """
    if _has_units(path):
        run = open_run(path)
        return samples_table(run.run_id, _whole_units(run))
    return _with_schema(_read_parquet(_file_of(path, SAMPLES_FILE)), SAMPLES_SCHEMA, path)


def load_rows(paths: Path | Sequence[Path]) -> "pd.DataFrame":
    """All rows at `paths`, one line per `Record`, in typed columns that keep a missing value apart from a number."""
    import pandas as pd

    nullable = {pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype(), pa.bool_(): pd.BooleanDtype()}
    tables = [ROWS_SCHEMA.empty_table(), *(read_rows_table(path) for path in _as_list(paths))]
    return pa.concat_tables(tables).to_pandas(types_mapper=nullable.get)


def load_samples(paths: Path | Sequence[Path]) -> "pd.DataFrame":
    """All samples at `paths` in long form; run_id, point_id and phase are categories."""
    tables = [SAMPLES_SCHEMA.empty_table(), *(read_samples_table(path) for path in _as_list(paths))]
    return pa.concat_tables(tables).unify_dictionaries().to_pandas()


def _file_of(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _as_list(paths: Path | Sequence[Path]) -> Sequence[Path]:
    return [paths] if isinstance(paths, Path) else paths


def _has_units(path: Path) -> bool:
    """Whether `path` is a run directory as it was measured; one that was deposited has tables and no units."""
    return (path / "run.json").exists() and ((path / "units").is_dir() or not (path / ROWS_FILE).exists())


def _whole_units(run: RunDirectory) -> list[UnitResult]:
    """The units of `run`; a warning names those that are left out."""
    results, problems = read_units(run)
    if problems:
        names = "; ".join(str(problem) for problem in problems[:NAMED])
        if more := problems[NAMED:]:
            names += f"; and {len(more)} more"
        warnings.warn(f"{run.path}: {len(problems)} damaged units are left out: {names}", stacklevel=4)
    return results


def _words(words: list[str], lengths: np.ndarray) -> pa.DictionaryArray:
    distinct = sorted(set(words))
    number = {word: index for index, word in enumerate(distinct)}
    indices = np.repeat(np.array([number[word] for word in words], dtype=np.int32), lengths)
    return pa.DictionaryArray.from_arrays(indices, pa.array(distinct, pa.string()))


def _read_parquet(path: Path) -> pa.Table:
    try:
        os.close(open_regular(path, os.O_RDONLY))
    except FileNotFoundError:
        raise StoreError(
            f"{path} does not exist. Give a run directory, or a folder or file that `merge` made"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}. Give a run directory, or a folder or file that `merge` made"
        ) from error
    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"{path} is damaged or no parquet file ({error}). Make it again from the run directory's units"
        ) from error


def _with_schema(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    if set(table.column_names) != set(schema.names):
        wrong = sorted(set(table.column_names) ^ set(schema.names))
        raise StoreError(f"{path} has other columns than this epcross: {', '.join(wrong)} in one of the two only")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise StoreError(f"{path} has columns of other types than this epcross: {error}") from error


def _require_right(table: pa.Table, path: Path) -> None:
    """Refuse rows that no run leaves: a parquet file has no seal, and a wrong number in it would be a wrong result.

    Raises:
        StoreError: an ok row without a latency above 0, or a word outside a closed list.
    """
    problems = []
    ok, latency_us = pc.equal(table["status"], Status.OK), table["latency_us"]
    timed = pc.fill_null(pc.and_(pc.is_finite(latency_us), pc.greater(latency_us, 0)), False)
    if wrong := pc.sum(pc.and_(ok, pc.invert(timed))).as_py():
        problems.append(f"{wrong} rows are ok without a latency above 0")
    for name, words in CLOSED_LISTS.items():
        unknown = sorted(set(pc.unique(table[name]).to_pylist()) - {*words, None})
        problems += [f"{name} is {unknown[0]!r}, where only {', '.join(words)} are allowed"] if unknown else []
    if problems:
        raise StoreError(f"{path} was changed: {'; '.join(problems)}. Make it again from the run directory's units")
