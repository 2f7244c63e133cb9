"""From a backend's configuration to the backend: import its class, check its options, ask whether it is usable.

Run as a module it answers `unavailable` for another interpreter: configuration as JSON on stdin, answer on stdout.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from epcross.harness.backends import answers, trial
from epcross.harness.backends.answers import FAILURES, WrongBackend
from epcross.harness.backends.base import Backend
from epcross.harness.errors import ConfigError
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.planning.typed import Mismatch, convert, suggest
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import BackendKind

PROBE_LIMIT_S = 60.0
"""How long another interpreter may take to say whether a backend is usable; importing torch cold takes 20 s."""

_BEGUN = "epcross asks the backend"
"""The first line of another interpreter that can run this module, whatever ends it then."""

T = TypeVar("T")


class CannotImport(Exception):
    """The module of a backend exists and fails, or ends its process, when imported; the message is a sentence."""


def load(config: BackendConfig) -> Backend:
    """The backend with its options, touching nothing else.

    Raises:
        ConfigError: the target is no backend class; an option is unknown, of the wrong type, or has a value that could
            serve nobody; the file says what backends of this kind do not have.
        CannotImport: its module fails when imported, as for a library that this machine lacks.
        WrongBackend: what the class declares is not what the contract has, or making it ends the process.
    """
    found, defaults = backend_class(config), option_defaults(config)
    problems = [
        f"backend '{config.name}': unknown option '{name}'{suggest(name, defaults)}"
        for name in config.options
        if name not in defaults
    ]
    options = dict(defaults)
    for name in config.options.keys() & defaults.keys():
        try:
            options[name] = option_value(defaults[name], config.options[name])
        except Mismatch as error:
            problems.append(f"backend '{config.name}': option {name} {error}")
    problems += [f"backend '{config.name}': option {text}" for text in answers.option_problems(found, options)]
    problems += [f"backend '{config.name}': {text}" for text in _kind_problems(config, found.kind)]
    if problems:
        raise ConfigError(sorted(problems))
    return answers.made(found, options)


def option_defaults(config: BackendConfig) -> dict[str, Scalar]:
    """The options its class takes, with their defaults. Raises as `load`."""
    return answers.option_defaults(backend_class(config))


def _kind_problems(config: BackendConfig, kind: BackendKind) -> list[str]:
    """Keys of the file that a backend of this kind has no use for."""
    stages = (BackendKind.LAYER, BackendKind.EXPERTS)
    read_by = {"compute": stages, "weight_format": (*stages, BackendKind.FUSED)}
    return [
        f"{key} is {str(value)!r}, but its class has kind={kind} and only {', '.join(kinds)} read it; leave it out"
        for key, kinds in read_by.items()
        if (value := getattr(config, key)) and kind not in kinds
    ]


def for_point(config: BackendConfig, point: Point) -> Backend:
    """The backend with the options of `point`, and its expert stage with its own. Raises as `load`."""
    from epcross.harness.backends.layer import LayerBackend

    backend = load(replace(config, options=dict(point.options)))
    if isinstance(backend, LayerBackend) and point.compute:
        from epcross.harness.backends import computes

        backend.use_compute(computes.maker(config.computes[point.compute], dict(point.compute_options)))
    return backend


def answer_alone() -> None:
    """What the process runs in which `fatal_answer` tries a backend."""
    trial.answer(lambda config, point: for_point(BackendConfig.from_json(config), point))


def fatal_answer(config: BackendConfig, points: Sequence[Point]) -> str | None:
    """Which answer about `points`, all with the same expert stage, ends a process, as a sentence; see `trial`."""
    stage = config.computes.get(points[0].compute)
    return trial.fatal_answer(
        [config.target, *([stage.target] if stage else [])], config.folder, config.to_json(), points
    )


def option_value(default: Any, value: Any) -> Any:
    """`value` with the type of the option's default; a default of None allows anything.

    Raises:
        Mismatch: it has another type.
    """
    if default is None:
        return value
    return convert(value, type(default))


def asks_another(config: BackendConfig) -> bool:
    """Whether `unavailable` asks a process of its own, as the backend has an interpreter or environment of its own."""
    return config.python is not None or bool(config.env)


def unavailable(config: BackendConfig, compute: str = "") -> str | None:
    """Why the backend, or the expert stage that it is to have, cannot be used here, as a sentence; None if it can.

    Asked in the backend's own interpreter and environment where it has any. Raises only `ConfigError` and
    `WrongBackend`.
    """
    if asks_another(config):
        return _ask_interpreter(config, compute)
    from epcross.harness.backends import computes

    try:
        backend, stage = load(config), None
        if compute:
            stage = computes.maker(config.computes[compute], dict(config.computes[compute].options))()
    except CannotImport as error:
        return str(error)
    try:
        if ending := trial.fatal_unavailable(config.target, config.folder):
            raise WrongBackend(ending)
        reason = answers.unavailable(backend)
    except WrongBackend:
        raise
    except FAILURES as error:  # the contract forbids it; one careless adapter must not end the plan
        return f"its check failed with {answers.failure(error)}"
    if reason is None and stage is not None:
        return computes.unavailable(config.computes[compute], stage)
    return reason


def backend_class(config: BackendConfig) -> type[Backend]:
    """The class that `target` names. Raises as `load`."""
    named = f"backend '{config.name}': target '{config.target}'"
    found = imported_class(config.target, config.folder, Backend, named)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    missing += [n for n in ("name", "domains", "boundary", "host_sync") if not hasattr(found, n)]
    if missing:
        raise ConfigError(f"{named} lacks {', '.join(missing)}; the contract is in {answers.CONTRACT}")
    if problems := answers.class_problems(found):
        raise WrongBackend(f"{named} breaks the contract of {answers.CONTRACT}: {'; '.join(problems)}")
    return found


def imported_class(target: str, folder: str, base: type[T], named: str) -> type[T]:
    """The subclass of `base` that `target` (module:Class) names; its module may lie in `folder`. Raises as `load`,
    with messages that begin with `named`."""
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"{named} must be written module:Class, such as my_package.my_kernel:MyKernel")
    if ending := trial.fatal(target, folder):
        raise CannotImport(ending.reason) if not ending.imported else WrongBackend(ending.reason)
    if folder and folder not in sys.path:
        sys.path.append(folder)  # last: a folder of the user never hides an installed module
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            beside = f"put it into {folder}, or " if folder else ""
            raise ConfigError(f"{named}: there is no module '{error.name}'; {beside}install it") from error
        raise CannotImport(f"{module_name} needs the module '{error.name}', which is not installed") from error
    except FAILURES as error:
        raise CannotImport(f"importing {module_name} fails with {answers.failure(error)}") from error
    _must_be_from(folder, module, named)
    found = getattr(module, class_name, None)
    if found is None:
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]
        raise ConfigError(f"{named}: {module_name} has no class '{class_name}'{suggest(class_name, classes)}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{named} is no subclass of {base.__module__}.{base.__qualname__}")
    return found


def _must_be_from(folder: str, module: ModuleType, named: str) -> None:
    """`folder` may hold a module of this name while another of that name is installed, or was imported before from
    another user's folder: measuring that one in silence would give a wrong number."""
    first = module.__name__.partition(".")[0]
    beside = next((p for p in (Path(folder, f"{first}.py"), Path(folder, first, "__init__.py")) if p.is_file()), None)
    source = getattr(module, "__file__", None)
    if not folder or beside is None or source is None or Path(source).resolve().is_relative_to(Path(folder).resolve()):
        return
    raise ConfigError(
        f"{named}: '{first}' is {beside}, but Python took another module of that name, {source}; rename one of them"
    )


