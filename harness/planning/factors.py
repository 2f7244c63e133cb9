"""The factors a sweep may vary: their names, what a value may be, and which are options of a group.

A factor is one of `SCALARS`, a group of `GROUPS` (its value is the name of an option, a file in `conf/<group>`), a
field of an option (`routing.exponent`), or an option of a backend or expert stage (`backend.options.NAME`,
`compute.options.NAME`).
"""

from typing import Any

from epcross.harness.planning.schema import BackendConfig, ComputeConfig, Device
from epcross.harness.planning.typed import convert, field_types, suggest
from epcross.harness.point import Model, Placement, Routing, Scalar
from epcross.harness.terms import Regime, RowFormat, Scope, WeightFormat

SCALARS: dict[str, Any] = {
    "ep_size": int,
    "tokens_per_rank": int | tuple[int, ...],
    "token_skew": float,
    "empty_ranks": int,
    "max_tokens_per_rank": int | None,
    "capacity_factor": float,
    "masked_fraction": float,  # short for routing.masked_fraction
    "dispatch_format": RowFormat,
    "combine_format": RowFormat,
    "weight_format": WeightFormat | None,
    "scope": Scope,
    "regime": Regime,
}

GROUPS: dict[str, type] = {
    "backend": BackendConfig,
    "compute": ComputeConfig,
    "device": Device,
    "model": Model,
    "routing": Routing,
    "placement": Placement,
}

BACKEND_OPTION, COMPUTE_OPTION = "backend.options.", "compute.options."
OPTIONS = (BACKEND_OPTION, COMPUTE_OPTION)

_NO_FACTORS = {"name", "source", "content_sha256"}

FIELDS: dict[str, Any] = {
    f"{group}.{name}": kind
    for group in ("model", "routing", "placement")
    for name, kind in field_types(GROUPS[group]).items()
    if name not in _NO_FACTORS
}
"""Fields of options that may be varied on their own, with their types."""


def canonical(name: str) -> str:
    """The one name under which a factor is kept."""
    return "routing.masked_fraction" if name == "masked_fraction" else name


def is_factor(name: str) -> bool:
    """Whether `name` may stand in a grid. Options of backends and expert stages are checked once these are known."""
    return name in SCALARS or name in GROUPS or name in FIELDS or name.startswith(OPTIONS)


def unknown_factor(name: str) -> str:
    """What to say about a name that is no factor."""
    known = [*GROUPS, *SCALARS, *FIELDS, *(f"{option}NAME" for option in OPTIONS)]
    return f"unknown factor '{name}'{suggest(name, known)}"


def checked(name: str, value: Any) -> Any:
    """`value` with the type that the factor takes; names of options are not looked up here.

    Raises:
        Mismatch: it does not fit.
    """
    if name in GROUPS:
        return convert(value, str)
    if name.startswith(OPTIONS):
        return convert(value, Scalar)
    return convert(value, SCALARS.get(name, FIELDS.get(name)))
