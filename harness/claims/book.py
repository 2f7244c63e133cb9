"""Every claim, read and checked as a whole: who is meant, on what hardware, and which sources they come from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import epcross
from epcross.harness.claims.claim import OF_PUBLISHED, Actor, Claim, Quantity, System
from epcross.harness.claims.claim_checks import claim_problems, page_problems
from epcross.harness.claims.documents import read_yaml
from epcross.harness.claims.sources import SOURCE_FILE, Source, read_source, reference_folders, source_folders
from epcross.harness.errors import ConfigError
from epcross.harness.planning.typed import build, suggest
from epcross.harness.point import Scalar

T = TypeVar("T")

SHIPPED_CLAIMS = Path(epcross.__file__).parent / "claims.yaml"
"""In a checkout `results/claims.yaml`."""


def claim_files(folder: Path) -> list[Path]:
    """Claims that were added, in the folder of their source: every YAML file but the one that describes it."""
    return sorted(path for path in folder.glob("*.yaml") if path.name != SOURCE_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What a claim is about unless it says otherwise."""

    where: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """The claims, and what their words mean."""

    claims: tuple[Claim, ...]
    actors: Mapping[str, Actor]
    systems: Mapping[str, System]
    sources: Mapping[str, Source]

    def claim(self, name: str) -> Claim:
        """The claim with this id.

        Raises:
            ConfigError: there is none.
        """
        found = [claim for claim in self.claims if claim.id == name]
        if not found:
            raise ConfigError(f"no claim '{name}'{suggest(name, [claim.id for claim in self.claims])}")
        return found[0]


@dataclass(slots=True)
class _Pages:
    """What has been read so far."""

    claims: list[tuple[str, Claim]] = field(default_factory=list)  # with the file it stands in
    actors: dict[str, Actor] = field(default_factory=dict)
    systems: dict[str, System] = field(default_factory=dict)
    usual: Usual = field(default_factory=Usual)


def read_book(folders: Sequence[Path] | None = None, *, shipped: Path = SHIPPED_CLAIMS) -> Book:
    """The shipped claims and those in the folders of sources; None: those of `reference_folders()`.

    Raises:
        ConfigError: with everything that is wrong in any file.
    """
    return read_places(source_folders(reference_folders() if folders is None else folders), shipped=shipped)


def read_places(places: Mapping[str, Path], *, shipped: Path = SHIPPED_CLAIMS) -> Book:
    """As `read_book`, from the folder of each source."""
    problems: list[str] = []
    sources: dict[str, Source] = {}
    for name, folder in places.items():
        try:
            sources[name] = read_source(folder)
        except ConfigError as error:
            problems += error.problems
    pages = _Pages()
    own = [(path, name) for name, folder in places.items() for path in claim_files(folder)]
    for path, source in [(shipped, ""), *own]:
        try:
            _read_page(path, source, pages, problems)
        except ConfigError as error:
            problems += error.problems
    problems += _repeated(claim.id for _, claim in pages.claims)
    problems += page_problems(pages.actors, pages.systems)
    for path, claim in pages.claims:
        problems += [
            f"{path}, claim {claim.id}: {text}" for text in claim_problems(claim, pages.actors, pages.systems, places)
        ]
    for name, system in pages.systems.items():
        if system.nominal and system.nominal.source not in places:
            problems.append(
                f"system '{name}': no source '{system.nominal.source}'{suggest(system.nominal.source, places)}"
            )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Book(
        claims=tuple(_with_usual(claim, pages.usual) for _, claim in pages.claims),
        actors=pages.actors,
        systems=pages.systems,
        sources=sources,
    )


def _read_page(path: Path, source: str, pages: _Pages, problems: list[str]) -> None:
    document = read_yaml(path)
    allowed = ("claims", "actors", "systems", *(() if source else ("usual",)))
    problems += [f"{path}: unknown key '{key}'{suggest(str(key), allowed)}" for key in document if key not in allowed]
    _define("actors", Actor, document, pages.actors, path, problems)
    _define("systems", System, document, pages.systems, path, problems)
    if not source:
        made = build(Usual, document.get("usual", {}), f"{path}: usual", problems)
        pages.usual = made or pages.usual
    claims = document.get("claims", [])
    if not isinstance(claims, list):
        named = "empty" if claims is None else type(claims).__name__
        problems.append(f"{path}: claims is {named}, but must be a list")
        return
    for number, data in enumerate(claims, start=1):
        if source and isinstance(data, Mapping):
            data = {"source": source, **data}
        name = data.get("id") if isinstance(data, Mapping) else None
        claim = build(Claim, data, f"{path}, claim {name if isinstance(name, str) else f'number {number}'}", problems)
        if claim is not None:
            if source and claim.source != source:
                problems.append(
                    f"{path}, claim {claim.id}: source is '{claim.source}', but the folder is of '{source}'"
                )
            pages.claims.append((str(path), claim))


def _define(
    group: str, kind: type[T], document: Mapping[str, Any], known: dict[str, T], path: Path, problems: list[str]
) -> None:
    """Add what a page defines under `group`."""
    for name, data in _mapping(document.get(group, {}), f"{path}: {group}", problems).items():
        if name in known:
            problems.append(f"{path}: {group[:-1]} '{name}' is defined twice; give one of them another name")
        elif (made := build(kind, data, f"{path}, {group[:-1]} '{name}'", problems)) is not None:
            known[str(name)] = made


def _mapping(data: Any, where: str, problems: list[str]) -> Mapping[Any, Any]:
    if isinstance(data, Mapping):
        return data
    problems.append(f"{where} is {type(data).__name__}, but must be a mapping of names to values")
    return {}


def _repeated(names: Iterable[str]) -> list[str]:
    listed = list(names)
    return [
        f"claim '{name}' stands twice; give one of them another id"
        for name in dict.fromkeys(listed)
        if listed.count(name) > 1
    ]


def _with_usual(claim: Claim, usual: Usual) -> Claim:
    """The claim with what is usual filled in where it says nothing; claims about published numbers select no rows."""
    if claim.quantity in OF_PUBLISHED or claim.quantity is Quantity.INCORRECT_ROWS:
        return claim
    said = {*claim.where, *claim.open, *([claim.change.factor] if claim.change else [])}
    return replace(
        claim,
        where={**{name: value for name, value in usual.where.items() if name not in said}, **claim.where},
        open={**{name: value for name, value in usual.open.items() if name not in said}, **claim.open},
    )
