"""Rows and samples as typed tables: derived from units at any time, kept as parquet beside them.

`rows.parquet` has the columns of `Record` in order. `samples.parquet` is long: one line per sample, with columns
run_id, point_id, phase, repeat, rank, iteration, value_us.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epcross.harness.errors import StoreError
from epcross.harness.record import COLUMNS, SCHEMA_VERSION, Record, UnitResult
from epcross.harness.storing.checksums import CHECKSUMS_FILE, as_file, sums_of
from epcross.harness.storing.older import table_as_now
from epcross.harness.storing.planned_rows import plan_problems
from epcross.harness.storing.regular_file import read_regular
from epcross.harness.storing.run_directory import RunDirectory, open_run
from epcross.harness.storing.sealed import write_whole
from epcross.harness.storing.table_files import ROWS_FILE, SAMPLES_FILE, TABLES, mend, read_table, write_tables
from epcross.harness.storing.table_rules import table_problems
from epcross.harness.storing.units import read_stored_units, read_units
from epcross.harness.storing.withdrawn import Withdrawal, flags_beside, withdrawn_beside

if TYPE_CHECKING:
    import pandas as pd

NAMED = 3
"""Damaged units that one warning names; the others are counted."""

_PLACE = ("run_id", "backend", "regime")
_APART = "\0"
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


def write_checksums(folder: Path) -> Path:
    """Put the checksums of the tables in `folder` beside them, as they stand there; the path of the file.

    Raises:
        StoreError: a table is not there or damaged, holds what no run leaves, or the file cannot be written.
    """
    read_stored_rows(folder)
    read_samples_table(folder)
    path = folder / CHECKSUMS_FILE
    try:
        write_whole(path, as_file(sums_of({name: read_regular(folder / name) for name in TABLES})))
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}. Make {folder} writable") from error
    return path


def read_rows_table(path: Path) -> pa.Table:
    """The rows at `path`: a run directory (its units), a folder of tables or a parquet file. Those that a file beside
    them withdraws carry the flag `known_issue`.

    Raises:
        StoreError: there are no rows, they are damaged or of a newer schema; or what withdraws some cannot be used.
    """
    if _has_units(path):
        return rows_table(record for result in _whole_units(open_run(path)) for record in result.records)
    rows, file = read_stored_rows(path), _file_of(path, ROWS_FILE)
    kinds = pc.binary_join_element_wise(*(rows[name] for name in (*_PLACE, "flags")), _APART)
    kinds = kinds.combine_chunks().dictionary_encode()  # a table has thousands of rows and dozens of these
    each = [tuple(kind.split(_APART)) for kind in kinds.dictionary.to_pylist()]
    told = flags_beside(file, [kind[:3] for kind in each], [kind[3] for kind in each], whole=file.name == ROWS_FILE)
    number = rows.schema.get_field_index("flags")
    field = rows.schema.field(number)
    return rows.set_column(number, field, pa.array(told, field.type).take(kinds.indices))


def read_withdrawn_of(path: Path) -> tuple[Withdrawal, ...]:
    """What the files beside the rows that `read_rows_table` gives for `path` withdraw.

    Raises:
        StoreError: such a file cannot be used.
    """
    return withdrawn_beside(path / "units" if _has_units(path) else _file_of(path, ROWS_FILE))


def read_stored_rows(path: Path) -> pa.Table:
    """The rows of a folder of tables or a parquet file as they stand there, withdrawn or not.

    Raises:
        NothingThere: there is no such file.
        StoreError: it holds no rows, was changed, is damaged or of a newer schema.
    """
    file = _file_of(path, ROWS_FILE)
    return read_table(file, lambda table: _rows_of(table, file))


def read_samples_table(path: Path) -> pa.Table:
    """The samples at `path`: a run directory (its units), a folder of tables or a parquet file.

    Raises:
        NothingThere: there is no such file.
        StoreError: it holds no samples, was changed or is damaged.
    """
    if _has_units(path):
        run = open_run(path)
        return samples_table(run.run_id, _whole_units(run))
    file = _file_of(path, SAMPLES_FILE)
    return read_table(file, lambda table: _with_schema(table, SAMPLES_SCHEMA, file))


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


def _rows_of(table: pa.Table, file: Path) -> pa.Table:
    """What a file of rows holds, in `ROWS_SCHEMA`; rows of an older schema have nulls in the columns they lack.

    Raises:
        StoreError: it holds no rows, rows of a newer schema, or rows that no run leaves.
    """
    if "schema_version" not in table.column_names or not pa.types.is_integer(table["schema_version"].type):
        raise StoreError(
            f"{file} holds no rows: it has no column schema_version of integers. Give a run directory or {ROWS_FILE}"
        )
    versions = pc.min_max(table["schema_version"]).as_py()
    oldest, newest = (SCHEMA_VERSION if one is None else one for one in (versions["min"], versions["max"]))
    if newest > SCHEMA_VERSION:
        raise StoreError(
            f"{file} has rows of schema version {newest}; this epcross reads up to {SCHEMA_VERSION}. "
            "Install a newer epcross to read it"
        )
    for column in fields(Record):
        if column.metadata["since"] > oldest and column.name not in table.column_names:
            table = table.append_column(column.name, pa.nulls(len(table), ROWS_SCHEMA.field(column.name).type))
    table = _with_schema(table, ROWS_SCHEMA, file)
    table = table_as_now(table)
    if problems := table_problems(table) or plan_problems(table, file):
        raise StoreError(f"{file} was changed: {'; '.join(problems)}. {mend(file)}")
    return table


def _with_schema(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    if set(table.column_names) != set(schema.names):
        wrong = sorted(set(table.column_names) ^ set(schema.names))
        raise StoreError(f"{path} has other columns than this epcross: {', '.join(wrong)} in one of the two only")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise StoreError(f"{path} has columns of other types than this epcross: {error}") from error
