"""The options of every configuration group: where their files are, and what they say.

Folders are searched in this order: the package's own `conf`, then each `--config-dir`, which holds the same group
folders. A name may exist once only: nothing is replaced silently.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import epcross
from epcross.harness.errors import ConfigError
from epcross.harness.planning.checks import backend_problems, compute_problems, timing_problems
from epcross.harness.planning.factors import GROUPS
from epcross.harness.planning.paths import absolute
from epcross.harness.planning.schema import BackendConfig, Cluster, ComputeConfig, Launcher, Sweep
from epcross.harness.planning.typed import build, suggest
from epcross.harness.point import Timing

PACKAGE_CONF = Path(epcross.__file__).parent / "conf"
"""Found from the package itself, never from the current directory."""

SCHEMAS: dict[str, type] = {**GROUPS, "cluster": Cluster, "launcher": Launcher, "sweep": Sweep, "timing": Timing}
"""Each group, and the dataclass its options become."""

LONGEST_REASON = 1000
"""Characters of another library's words that are worth repeating."""

_HEADER = re.compile(r"^\s*#\s*@", re.MULTILINE)
"""Hydra's words about a file, such as its package."""

_FILLED_IN = frozenset({"name", "folder", "computes"})
"""Fields of a backend that come from the place of its file, or from the plan."""

_PROSE = {"notes"}
"""Keys for readers of the file, which no program uses."""


