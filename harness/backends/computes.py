"""From an expert stage's configuration to the class that runs experts: what `loader` is for backends."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from epcross.harness.backends import answers, trial
from epcross.harness.backends.answers import FAILURES, WrongBackend
from epcross.harness.backends.loader import CannotImport, imported_class, option_value
from epcross.harness.errors import ConfigError
from epcross.harness.planning.schema import ComputeConfig
from epcross.harness.planning.typed import Mismatch, suggest
from epcross.harness.point import Scalar
from epcross.kernels.experts.compute import ExpertCompute

MakeCompute = Callable[[], ExpertCompute]
"""A rank, or a landing set, has an instance of its own."""


def compute_class(config: ComputeConfig) -> type[ExpertCompute]:
    """The class that `target` names. Raises as `loader.load`."""
    named = f"compute '{config.name}': target '{config.target}'"
    with _named(config):
        found = imported_class(config.target, config.folder, ExpertCompute, named)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{named} lacks {', '.join(missing)}; the contract is in {answers.STAGE_CONTRACT}")
    return found


def option_defaults(config: ComputeConfig) -> dict[str, Scalar]:
    """The options it takes: keyword arguments of its constructor whose default is a plain value. Raises as `load`."""
    with _named(config):
        return answers.stage_defaults(compute_class(config))


def resolved(config: ComputeConfig, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Every option with its value. Raises as `loader.load`, for options unknown, of the wrong type, or of use to
    nobody."""
    found, defaults = compute_class(config), option_defaults(config)
    problems = [
        f"compute '{config.name}': unknown option '{name}'{suggest(name, defaults)}"
        for name in options
        if name not in defaults
    ]
    values = dict(defaults)
    for name in options.keys() & defaults.keys():
        try:
            values[name] = option_value(defaults[name], options[name])
        except Mismatch as error:
            problems.append(f"compute '{config.name}': option {name} {error}")
    if problems:
        raise ConfigError(sorted(problems))
    with _named(config):
        wrong = answers.stage_problems(answers.stage_made(found, values))
    if wrong:
        raise ConfigError(sorted(f"compute '{config.name}': option {text}" for text in wrong))
    return values


def maker(config: ComputeConfig, options: Mapping[str, Scalar]) -> MakeCompute:
    """What makes an instance with these options. Raises as `loader.load`, and what it returns raises `WrongBackend`."""
    found, values = compute_class(config), resolved(config, options)

    def make() -> ExpertCompute:
        with _named(config):
            return answers.stage_made(found, values)

    return make


def unavailable(config: ComputeConfig, stage: ExpertCompute) -> str | None:
    """Why `stage`, made of `config`, cannot be used here, as a sentence; None if it can. Raises `WrongBackend`."""
    try:
        with _named(config):
            if ending := trial.fatal_unavailable(config.target, config.folder):
                raise WrongBackend(ending)
            return answers.unavailable(stage)
    except WrongBackend:
        raise
    except FAILURES as error:  # the contract forbids it; one careless stage must not end the plan
        return (
            f"compute '{config.name}': its check failed with {answers.failure(error)}; unavailable() must return why "
            f"it cannot be used, or None, as {answers.STAGE_CONTRACT} says"
        )


@contextlib.contextmanager
def _named(config: ComputeConfig) -> Iterator[None]:
    """What is wrong with a stage stands in rows of layers, and must say that it is not of the layer."""
    try:
        yield
    except CannotImport as error:
        raise CannotImport(_with_name(config, error)) from error.__cause__
    except WrongBackend as error:
        raise WrongBackend(_with_name(config, error)) from error.__cause__


def _with_name(config: ComputeConfig, error: Exception) -> str:
    """Once: these contexts lie within each other."""
    name, text = f"compute '{config.name}': ", str(error)
    return text if text.startswith(name) else name + text
