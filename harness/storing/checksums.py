"""Checksums of tables: a parquet file has none of its own against edits, so a sealed file beside it has.

    {"sha256": ..., "content": {"rows.parquet": ["<SHA-256 of the file, in hex>"], "samples.parquet": ["..."]}}

Whoever writes tables writes it; where it lies beside a table that is read, the table must be what it says. A list holds
two sums only while new tables take the place of old ones, and after that was broken off: then either is whole. Where a
table is a link, the file counts beside the link and beside what the link leads to.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from epcross.harness.errors import StoreError
from epcross.harness.storing.regular_file import read_regular, seats
from epcross.harness.storing.sealed import DamagedFile, read_sealed, seal

CHECKSUMS_FILE = "checksums.json"

Sums = dict[str, list[str]]
"""Name of a file -> SHA-256, in hex, of every content that it may have."""

_SUM = re.compile(r"[0-9a-f]{64}")


def sums_of(files: Mapping[str, bytes]) -> Sums:
    """What is to be said of these files, by name."""
    return {name: [hashlib.sha256(data).hexdigest()] for name, data in files.items()}


def either(one: Sums, other: Sums) -> Sums:
    """What is to be said while files that are as `one` says become as `other` says."""
    return {name: [*dict.fromkeys((*one.get(name, ()), *other.get(name, ())))] for name in {**one, **other}}


def as_file(sums: Sums) -> bytes:
    """What `read_sums` reads these from."""
    return seal({name: sums[name] for name in sorted(sums)}, indent=1)


def read_sums(folder: Path) -> Sums | None:
    """What the file in `folder` says; None where there is none.

    Raises:
        StoreError: it cannot be read, was changed, or says something else.
    """
    path = folder / CHECKSUMS_FILE
    try:
        sums = read_sealed(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise StoreError(
                f"{path} is a link to nothing, so the tables beside it cannot be checked; mend it"
            ) from error
        return None
    except DamagedFile as error:
        raise StoreError(f"{error}. {_MEND}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. {_MEND}") from error
    if not isinstance(sums, dict) or not all(map(_is_list_of_sums, sums.values())):
        raise StoreError(f"{path} holds no SHA-256 sums by the names of files. {_MEND}")
    return sums


def sums_there(folder: Path, names: tuple[str, ...]) -> Sums:
    """What counts in `folder` now: what its file says or, where it has none, the sums of the files as they are.

    Raises:
        OSError: such a file cannot be read.
    """
    try:
        told = read_sums(folder)
    except StoreError:
        return {}  # it is about to be written anew, with its tables
    if told is not None:
        return told
    return sums_of({name: read_regular(folder / name) for name in names if (folder / name).is_file()})


class Watch:
    """What is said of the file at `path` before its bytes are read, and after, lest a writer between be taken for an
    edit.

    Raises:
        StoreError: as `read_sums`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = self._told()

    def problem(self, data: bytes) -> str:
        """How `data`, read since, is not what is said of it; empty if it is, or if nothing is said.

        Raises:
            StoreError: as `read_sums`.
        """
        if not self._before:
            return ""
        found = hashlib.sha256(data).hexdigest()
        for folder, sums in self._before.items():
            if found not in sums and found not in self._told().get(folder, sums):
                return (
                    f"its SHA-256 is {found[:16]}..., where {folder / CHECKSUMS_FILE} allows "
                    f"{' or '.join(f'{one[:16]}...' for one in sums)}"
                )
        return ""

    def _told(self) -> dict[Path, list[str]]:
        told = {}
        for seat in seats(self.path):
            if sums := (read_sums(seat.parent) or {}).get(seat.name):
                told[seat.parent] = sums
        return told


def _is_list_of_sums(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(one, str) and _SUM.fullmatch(one) for one in value)
    )


_MEND = "Restore it and the tables beside it from a copy or from version control"
