"""Numbers of a committed run that turned out to be wrong: a list beside its rows, with the reason.

    [{"backend": "ag_rs", "regime": "entry", "reason": "long graphs inflate it by tens of microseconds"}]

The rows stay what they were measured as. Where they are read, those that an entry names carry the flag `known_issue`,
and no headline rests on them.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from epcross.harness.errors import StoreError
from epcross.harness.storing.regular_file import read_regular
from epcross.harness.terms import Flag

WITHDRAWN_FILE = "withdrawn.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """All rows of one backend in one regime, of a folder of tables, and why no number may rest on them."""

    backend: str
    regime: str
    reason: str


def read_withdrawn(folder: Path) -> tuple[Withdrawal, ...]:
    """What is withdrawn of the rows in `folder`; nothing where no such file is.

    Raises:
        StoreError: the file cannot be read, or is no list of objects with these three texts.
    """
    path = folder / WITHDRAWN_FILE
    try:
        entries = json.loads(read_regular(path))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; make it a readable file") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no JSON ({error}); {_FORM}") from error
    if not isinstance(entries, list):
        raise StoreError(f"{path} holds {type(entries).__name__} in place of a list; {_FORM}")
    return tuple(_withdrawal(entry, f"{path}, entry {number}") for number, entry in enumerate(entries))


def with_flags(rows: pa.Table, folder: Path) -> pa.Table:
    """`rows`, which lie in `folder`, with the flag `known_issue` on each that is withdrawn there.

    Raises:
        StoreError: as `read_withdrawn`, or an entry names what no row has.
    """
    withdrawn = read_withdrawn(folder)
    if not withdrawn:
        return rows
    places = list(zip(rows["backend"].to_pylist(), rows["regime"].to_pylist(), strict=True))
    for entry in withdrawn:
        if (entry.backend, entry.regime) not in places:
            there = ", ".join(sorted({f"{backend} {regime}" for backend, regime in places})) or "nothing"
            raise StoreError(
                f"{folder / WITHDRAWN_FILE} withdraws rows of {entry.backend} {entry.regime}, and no row is of these; "
                f"there are {there}"
            )
    gone = {(entry.backend, entry.regime) for entry in withdrawn}
    flags = [
        " ".join(sorted({*own.split(), Flag.KNOWN_ISSUE})) if place in gone else own
        for own, place in zip(rows["flags"].to_pylist(), places, strict=True)
    ]
    number = rows.schema.get_field_index("flags")
    return rows.set_column(number, rows.schema.field(number), pa.array(flags, rows.schema.field(number).type))


_NAMES = tuple(field.name for field in fields(Withdrawal))
_FORM = f"write a list of objects with {', '.join(_NAMES)}, each a text"


def _withdrawal(entry: Any, where: str) -> Withdrawal:
    if not isinstance(entry, dict) or set(entry) != set(_NAMES):
        found = ", ".join(sorted(map(str, entry))) if isinstance(entry, dict) else type(entry).__name__
        raise StoreError(f"{where} has {found or 'nothing'}; {_FORM}")
    if wrong := [name for name in _NAMES if not isinstance(entry[name], str) or not entry[name].strip()]:
        raise StoreError(f"{where}: {wrong[0]} is {entry[wrong[0]]!r}; {_FORM}")
    return Withdrawal(**entry)
