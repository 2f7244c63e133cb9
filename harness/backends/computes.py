"""From an expert stage's configuration to the class that runs experts: what `loader` is for backends."""

import contextlib
import inspect
from collections.abc import Callable, Mapping

from epcross.harness.backends.answers import FAILURES
from epcross.harness.backends.loader import imported_class, option_value
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
    found = imported_class(config.target, config.folder, ExpertCompute, named)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{named} lacks {', '.join(missing)}; the contract is in epcross/kernels/experts/compute.py")
    return found


def option_defaults(config: ComputeConfig) -> dict[str, Scalar]:
    """The options it takes: keyword arguments of its constructor whose default is a plain value. Raises as `load`."""
    parameters = inspect.signature(compute_class(config)).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}


def resolved(config: ComputeConfig, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Every option with its value. Raises `ConfigError` for those unknown, of the wrong type, or of use to nobody."""
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
    with contextlib.suppress(*FAILURES):  # what is wrong with the class itself is told of its points
        problems += [f"compute '{config.name}': option {text}" for text in found(**values).option_problems()]
    if problems:
        raise ConfigError(sorted(problems))
    return values


def maker(config: ComputeConfig, options: Mapping[str, Scalar]) -> MakeCompute:
    """What makes an instance with these options. Raises as `loader.load`."""
    found, values = compute_class(config), resolved(config, options)
    return lambda: found(**values)
