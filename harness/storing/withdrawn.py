"""Numbers of a run that turned out to be wrong: a list beside its rows, with the reason.

    [{"run_id": "20260131-120000-s-1a2b", "backend": "ag_rs", "regime": "entry",
      "reason": "long graphs inflate it by tens of microseconds"}]

The rows stay what they were measured as. Where they are read, those that an entry names carry the flag `known_issue`,
and no headline rests on them. The list lies beside the `units/` of a run or beside a file of rows; where these are a
link, one beside what the link leads to counts as well.
"""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.storing.regular_file import read_regular, seats
from epcross.harness.terms import Flag

WITHDRAWN_FILE = "withdrawn.json"

Place = tuple[str, str, str]
"""(run_id, backend, regime)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """All rows of one backend in one regime of one run, and why no number may rest on them."""

    run_id: str
    backend: str
    regime: str
    reason: str

    @property
    def place(self) -> Place:
        """What rows it names."""
        return self.run_id, self.backend, self.regime


def read_withdrawn(folder: Path) -> tuple[Withdrawal, ...]:
    """The entries of the list in `folder`; none where no such file is.

    Raises:
        StoreError: the file cannot be read, or is no list of objects with these four texts.
    """
    path = folder / WITHDRAWN_FILE
    try:
        entries = json.loads(read_regular(path))
    except FileNotFoundError as error:
        if path.is_symlink():
            raise StoreError(f"{path} is a link to nothing, so what it withdraws is not known; mend it") from error
        return ()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; make it a readable file") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no JSON ({error}); {_FORM}") from error
    if not isinstance(entries, list):
        raise StoreError(f"{path} holds {type(entries).__name__} in place of a list; {_FORM}")
    return tuple(_withdrawal(entry, f"{path}, entry {number}") for number, entry in enumerate(entries))


def withdrawn_beside(path: Path) -> tuple[Withdrawal, ...]:
    """What is withdrawn of the rows at `path`, a file of rows or the `units/` of a run, and of others beside them.

    Raises:
        StoreError: as `read_withdrawn`.
    """
    return tuple(dict.fromkeys(entry for seat in seats(path) for entry in read_withdrawn(seat.parent)))


def flags_beside(path: Path, places: Sequence[Place], flags: Sequence[str], *, whole: bool) -> list[str]:
    """The flags of rows at `path`, with `known_issue` added where a row is withdrawn.

    Args:
        places: of each row.
        flags: of each row, as they are stored.
        whole: these are all rows there, so every entry must name some of them.

    Raises:
        StoreError: as `read_withdrawn`, or an entry names what no row has.
    """
    gone: set[Place] = set()
    for seat in seats(path):
        entries = read_withdrawn(seat.parent)
        if whole:
            _require_rows(entries, places, seat.parent / WITHDRAWN_FILE)
        gone.update(entry.place for entry in entries)
    return [with_known_issue(own) if place in gone else own for place, own in zip(places, flags, strict=True)]


def with_known_issue(flags: str) -> str:
    """Flags of a row, as they are stored, and `known_issue` among them."""
    return " ".join(sorted({*flags.split(), Flag.KNOWN_ISSUE}))


def as_file(withdrawn: Iterable[Withdrawal]) -> bytes:
    """What `read_withdrawn` reads these entries from."""
    return (json.dumps([asdict(entry) for entry in withdrawn], indent=2) + "\n").encode()


def _require_rows(entries: Iterable[Withdrawal], places: Sequence[Place], file: Path) -> None:
    known = set(places)
    for entry in entries:
        if entry.place not in known:
            there = ", ".join(sorted(f"{backend} {regime} of {run_id}" for run_id, backend, regime in known))
            raise StoreError(
                f"{file} withdraws rows of {entry.backend} {entry.regime} of {entry.run_id}, and no row is of these; "
                f"correct the entry or remove it. There are {there or 'no rows'}"
            )


_NAMES = tuple(field.name for field in fields(Withdrawal))
_FORM = f"write a list of objects with {', '.join(_NAMES)}, each a text"
_MARKS = ("<!--", "-->")


def _withdrawal(entry: Any, where: str) -> Withdrawal:
    if not isinstance(entry, dict) or set(entry) != set(_NAMES):
        found = ", ".join(sorted(map(str, entry))) if isinstance(entry, dict) else type(entry).__name__
        raise StoreError(f"{where} has {found or 'nothing'}; {_FORM}")
    for name in _NAMES:
        text = entry[name]
        if not isinstance(text, str) or not text.strip():
            raise StoreError(f"{where}: {name} is {text!r}; {_FORM}")
        if any(_breaks_lines(sign) for sign in text) or any(mark in text for mark in _MARKS):
            raise StoreError(
                f"{where}: {name} is {text!r}, which pages cannot hold; write one line without control characters, "
                f"{' and '.join(_MARKS)}"
            )
    return Withdrawal(**entry)


def _breaks_lines(sign: str) -> bool:
    """Whether it is a control or format character, half of a pair of surrogates, or ends a line."""
    category = unicodedata.category(sign)
    return category.startswith("C") or category in ("Zl", "Zp")
