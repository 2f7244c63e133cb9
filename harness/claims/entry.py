"""Entering what a paper says: a table of values or a list of claims becomes a file in the folder of its source.

Everything is read and checked first, together with what is there; then the file is copied as it is, in one step.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from epcross.harness.claims.book import claim_files, read_places
from epcross.harness.claims.documents import read_text
from epcross.harness.claims.sources import (
    SOURCE_FILE,
    ByteConvention,
    name_problems,
    reference_folders,
    source_folders,
)
from epcross.harness.claims.values import QUOTED_FILE, read_tables, tables
from epcross.harness.errors import ConfigError, InputError, StoreError
from epcross.harness.storing.sealed import write_whole

NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What an entry left."""

    folder: Path
    files: tuple[str, ...]  # that were written
    values: int  # measurements in the file
    claims: int


def enter(file: Path, source: str, about: Mapping[str, Any], into: Path) -> Entered:
    """Add `file`, a CSV table of values or a YAML list of claims, to `source` below the folder `into`.

    Args:
        about: what source.yaml says of a source that is not there yet; its title at least.

    Raises:
        ConfigError: with everything that is wrong with the file, or with the two together.
        StoreError: the folder cannot be written.
    """
    problems = name_problems(source, "--source")
    if not file.exists():  # before what a new source needs, which would send the reader after the wrong thing
        problems.append(f"{file} does not exist; give the path of a table (.csv) or of a list of claims (.yaml)")
    elif file.suffix not in (".csv", ".yaml"):
        problems.append(f"{file} is neither a table (.csv) nor a list of claims (.yaml)")
    if file.name in (SOURCE_FILE, QUOTED_FILE):
        problems.append(f"{file.name} is the name of another file of a source; rename yours")
    if problems:
        raise ConfigError(problems)
    places = source_folders(reference_folders([into] if into.is_dir() else []))
    home = (into / source).resolve()
    if source in places and places[source] != home:
        raise InputError(
            f"source '{source}' is in {places[source]} already; give yours another name, or --into that folder"
        )
    if (home / file.name).exists() and (home / file.name) != file.resolve():
        raise InputError(f"{home / file.name} exists already; rename the file, or edit that one")
    new = source not in places
    description = _description(source, about, new=new)
    text = read_text(file)
    with tempfile.TemporaryDirectory() as scratch:
        trial = Path(scratch) / source
        if new:
            trial.mkdir()
            (trial / SOURCE_FILE).write_bytes(description.encode())
        else:
            shutil.copytree(home, trial)
        (trial / file.name).write_bytes(text.encode())
        try:
            counts = _counts(trial, file, {**places, source: trial})
        except ConfigError as error:
            named = {str(trial / file.name): str(file), str(trial): str(home)}
            raise ConfigError([_renamed(problem, named) for problem in error.problems]) from None
    try:
        home.mkdir(parents=True, exist_ok=True)
        if new:
            write_whole(home / SOURCE_FILE, description.encode())
        write_whole(home / file.name, text.encode())
    except OSError as error:
        raise StoreError(f"cannot write to {home}: {error.strerror}; free space or make it writable") from error
    return Entered(folder=home, files=(*([SOURCE_FILE] if new else []), file.name), values=counts[0], claims=counts[1])


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """`text` with the places in the scratch folder as the caller knows them."""
    for scratch, known in names.items():
        text = text.replace(scratch, known)
    return text


def _description(source: str, about: Mapping[str, Any], *, new: bool) -> str:
    given = {name: value for name, value in about.items() if value}
    if not new:
        if given:
            raise InputError(
                f"source '{source}' is described already; edit its {SOURCE_FILE} instead of giving {', '.join(given)}"
            )
        return ""
    if not given.get("title"):
        raise InputError(
            f"source '{source}' is new: give its --title, and --url, --date, --hardware, --bytes and --ranks if stated"
        )
    document = {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
        "hardware": given.get("hardware", NOT_STATED),
        "byte_convention": given.get("byte_convention", str(ByteConvention.NOT_STATED)),
        "rank_reduction": given.get("rank_reduction", NOT_STATED),
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=116)


def _counts(trial: Path, file: Path, places: Mapping[str, Path]) -> tuple[int, int]:
    """Measurements and claims that the file adds, after everything was read with it."""
    book = read_places(places)
    values = read_tables(trial)
    own = [place for place, _ in values if place.startswith(f"{file.name}:")]
    if file.suffix == ".csv":
        assert trial / file.name in tables(trial)
        return len(own), 0
    assert trial / file.name in claim_files(trial)
    (trial / file.name).unlink()
    added = len(book.claims) - len(read_places(places).claims)
    if not added:
        raise InputError(f"{file} has no claims; write them as a list under the key `claims`")
    return 0, added
