"""From override words to one resolved configuration. Hydra and OmegaConf stay behind this file and `library`.

Words follow Hydra's override grammar (https://hydra.cc/docs/advanced/override_grammar/basic/):

    sweep=NAME timing=NAME cluster=NAME launcher=NAME     choose an option of a group
    timing.launches=3  soak.seconds=600                   change a field of it, or of a sweep's soak
    tokens_per_rank=1,8,32  model=qwen3_235b              run a factor over these values instead of the sweep's own
    backend=shm_fence                                     likewise, or keep the blocks that have it (`narrow`)
    routing.exponent=0.8,1.2  backend.options.NAME=VALUE  the same for a field or a backend's option
    output_dir=DIR                                        where runs are kept

Everything wrong is collected and raised together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epcross.harness.errors import ConfigError
from epcross.harness.planning.checks import soak_problems, timing_problems, too_small
from epcross.harness.planning.factors import FIELDS, GROUPS, SCALARS, canonical, checked, is_factor, unknown_factor
from epcross.harness.planning.grid import block_problems, override_axis, values_of
from epcross.harness.planning.library import LONGEST_REASON, SCHEMAS, Library, quoted
from epcross.harness.planning.narrow import NARROWING, narrowed, without
from epcross.harness.planning.override_values import override_values
from epcross.harness.planning.schema import Block, Cluster, Launcher, Soak, Sweep
from epcross.harness.planning.typed import Mismatch, build, field_types, suggest
from epcross.harness.point import Timing

DEFAULT_SWEEP = "quickstart"
CHOICES = ("timing", "cluster", "launcher")
"""Groups of which one option is chosen for the whole sweep."""

_KEYS = [
    "sweep",
    *CHOICES,
    "output_dir",
    *GROUPS,
    *SCALARS,
    *FIELDS,
    "timing.FIELD",
    "soak.FIELD",
    "backend.options.NAME",
    "compute.options.NAME",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything resolved, nothing expanded: factor names are canonical, every value has its type."""

    sweep: str
    description: str
    floor_only: bool
    soak: Soak | None
    blocks: tuple[Block, ...]
    defaults: dict[str, Any]  # factor -> value where a block does not name it
    timing: Timing
    timing_name: str
    cluster: Cluster
    launcher: Launcher
    output_dir: str
    overrides: tuple[str, ...]
    typed: frozenset[str]  # factors that the overrides name
    absent: tuple[str, ...]  # backends that the sweep awaits and no file describes
    library: Library


@dataclass(slots=True)
class _Words:
    """The override words, sorted by what they do."""

    choices: dict[str, str]
    fields: list[str]  # for Hydra, as given
    soak: dict[str, Any]
    axes: dict[str, list[Any]]