def _ask_interpreter(config: BackendConfig, compute: str) -> str | None:
    python = config.python or sys.executable
    try:
        asked = subprocess.run(
            [python, "-m", "epcross.harness.backends.loader"],
            input=json.dumps({"backend": config.to_json(), "compute": compute}),
            env={**os.environ, **config.env},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except OSError as error:
        found = re.search(r"\benvs/(\w+)/bin/", python)  # where the Makefile puts environments of single backends
        remedy = f"make env-{found[1]} builds it" if found else "correct 'python' in its YAML"
        return f"its interpreter {python} cannot be started: {error.strerror}; {remedy}"
    except subprocess.TimeoutExpired:
        return f"its interpreter {python} gave no answer within {PROBE_LIMIT_S:.0f} s"
    lines = asked.stdout.splitlines()
    try:
        answer = json.loads(lines[-1])
        reason, wrong = answer["unavailable"], answer["wrong"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        if _BEGUN in lines:
            stage = f" or compute '{compute}'" if compute else ""
            return (
                f"its interpreter {python} ended with status {asked.returncode} before it answered ({last}): "
                f"{config.target}{stage} ends the process; correct it, so that it returns or raises"
            )
        return f"its interpreter {python} cannot run epcross ({last}); install epcross there"
    if wrong:
        raise WrongBackend(wrong)
    return reason


def _answer() -> None:
    trial.expendable()
    sys.stdout.write(f"{_BEGUN}\n")
    sys.stdout.flush()
    asked = json.load(sys.stdin)
    config = BackendConfig.from_json({**asked["backend"], "python": None, "env": {}})
    reason = wrong = None
    try:
        reason = unavailable(config, asked["compute"])
    except ConfigError as error:
        reason = str(error)
    except WrongBackend as error:
        wrong = str(error)
    sys.stdout.write(f"\n{json.dumps({'unavailable': reason, 'wrong': wrong})}\n")


if __name__ == "__main__":
    _answer()
