"""Results of several runs in one folder. Doing it twice changes nothing; two rows for one key are never chosen between.

A merged folder holds rows.parquet, samples.parquet and, for each run, its documents under runs/<run_id>/.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from epcross.harness.errors import StoreError
from epcross.harness.record import COLUMNS
from epcross.harness.storing.parquet import (
    ROWS_FILE,
    ROWS_SCHEMA,
    SAMPLES_SCHEMA,
    read_rows_table,
    read_samples_table,
    read_stored_rows,
    write_tables,
)
from epcross.harness.storing.regular_file import read_regular
from epcross.harness.storing.sealed import write_whole
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE, with_known_issue

KEY = ("point_id", "phase", "repeat", "backend_version", "measure_hash", "machine")
"""What makes two rows answers to one question: the same thing measured by the same code on the same kind of machine."""

NAMED = 5
"""Clashing keys that an error names; the others are counted."""

_DOCUMENTS = ("run.json", "plan.json", "environment.json", "floor.json")
_PLAIN = {"run_id": pa.string(), "point_id": pa.string(), "phase": pa.string(), "repeat": pa.int64()}
_SAMPLE_KEY = tuple(_PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSummary:
    """What a merge did."""

    added: int  # rows
    present: int  # rows of the sources that were there already


def merge(target: Path, sources: Sequence[Path]) -> MergeSummary:
    """Add the rows and samples of `sources` (run directories or merged folders) to the folder `target`.

    Nothing is written unless every row fits. A run directory holds what its own run measured, so it can be a target
    only where nothing is to be added.

    Raises:
        StoreError: a key has two different rows (the first are named), a source cannot be read, or the target
            cannot be written; the target then holds the rows it held before.
    """
    existing = _has_rows(target)
    rows = read_rows_table(target) if existing else ROWS_SCHEMA.empty_table()
    added, present = _new_rows(target, rows, sources)
    summary = MergeSummary(added=sum(table.num_rows for table in added), present=present)
    if not summary.added:
        return summary
    if (target / "run.json").exists():
        raise StoreError(
            f"{target} is a run directory and holds only what its run measured; {summary.added} rows are not its own. "
            "Merge into a new folder and name this run among the sources"
        )
    samples = [_samples_of(read_samples_table(target), rows)] if existing else [SAMPLES_SCHEMA.empty_table()]
    samples += [
        _samples_of(read_samples_table(source), new) for source, new in zip(sources, added, strict=True) if new.num_rows
    ]
    stored = read_stored_rows(target) if existing else rows  # what is withdrawn there is said beside them, once
    _write(target, pa.concat_tables([stored, *added]), pa.concat_tables(samples).unify_dictionaries(), sources)
    return summary


def _new_rows(target: Path, rows: pa.Table, sources: Sequence[Path]) -> tuple[list[pa.Table], int]:
    """The rows that each source adds, and how many are there already; refuses clashes."""
    known = {_key(row): row for row in rows.to_pylist()}
    clashes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    added: list[pa.Table] = []
    present = 0
    for source in sources:
        table = read_rows_table(source)
        new = []
        for index, row in enumerate(table.to_pylist()):
            old = known.setdefault(_key(row), row)
            if old is row:
                new.append(index)
            elif old in (row, _withdrawn(row)):
                present += 1
            else:
                clashes.append((old, row))
        added.append(table.take(pa.array(new, pa.int64())))
    if clashes:
        raise StoreError(
            f"cannot merge into {target}: {len(clashes)} keys have two different rows. Nothing was merged; "
            + _told(clashes)
        )
    return added, present


def _told(clashes: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """What to do about pairs of rows that clash, and the first of them."""
    since = sum(row == _withdrawn(old) for old, row in clashes)
    words = (
        f"{since} of them differ only in that a {WITHDRAWN_FILE} withdraws one and not the other: put the same file "
        "beside both, or name the withdrawn one first\n"
        if since
        else ""
    )
    if since < len(clashes):
        words += "put the runs that clash into folders of their own:\n"
    lines = [f"  - {_clash(old, row)}\n" for old, row in clashes[:NAMED]]
    more = f"  - and {len(clashes) - NAMED} more" if len(clashes) > NAMED else ""
    return f"{words}{''.join(lines)}{more}".rstrip()


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def _withdrawn(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as it reads where it was withdrawn since; it stays so when its run is merged again."""
    return {**row, "flags": with_known_issue(row["flags"])}


def _clash(old: dict[str, Any], new: dict[str, Any]) -> str:
    key = ", ".join(f"{name} {old[name]}" for name in KEY)
    differing = ", ".join(name for name in COLUMNS if old[name] != new[name])
    return f"{key}: run {old['run_id']} and run {new['run_id']} differ in {differing}"


def _samples_of(samples: pa.Table, rows: pa.Table) -> pa.Table:
    """The samples that belong to `rows`, in their order; a merge that was killed may have left others."""
    keys = {name: rows[name].cast(_PLAIN[name]) for name in _SAMPLE_KEY}
    lines = {name: samples[name].cast(_PLAIN[name]) for name in _SAMPLE_KEY}
    numbered = pa.table({**lines, "line": pa.array(range(samples.num_rows), pa.int64())})
    belonging = numbered.join(pa.table(keys), keys=list(_SAMPLE_KEY), join_type="left semi")
    return samples.take(belonging["line"].sort())


def _has_rows(folder: Path) -> bool:
    return (folder / "run.json").exists() or (folder / ROWS_FILE).exists()


def _write(target: Path, rows: pa.Table, samples: pa.Table, sources: Sequence[Path]) -> None:
    made: list[Path] = []  # folders to remove again if it fails
    try:
        for folder in (*_missing_parents(target), target / "runs"):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        for documents in _document_folders(sources):
            copy = target / "runs" / documents.name
            if not copy.exists():
                copy.mkdir()
                made.append(copy)
                for name in _DOCUMENTS:
                    if (documents / name).exists():
                        write_whole(copy / name, read_regular(documents / name))
        write_tables(target, rows, samples)
    except BaseException as error:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise StoreError(
                f"cannot merge into {target}: {error.strerror}; nothing was merged. Free space there or make it "
                "writable, and try again"
            ) from error
        raise


def _missing_parents(target: Path) -> list[Path]:
    """`target` and those of its parents that do not exist, outermost first."""
    return [folder for folder in (*reversed(target.parents), target) if not folder.exists()]


def _document_folders(sources: Sequence[Path]) -> list[Path]:
    """The folders that hold the documents of the sources' runs, each named by its run id."""
    folders: list[Path] = []
    for source in sources:
        if (source / "run.json").exists():
            folders.append(source.resolve())
        elif source.is_dir():
            folders += sorted(path for path in (source / "runs").glob("*") if path.is_dir())
    return folders