def resolve(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Config:
    """The configuration that `overrides` ask for.

    Raises:
        ConfigError: with every problem found.
    """
    library = Library(config_dirs)
    problems: list[str] = []
    words = _read_words(overrides, library, problems)
    name = words.choices.get("sweep", DEFAULT_SWEEP)
    problems += filter(None, [library.unknown("sweep", name)])
    library.load([("sweep", name)], problems)
    sweep: Sweep | None = library.get("sweep", name)
    choices = {group: words.choices.get(group) or (getattr(sweep, group) if sweep else "") for group in CHOICES}
    problems += [problem for group, option in choices.items() if option and (problem := library.unknown(group, option))]
    if problems or sweep is None:
        # axes are still looked at, so that a wrong value beside a wrong name is reported with it
        for factor, values in words.axes.items():
            _checked_axis(factor, values, library, "command line", problems)
        raise ConfigError(problems)

    root = library.compose_root(
        [f"{group}={quoted(option)}" for group, option in choices.items() if option] + words.fields
    )
    defaults = root.get("factors", {})
    absent = () if "backend" in words.axes else tuple(b for b in sweep.awaits if b not in library.names("backend"))
    known = {factor: library.names(factor) for factor in NARROWING}
    products, narrowing = narrowed(sweep, f"sweep '{name}'", words.axes, known, problems)
    products = without(products, absent)
    if absent and not products:
        problems.append(
            f"sweep '{name}' is about {', '.join(absent)}, and there is no backend of these names; add their YAML with "
            f"--config-dir, or name others: backend=NAME, with one of {', '.join(library.names('backend'))}"
        )
    library.load(_named_options([*products, Block(grid=words.axes), Block(grid=defaults)], library), problems)
    timing, cluster, launcher = (_build_root(root, group, problems) for group in CHOICES)
    axes = {
        factor: _checked_axis(factor, values, library, "command line", problems)
        for factor, values in words.axes.items()
    }
    problems += timing_problems(timing) if timing else []
    problems += too_small("launcher", launcher, points_per_job=0) if launcher else []
    soak = _soak(name, sweep, words.soak, problems)
    replacing = {factor: values for factor, values in axes.items() if factor not in narrowing}
    blocks: list[Block] = []
    for product in products:
        block = _canonical(product)
        for factor in replacing:
            block = override_axis(block, factor, [])  # what the sweep says of it no longer matters
        block = _checked_block(block, library, f"sweep '{name}'", problems, done=replacing)
        blocks.append(block)
    defaults = _checked_block(Block(grid=defaults), library, "config.yaml", problems).grid
    if not isinstance(root.get("output_dir"), str) or not root["output_dir"] or "\0" in root["output_dir"]:
        problems.append(f"output_dir is {root.get('output_dir')!r}, but must be the path of a folder")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Config(
        sweep=name,
        description=sweep.description,
        floor_only=sweep.floor_only,
        soak=soak,
        blocks=tuple(blocks),
        defaults={factor: axis[0] for factor, axis in defaults.items()},
        timing=timing,
        timing_name=choices["timing"] or "default",
        cluster=cluster,
        launcher=launcher,
        output_dir=root["output_dir"],
        overrides=tuple(overrides),
        typed=frozenset(words.axes),
        absent=absent,
        library=library,
    )


def _read_words(overrides: Sequence[str], library: Library, problems: list[str]) -> _Words:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    words = _Words(choices={}, fields=[], soak={}, axes={})
    given: set[str] = set()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except Exception as error:  # the parser has its own, and those of numbers, codecs and recursion
            words_of_it = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            problems.append(
                f"'{text}' cannot be read ({words_of_it}); write key=value, and quote a value that "
                f"holds = , or brackets inside the word: \"key='a,b=c'\""
            )
            continue
        key = canonical(override.key_or_group)
        if override.is_delete() or override.package is not None:
            problems.append(f"'{text}': ~ and @ have no use here; name a factor with the values you want")
            continue
        if key in given:
            problems.append(f"'{key}' is given twice; list its values once, {key}=a,b")
            continue
        given.add(key)
        try:
            values = override_values(override, key, library)
        except Mismatch as error:
            problems.append(f"'{text}' {error}")
            continue
        if key in ("sweep", *CHOICES, "output_dir"):
            _read_choice(key, values, text, words, problems)
        elif key.split(".")[0] in (*CHOICES, "soak"):
            _read_field(key, values, text, words, problems)
        elif is_factor(key):
            words.axes[key] = values
        else:
            problems.append(f"unknown key '{key}' in '{text}'{suggest(key, _KEYS)}")
    return words


def _read_choice(key: str, values: list[Any], text: str, words: _Words, problems: list[str]) -> None:
    if len(values) != 1 or not isinstance(values[0], str) or not values[0]:
        problems.append(f"'{text}': {key} takes one {'path' if key == 'output_dir' else 'name'} for the whole sweep")
    elif key == "output_dir":
        words.fields.append(f"output_dir={quoted(values[0])}")
    else:
        words.choices[key] = values[0]


def _read_field(key: str, values: list[Any], text: str, words: _Words, problems: list[str]) -> None:
    group, _, name = key.partition(".")
    kinds = field_types(Soak if group == "soak" else SCHEMAS[group])
    if name not in kinds:
        problems.append(f"unknown key '{key}' in '{text}'{suggest(name, kinds)}")
    elif len(values) != 1:
        problems.append(f"'{text}': {key} is the same for the whole sweep; give one value")
    elif group == "soak":
        words.soak[name] = values[0]
    else:
        words.fields.append("++" + text.lstrip("+"))


def _soak(name: str, sweep: Sweep, changes: Mapping[str, Any], problems: list[str]) -> Soak | None:
    """The sweep's soak with the command line's changes."""
    if sweep.soak is None:
        if changes:
            problems.append(f"sweep '{name}' is no soak, so soak.{next(iter(changes))} means nothing; add sweep=soak")
        return None
    soak = build(Soak, {**asdict(sweep.soak), **changes}, "soak", problems)
    problems += soak_problems(soak) if soak else []
    if sweep.floor_only:
        problems.append(f"sweep '{name}' is floor_only and has a soak; leave one of them out")
    return soak


def _build_root(root: dict[str, Any], group: str, problems: list[str]) -> Any:
    return build(SCHEMAS[group], root.get(group), group, problems)


def _named_options(blocks: Sequence[Block], library: Library) -> list[tuple[str, str]]:
    """The options that blocks name, to be composed together, which is much faster than one at a time."""
    parts = [part for block in blocks for part in (block.grid, *block.zip, *block.exclude)]
    named = [(group, name) for part in parts for group in GROUPS if group in part for name in values_of(part[group])]
    return [(group, name) for group, name in named if isinstance(name, str) and name in library.names(group)]


def _canonical(block: Block) -> Block:
    return Block(
        grid={canonical(factor): axis for factor, axis in block.grid.items()},
        zip=tuple({canonical(factor): axis for factor, axis in table.items()} for table in block.zip),
        exclude=tuple({canonical(factor): axis for factor, axis in match.items()} for match in block.exclude),
    )


def _checked_block(
    block: Block, library: Library, where: str, problems: list[str], done: Mapping[str, list[Any]] | None = None
) -> Block:
    """The block with every value typed and every name known; what is not is added to `problems`.

    Axes in `done` are checked already and replace those of the block.
    """
    done = done or {}

    def checked_part(part: Mapping[str, Any], place: str) -> dict[str, list[Any]]:
        return {
            factor: done[factor]
            if factor in done and place == "grid"
            else _checked_axis(factor, axis, library, f"{where}: {place}", problems)
            for factor, axis in part.items()
        }

    # an axis in `done` has its values, or a problem of its own that says why not
    shape = Block(grid={**block.grid, **{factor: [None] for factor in done}}, zip=block.zip)
    problems += [f"{where}: {problem}" for problem in block_problems(shape)]
    return Block(
        grid=checked_part(block.grid, "grid"),
        zip=tuple(checked_part(table, "zip") for table in block.zip),
        exclude=tuple(checked_part(match, "exclude") for match in block.exclude),
    )


def _checked_axis(factor: str, axis: Any, library: Library, where: str, problems: list[str]) -> list[Any]:
    if not is_factor(factor):
        problems.append(f"{where}: {unknown_factor(factor)}")
        return []
    values: list[Any] = []
    for value in values_of(axis):
        try:
            values.append(checked(factor, value))
        except Mismatch as error:
            problems.append(f"{where}: {factor} {error}")
            continue
        if factor in GROUPS and (problem := library.unknown(factor, value)):
            problems.append(f"{where}: {problem}")
    if factor in GROUPS:
        library.load([(factor, name) for name in values], problems)
    return values