def quoted(text: str) -> str:
    """`text` as one value of Hydra's override grammar, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def read_plain(path: Path) -> dict[Any, Any] | None:
    """What Hydra would make of a file that has nothing for it: no defaults, no header, nothing to interpolate.

    None of any other file, and of one that is wrong, so that Hydra says how.
    """
    from omegaconf import OmegaConf

    try:
        text = path.read_text(encoding="utf-8")
        if "${" in text or _HEADER.search(text):
            return None
        plain = OmegaConf.to_container(OmegaConf.load(path), throw_on_missing=True)
    except Exception:  # of codecs, of PyYAML, of OmegaConf
        return None
    return plain if isinstance(plain, dict) and plain and "defaults" not in plain else None


class Library:
    """Options by group and name, read at most once each."""

    def __init__(self, config_dirs: Sequence[Path] = ()) -> None:
        """Look at the folders; read no option yet.

        Raises:
            ConfigError: a folder is missing or has no group folder, or a name exists twice.
        """
        problems: list[str] = []
        self.folders = [absolute(folder) for folder in config_dirs]
        self._files: dict[str, dict[str, Path]] = {group: {} for group in SCHEMAS}
        self._plain: dict[tuple[str, str], Any] = {}
        self._typed: dict[tuple[str, str], Any] = {}
        for folder in [PACKAGE_CONF, *self.folders]:
            if not any((folder / group).is_dir() for group in SCHEMAS):
                groups = ", ".join(f"{group}/" for group in SCHEMAS)
                problems.append(f"config folder {folder} has none of the group folders {groups}")
            for group, known in self._files.items():
                for path in sorted((folder / group).glob("*.yaml")):
                    if path.stem in known:
                        problems.append(
                            f"{group} '{path.stem}' exists twice: {known[path.stem]} and {path}; rename one"
                        )
                    known.setdefault(path.stem, path)
        if problems:
            raise ConfigError(problems)

    def names(self, group: str) -> list[str]:
        """The options of a group, sorted."""
        return sorted(self._files[group])

    def unknown(self, group: str, name: str) -> str | None:
        """What to say if `group` has no option `name`; None if it has."""
        if name in self._files[group]:
            return None
        return f"unknown {group} '{name}'{suggest(name, self.names(group))}"

    def load(self, wanted: Iterable[tuple[str, str]], problems: list[str]) -> None:
        """Compose and check several options in one go; what is wrong with them is added to `problems`.

        Unknown names are the caller's to report.
        """
        todo = [key for key in dict.fromkeys(wanted) if key not in self._plain and key[1] in self._files[key[0]]]
        if not todo:
            return
        try:
            self._plain.update(self._compose(todo))
        except ConfigError:
            # one bad file spoils the whole composition: take them singly, to report each
            for key in todo:
                try:
                    self._plain.update(self._compose([key]))
                except ConfigError as error:
                    self._plain[key] = None
                    where = f"{key[0]} '{key[1]}' ({self._files[key[0]][key[1]]})"
                    problems.extend(f"{where}: {problem}" for problem in error.problems)
        for group, name in todo:
            if self._plain[group, name] is not None:
                self._typed[group, name] = self._build(group, name, problems)

    def get(self, group: str, name: str) -> Any:
        """The option as its dataclass, or None if it is unknown or was found faulty."""
        problems: list[str] = []
        self.load([(group, name)], problems)
        return self._typed.get((group, name))

    def compose_root(self, overrides: Sequence[str]) -> dict[str, Any]:
        """`config.yaml` with its groups and `overrides`, as plain values.

        Raises:
            ConfigError: Hydra refuses it.
        """
        return self._hydra("config", overrides)

    def _compose(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """The options as plain values. Hydra takes 10 ms for each, so it is asked for those alone that need it."""
        read = {key: read_plain(self._files[key[0]][key[1]]) for key in keys}
        rest = self._composed([key for key in keys if read[key] is None])
        return {key: rest[key] if key in rest else read[key] for key in keys}

    def _composed(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        if not keys:
            return {}
        # every option goes to a place of its own, so that one composition holds several options of a group
        places = {key: f"option{number}" for number, key in enumerate(keys)}
        plain = self._hydra(None, [f"+{group}@{places[group, name]}={quoted(name)}" for group, name in keys])
        return {key: plain.get(place) for key, place in places.items()}

    def _hydra(self, config_name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        search = [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in self.folders)}]"]
        try:
            with initialize_config_dir(version_base="1.3", config_dir=str(PACKAGE_CONF)):
                config = compose(config_name, overrides=[*(search if self.folders else ()), *overrides])
            plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        # Hydra, OmegaConf and PyYAML have errors of their own, and let those of codecs, numbers and recursion through
        except Exception as error:
            words = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            raise ConfigError(f"configuration cannot be composed: {words}") from error
        if not isinstance(plain, dict):
            raise ConfigError(f"configuration is {plain!r}, but must be a mapping of names to values")
        return {str(key): value for key, value in plain.items()}

    def _build(self, group: str, name: str, problems: list[str]) -> Any:
        data = self._plain[group, name]
        where = f"{group} '{name}' ({self._files[group][name]})"
        if isinstance(data, Mapping):
            data = {key: value for key, value in data.items() if key not in _PROSE}
            known = [f.name for f in fields(SCHEMAS[group])]
            own = {"name", "folder"} & set(known)
            if "folder" in own and "folder" in data:  # as of any key that is none
                listed = [name for name in known if name not in _FILLED_IN]
                problems.append(f"{where}: unknown key 'folder'{suggest('folder', listed)}")
            if data.get("name", name) != name:
                problems.append(f"{where}: name is {data['name']!r}, but the file is called '{name}'; make them equal")
            if "name" in own:
                data["name"] = name
            if "folder" in own:
                folder = self._files[group][name].parent.parent
                data["folder"] = str(folder) if folder in self.folders else ""
        unlisted = _FILLED_IN if group in ("backend", "compute") else ()
        option = build(SCHEMAS[group], data, where, problems, unlisted)
        wrong = backend_problems(option) if isinstance(option, BackendConfig) else []
        wrong += compute_problems(option) if isinstance(option, ComputeConfig) else []
        wrong += timing_problems(option) if isinstance(option, Timing) else []
        problems += [f"{where}: {problem}" for problem in wrong]
        return None if wrong else option
