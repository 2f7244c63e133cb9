"""The files of tables: written with their checksums beside them, read whole and as they were written."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from epcross.harness.errors import NothingThere, StoreError
from epcross.harness.storing.checksums import CHECKSUMS_FILE, Watch, as_file, either, sums_of, sums_there
from epcross.harness.storing.regular_file import read_regular, seats
from epcross.harness.storing.sealed import write_whole
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE

ROWS_FILE = "rows.parquet"
SAMPLES_FILE = "samples.parquet"
TABLES = (SAMPLES_FILE, ROWS_FILE)


def write_tables(folder: Path, rows: pa.Table, samples: pa.Table) -> None:
    """Put both tables in `folder`, with their checksums. Samples first: rows say what a folder holds, so they come when
    all is there.

    Raises:
        StoreError: they cannot be written; each file is the old one or the new one, whole.
    """
    files = {SAMPLES_FILE: as_parquet(samples), ROWS_FILE: as_parquet(rows)}
    old, new = {}, sums_of(files)
    try:
        old = sums_there(folder, TABLES)
        write_whole(folder / CHECKSUMS_FILE, as_file(either(old, new)))  # until both tables are there, either is right
        for name, data in files.items():
            write_whole(folder / name, data)
    except OSError as error:
        if not old:  # there were no tables
            with contextlib.suppress(OSError):
                (folder / CHECKSUMS_FILE).unlink()
        raise StoreError(
            f"cannot write tables to {folder}: {error.strerror}. What they are made from is untouched; "
            "free space or make the folder writable, and try again"
        ) from error
    if old:
        with contextlib.suppress(OSError):  # all that was asked for is there, and what says so allows it
            write_whole(folder / CHECKSUMS_FILE, as_file(new))


def as_parquet(table: pa.Table) -> bytes:
    """The bytes of a parquet file with `table`; the same table gives the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_table(path: Path, understood: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """The table in the file at `path`, as `understood` gives it back, which refuses what it is not: its words name the
    value that is wrong, where a checksum that does not hold tells nothing.

    Raises:
        NothingThere: there is no such file.
        StoreError: it is damaged, refused, or not as the checksums beside it say.
    """
    watch = Watch(path)
    data = _read(path)
    table = understood(_parsed(data, path))
    if problem := watch.problem(data):
        raise StoreError(
            f"{path} was changed since it was written: {problem}. {mend(path)}. Numbers that turned out to be wrong "
            f"are withdrawn by a {WITHDRAWN_FILE}, never edited (results/README.md)"
        )
    return table


def mend(path: Path) -> str:
    """What to do about a table that is not as it was written."""
    if any((seat.parent / "units").is_dir() for seat in seats(path)):
        return "Make it again from the run directory's units"
    return "Restore it from a copy or from version control, or merge its runs again into a new folder"


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise NothingThere(
            f"{path} does not exist. Give a run directory, or a folder or file that `merge` made"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}. Give a run directory, or a folder or file that `merge` made"
        ) from error


def _parsed(data: bytes, path: Path) -> pa.Table:
    try:
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} is damaged or no parquet file ({error}). {mend(path)}") from error
