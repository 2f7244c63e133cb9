"""What keeps a claim from being judged: words without a meaning, bounds that cannot be, empty selections."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from epcross.harness.claims.claim import (
    APART,
    OF_CHANGE,
    OF_PUBLISHED,
    OVER_BASELINE,
    Actor,
    Claim,
    Kind,
    Operator,
    Quantity,
    System,
)
from epcross.harness.claims.verdict import Better
from epcross.harness.planning.typed import suggest
from epcross.harness.terms import Phase, PlacementKind, Regime, RoutingKind, RowFormat, Scope, Sharing

FACTORS: Mapping[str, type] = {
    "model": str, "num_experts": int, "num_slots": int, "top_k": int, "hidden": int, "intermediate": int,
    "ep_size": int, "tokens_per_rank": int, "token_spread": str, "capacity": str, "routing": RoutingKind,
    "routing_params": str, "placement": PlacementKind, "dispatch_format": RowFormat, "combine_format": RowFormat,
    "scope": Scope, "sharing": Sharing, "regime": Regime,
}  # fmt: skip
"""Columns by which a claim selects rows, and what their values are."""

NUMBERS = tuple(name for name, kind in FACTORS.items() if kind is int)
"""Factors that may be given as a range."""


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,15}")  # a column of a table, and a word of a command line
_PRODUCT = re.compile(r"\w(.*\w)?")

_OF_BYTES = (Quantity.WIRE_MULTIPLE, Quantity.BANDWIDTH_SHARE, Quantity.BANDWIDTH_CHANGE)
_WITHOUT_PHASE = (*OF_PUBLISHED, Quantity.SHARE, Quantity.SHARE_TREND, Quantity.INCORRECT_ROWS)


def page_problems(actors: Mapping[str, Actor], systems: Mapping[str, System]) -> list[str]:
    """Actors whose claims nothing could be held against, and systems that any GPU would be taken for, as sentences."""
    problems = [
        f"actor '{name}' names no backend; list those that stand for it under `reproduces` or `replicates`"
        for name, actor in actors.items()
        if not actor.reproduces and not actor.replicates
    ]
    for name, system in systems.items():
        wrong = [product for product in system.products if not _PRODUCT.fullmatch(product)]
        problems += [f"system '{name}': product {one!r} must begin and end with a letter or digit" for one in wrong]
    return problems


def claim_problems(
    claim: Claim, actors: Mapping[str, Actor], systems: Mapping[str, System], sources: Iterable[str]
) -> list[str]:
    """Everything wrong with a claim that has the right keys and types, as sentences."""
    problems: list[str] = []
    if not _ID.fullmatch(claim.id):
        problems.append(f"id is {claim.id[:40]!r}, but must be up to 16 letters, digits, `_`, `.` or `-`")
    known = list(sources)
    named = [claim.source, *(one.source for one in claim.evidence)]
    problems += [f"no source '{name}'{suggest(name, known)}" for name in named if name not in known]
    if claim.hardware not in systems:
        problems.append(f"no system '{claim.hardware}'{suggest(claim.hardware, systems)}")
    published = claim.quantity in OF_PUBLISHED
    for role, needed in (("subject", not published), ("baseline", claim.quantity in OVER_BASELINE)):
        name = getattr(claim, role)
        if needed and not name:
            problems.append(f"{role} is missing; quantity {claim.quantity} needs one of the actors")
        elif name and not needed:
            problems.append(f"{role} '{name}' is of no use with quantity {claim.quantity}; leave it out")
        elif name and name not in actors:
            problems.append(f"no actor '{name}'{suggest(name, actors)}")
        elif name and role == "baseline" and not actors[name].reproduces:
            problems.append(f"baseline '{name}' has no backend under `reproduces`; a baseline is a kernel as shipped")
    problems += _bound_problems(claim)
    if claim.quantity not in _WITHOUT_PHASE and claim.phase is None:
        problems.append(f"phase is missing; quantity {claim.quantity} is of one phase")
    if claim.quantity in _WITHOUT_PHASE and claim.phase is not None:
        problems.append(f"phase {claim.phase} is of no use with quantity {claim.quantity}; leave it out")
    if claim.quantity in _OF_BYTES and claim.phase in (Phase.STAGE, Phase.LAYER, Phase.LAYER_COMM):
        problems.append(f"quantity {claim.quantity} needs a phase whose bytes are counted, not {claim.phase}")
    if (claim.change is not None) != (claim.quantity in OF_CHANGE):
        problems.append(f"change goes with the quantities {', '.join(OF_CHANGE)}, and with no other")
    if (claim.kind in APART) != published:
        problems.append(
            f"kind {claim.kind} and quantity {claim.quantity} do not go together; of published numbers are the kinds "
            f"{', '.join(APART)} and the quantities {', '.join(OF_PUBLISHED)}"
        )
    if (claim.quantity is Quantity.NOMINAL) != bool(claim.evidence):
        problems.append(f"evidence goes with quantity {Quantity.NOMINAL}, and with no other")
    if any(one.divide_by <= 0 for one in claim.evidence):
        problems.append("divide_by must be above 0")
    if claim.kind is Kind.ABSOLUTE and claim.hardware in systems and not systems[claim.hardware].products:
        problems.append(f"an absolute claim needs the hardware it was made on; '{claim.hardware}' names none")
    return problems + _selection_problems(claim)


def _bound_problems(claim: Claim) -> list[str]:
    lower, upper = claim.lower, claim.upper
    sides = {
        Operator.AT_MOST: (None, "upper"), Operator.AT_LEAST: ("lower", None),
    }.get(claim.operator, ("lower", "upper"))  # fmt: skip
    problems = [
        f"{side} is missing; operator '{claim.operator}' needs it"
        for side in sides
        if side and getattr(claim, side) is None
    ]
    if lower is not None and upper is not None and lower > upper:
        problems.append(f"lower {lower:g} is above upper {upper:g}")
    for operator, side, bound, better in (
        (Operator.AT_MOST, "lower", lower, Better.LOWER),
        (Operator.AT_LEAST, "upper", upper, Better.HIGHER),
    ):
        if claim.operator is operator and bound is not None and claim.better is not better:
            problems.append(
                f"{side} is given with operator '{operator}', so what lies beyond it would be outside; leave it out, "
                f"or say better: {better}"
            )
    if claim.quantity is Quantity.CROSSOVER and any(bound is not None and bound < 1 for bound in (lower, upper)):
        problems.append("a crossover lies at 1 token per rank or above")
    return problems


def _selection_problems(claim: Claim) -> list[str]:
    problems: list[str] = []
    both = sorted(claim.where.keys() & claim.open.keys())
    problems += [f"{name} is stated (where) and open at once" for name in both]
    for place, selection in (("where", claim.where), ("open", claim.open)):
        for name, wanted in selection.items():
            if name not in FACTORS:
                problems.append(f"{place}: unknown factor '{name}'{suggest(name, FACTORS)}")
            else:
                problems += [f"{place}: {name} {text}" for text in _value_problems(name, wanted, place)]
    if (change := claim.change) is not None:
        if change.factor not in FACTORS:
            problems.append(f"change: unknown factor '{change.factor}'{suggest(change.factor, FACTORS)}")
        else:
            values = (change.base, *change.to)
            problems += [
                f"change: {change.factor} {text}" for text in _value_problems(change.factor, list(values), "change")
            ]
            if not change.to or len(set(values)) < len(values):
                problems.append("change: `to` must name values, each once and other than `base`")
            if change.factor in claim.where.keys() | claim.open.keys():
                problems.append(f"change: {change.factor} is selected by where or open too")
    return problems


def _value_problems(name: str, wanted: Any, place: str) -> list[str]:
    kind = FACTORS[name]
    if isinstance(wanted, Mapping):
        if place != "where" or name not in NUMBERS:
            return [f"is {dict(wanted)!r}; a range {{from, to}} is for numbers in where"]
        ends = [wanted[key] for key in ("from", "to") if key in wanted]
        whole = all(type(end) is int and end > 0 for end in ends)
        if not ends or len(ends) < len(wanted) or not whole or sorted(ends) != ends:
            return [f"is {dict(wanted)!r}, but must be {{from: A, to: B}} with whole numbers, or one of the two"]
        return []
    values = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    if not values:
        return ["names no value"]
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice and place != "change":  # which has a sentence of its own
        return [f"names {twice[0]!r} twice"]
    if kind is int:
        wrong = [value for value in values if type(value) is not int or value < 1]
        return [f"is {wrong[0]!r}, but must be a positive whole number"] if wrong else []
    wrong = [value for value in values if not isinstance(value, str)]
    if wrong:
        return [f"is {wrong[0]!r}, but must be text; put it in quotes"]
    if issubclass(kind, StrEnum):
        return [f"is {value!r}{suggest(str(value), list(kind))}" for value in values if value not in set(kind)]
    return []
