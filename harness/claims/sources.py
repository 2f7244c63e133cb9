"""Where published values come from: one folder for each source, with what it says and what it leaves out.

    results/reference/<source>/source.yaml     title, URL, date, hardware, byte convention, rank reduction, what is open
                               quoted.csv      numbers of its text, as they stand there
                               *.csv           its tables, one measurement a row (see `published`)
                               *.yaml          claims that were added (see `book`)

The package carries its own folder; a `results/reference` of the current directory is read beside it.
"""

import filecmp
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import epcross
from epcross.harness.claims.documents import read_yaml
from epcross.harness.errors import ConfigError, InputError
from epcross.harness.planning.typed import build

SHIPPED = Path(epcross.__file__).parent / "reference"
"""What the package carries: in a checkout `results/reference`."""

LOCAL = Path("results/reference")
"""Below the current directory: where `epcross claims add` puts what a reader enters."""

SOURCE_FILE = "source.yaml"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ByteConvention(StrEnum):
    """What a source's bandwidth counts."""

    BALANCED_PAIRS = "balanced_pairs"  # of a rank: tokens x min(EP, top_k) x bytes of a row with scales, own included
    PAIRS = "pairs"  # one row for each token and destination rank, own included
    PAIRS_REMOTE = "pairs_remote"  # the same, own rank left out
    SELECTIONS = "selections"  # one row for each token and expert
    ALGORITHM = "algorithm"  # a library's own formula
    LINK = "link"  # of a link or copy, no exchange
    NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where values or claims come from. Empty text: not known."""

    name: str  # of its folder
    title: str
    url: str = ""
    date: str = ""
    access: str = ""  # how much of it was seen
    license: str = ""
    hardware: str
    byte_convention: ByteConvention
    byte_note: str = ""
    rank_reduction: str
    not_stated: tuple[str, ...] = ()  # what a reader would need and does not find
    checked: str = ""  # what the transcription was compared with


class Sources(dict[str, Source]):
    """Sources by name. They never change, so frames that carry them share them: pandas copies `attrs` at every step."""

    def __deepcopy__(self, _memo: object) -> "Sources":
        return self


def reference_folders(extra: Sequence[Path] = ()) -> list[Path]:
    """The shipped folder, `results/reference` of the current directory if there is one, and `extra`; each once.

    Raises:
        InputError: a folder of `extra` does not exist.
    """
    if missing := [str(path) for path in extra if not path.is_dir()]:
        raise InputError(f"no folder {', '.join(missing)}; name one that holds a folder for each source")
    folders = [SHIPPED, *([LOCAL] if LOCAL.is_dir() else []), *extra]
    return [Path(path) for path in dict.fromkeys(str(folder.resolve()) for folder in folders)]


def source_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """Source -> its folder, in the order of `folders`, then by name.

    Raises:
        ConfigError: with every name that is taken twice or cannot be one.
    """
    found: dict[str, Path] = {}
    problems: list[str] = []
    for root in folders:
        for folder in sorted(path.parent for path in root.glob(f"*/{SOURCE_FILE}")):
            problems += name_problems(folder.name, str(folder))
            if folder.name in found and not _same_files(found[folder.name], folder):
                problems.append(f"source '{folder.name}' exists twice: {found[folder.name]} and {folder}; rename one")
            found.setdefault(folder.name, folder)
    if problems:
        raise ConfigError(problems)
    return found


def _same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same: an installed epcross used in a checkout of it sees every source twice."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    return names[0] == names[1] and filecmp.cmpfiles(one, other, names[0], shallow=False)[0] == names[0]


def name_problems(name: str, where: str) -> list[str]:
    """What is wrong with the name of a source."""
    if _NAME.fullmatch(name):
        return []
    return [f"{where}: source name {name!r} must be lower-case letters, digits and _, up to 64, a letter first"]


def read_source(folder: Path) -> Source:
    """The source that `folder` describes.

    Raises:
        ConfigError: with everything wrong in its source.yaml.
    """
    path = folder / SOURCE_FILE
    problems: list[str] = []
    source = build(Source, {**read_yaml(path), "name": folder.name}, str(path), problems)
    if source is None:
        raise ConfigError(problems)
    return source


def sources(folders: Sequence[Path] | None = None) -> Sources:
    """Every source by name; None: those of `reference_folders()`.

    Raises:
        ConfigError: with what is wrong in the first faulty one, or with clashing names.
    """
    places = source_folders(reference_folders() if folders is None else folders)
    return Sources({name: read_source(folder) for name, folder in places.items()})
