"""The words of `epcross check`, and what they mean: which backend, where, which cases, which seeds."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epcross.harness.backends import computes, loader
from epcross.harness.backends.answers import WrongBackend
from epcross.harness.errors import ConfigError
from epcross.harness.planning.checks import MAX_EP_SIZE, same_labels
from epcross.harness.planning.library import Library
from epcross.harness.planning.schema import BackendConfig, ComputeConfig, Device
from epcross.harness.planning.typed import suggest
from epcross.harness.point import Scalar
from epcross.harness.terms import BackendKind, Domain
from epcross.harness.verification import layer_contract
from epcross.harness.verification.cases import Case

SEEDS = 3
"""Seeds 0, 1, ... of a whole check."""

_OPTION, _COMPUTE_OPTION = "backend.options.", "compute.options."
_KEYS = ("backend", "compute", "ep_size", "device", "case", "seed", f"{_OPTION}NAME", f"{_COMPUTE_OPTION}NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What is to be checked."""

    config: BackendConfig
    options: Mapping[str, Scalar]  # all of the backend's
    ep_size: int
    device: Device
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    kind: BackendKind
    compute: str  # the expert stage of a layer; empty where there is none to choose
    compute_options: Mapping[str, Scalar]
    given: tuple[str, ...]  # the words and options that a case by itself needs as well

    def again(self, case: str, seed: int) -> str:
        """The line that runs one case alone."""
        return shlex.join(
            ["epcross", "check", f"backend={self.config.name}", *self.given, f"case={case}", f"seed={seed}"]
        )


def read_request(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> CheckRequest:
    """The request that `words` such as backend=my_kernel and ep_size=4 make.

    Raises:
        ConfigError: with every problem found.
    """
    library = Library(config_dirs)
    problems: list[str] = []
    values = _split(words, problems)
    name = values.get("backend", "")
    if not name:
        problems.append(f"no backend is named; add backend=NAME, with one of {', '.join(library.names('backend'))}")
    else:
        problems += filter(None, [library.unknown("backend", name)])
        library.load([("backend", name)], problems)
    config: BackendConfig | None = library.get("backend", name) if name else None
    if config is not None:
        problems += _label_problems(config, library)
    device = _device(values.get("device"), config, library, problems)
    ep_size = _whole(values, "ep_size", 2, 1, MAX_EP_SIZE, problems)
    seed = _whole(values, "seed", 0, 0, 10**6, problems)
    kind = _kind(config)
    compute, compute_options = "", {}
    if config is not None and kind in (BackendKind.LAYER, BackendKind.EXPERTS):
        compute, compute_options, config = _compute(values, config, library, problems)
    elif "compute" in values:
        problems.append(f"backend '{name}' has no expert stage to choose; leave out compute={values['compute']}")
    suite = layer_contract.suite(kind, ep_size, name, compute=compute, compute_options=tuple(compute_options.items()))
    chosen = tuple(case for case in suite if values.get("case", case.name) == case.name)
    if not chosen:
        problems.append(f"unknown case '{values['case']}'{suggest(values['case'], [case.name for case in suite])}")
    asked = {key.removeprefix(_OPTION): value for key, value in values.items() if key.startswith(_OPTION)}
    options: Mapping[str, Scalar] = {}
    if config is not None:
        config = replace(config, options={**config.options, **asked})
        try:
            options = loader.load(config).options
        except (loader.CannotImport, WrongBackend):  # asked again where its own interpreter runs
            options = config.options
        except ConfigError as error:
            problems += error.problems
    if problems or config is None:
        raise ConfigError(problems)
    return CheckRequest(
        config=config,
        options=options,
        ep_size=ep_size,
        device=device,
        cases=chosen,
        kind=kind,
        compute=compute,
        compute_options=compute_options,
        seeds=(seed,) if "seed" in values else tuple(range(SEEDS)),
        given=tuple(
            [word for word in words if word.startswith(("ep_size=", "device=", "compute", _OPTION))]
            + [part for folder in config_dirs for part in ("--config-dir", str(folder))]
        ),
    )


def _label_problems(config: BackendConfig, library: Library) -> list[str]:
    """Whether another backend has its label. What is wrong with the others' files is not this check's."""
    others = [name for name in library.names("backend") if name != config.name]
    library.load([("backend", name) for name in others], [])
    found = [other for name in others if (other := library.get("backend", name)) and other.label == config.label]
    return same_labels([config, *found])


def _kind(config: BackendConfig | None) -> BackendKind:
    if config is None:
        return BackendKind.EXCHANGE
    with contextlib.suppress(ConfigError, loader.CannotImport, WrongBackend):  # told elsewhere
        return loader.backend_class(config).kind
    return BackendKind.EXCHANGE


def _compute(
    values: Mapping[str, Any], config: BackendConfig, library: Library, problems: list[str]
) -> tuple[str, dict[str, Scalar], BackendConfig]:
    """The expert stage, its options, and the backend's configuration that knows it."""
    name = values.get("compute", config.compute)
    if not name:
        problems.append(f"name an expert stage; add compute=NAME, with one of {', '.join(library.names('compute'))}")
        return "", {}, config
    problems += filter(None, [library.unknown("compute", name)])
    library.load([("compute", name)], problems)
    stage: ComputeConfig | None = library.get("compute", name)
    if stage is None:
        return name, {}, config
    asked = {k.removeprefix(_COMPUTE_OPTION): v for k, v in values.items() if k.startswith(_COMPUTE_OPTION)}
    options: dict[str, Scalar] = {**stage.options, **asked}
    try:
        options = computes.resolved(stage, options)
    except (loader.CannotImport, WrongBackend):  # asked again where the worker runs
        pass
    except ConfigError as error:
        problems += error.problems
    return name, options, replace(config, computes={name: stage})


def _device(name: str | None, config: BackendConfig | None, library: Library, problems: list[str]) -> Device:
    """The device named, or the first of these that the backend runs on: one GPU is at hand more often than several."""
    if name is None:
        domains: frozenset[Domain] = frozenset()
        if config is not None:
            with contextlib.suppress(
                ConfigError, loader.CannotImport, WrongBackend
            ):  # what is wrong with it is told elsewhere
                domains = loader.backend_class(config).domains
        usual = {Domain.CPU: "cpu", Domain.SHARED_GPU: "cuda_one_launch", Domain.NVLINK: "cuda"}
        name = next((device for domain, device in usual.items() if domain in domains), "cpu")
    problems += filter(None, [library.unknown("device", name)])
    library.load([("device", name)], problems)
    return library.get("device", name) or Device(domain=Domain.CPU)


def _split(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Key -> value; options of the backend have their type, the rest are text."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            problems.append(f"'{word}' cannot be read; write key=value, such as backend=shm_fence")
        elif key in values:
            problems.append(f"'{key}' is given twice; a check has one of each")
        elif key.startswith((_OPTION, _COMPUTE_OPTION)):
            values[key] = _scalar(text)
        elif key in _KEYS:
            values[key] = text
        else:
            problems.append(f"unknown key '{key}' in '{word}'{suggest(key, _KEYS)}")
    return values


def _scalar(text: str) -> Scalar:
    """A word as the YAML of a backend would have it; what is no single value stays text, and is refused as such."""
    from yaml import YAMLError, safe_load

    try:
        value = safe_load(text)
    except YAMLError:
        return text
    return value if value is None or isinstance(value, str | int | float | bool) else text


def _whole(values: Mapping[str, Any], key: str, default: int, least: int, most: int, problems: list[str]) -> int:
    text = values.get(key, str(default))
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    problems.append(f"{key}={text} must be a whole number from {least} to {most}")
    return default
