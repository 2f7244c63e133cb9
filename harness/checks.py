"""What makes a point impossible for every backend: an error of the sweep, found before anything runs."""

import math

from epcross.harness.point import Point
from epcross.harness.terms import PlacementKind, RoutingKind
from epcross.kernels.formats import row_size

MAX_EP_SIZE = 1024
"""Ranks of a group; a guard against EP and expert counts swapped, far above any scale-up domain today."""


def point_problems(point: Point) -> list[str]:
    """Every reason why `point` makes no sense, as sentences; empty if it does."""
    if not 1 <= point.ep_size <= MAX_EP_SIZE:
        return [f"ep_size={point.ep_size} must lie between 1 and {MAX_EP_SIZE}"]
    model = point.model
    problems = [
        f"model '{model.name}': {name}={value} must be at least 1"
        for name in ("num_experts", "top_k", "hidden", "intermediate")
        if (value := getattr(model, name)) < 1
    ]
    if problems:
        return problems
    if model.top_k > model.num_experts:
        problems.append(
            f"model '{model.name}': top_k={model.top_k} is more than num_experts={model.num_experts}; "
            "a token chooses distinct experts"
        )
    problems += _format_problems(point)
    problems += placement_problems(point)
    problems += _token_problems(point)
    problems += routing_problems(point)
    return problems


def placement_problems(point: Point) -> list[str]:
    """Slots that do not divide over ranks, or cannot hold every expert."""
    experts, ep_size = point.model.num_experts, point.ep_size
    kind, slots = point.placement.kind, point.placement.num_slots
    if kind is not PlacementKind.REPLICATED and slots != experts:
        return [
            f"placement={kind} has one slot for each of {experts} experts; num_slots={slots} needs placement=replicated"
        ]
    if slots < experts:
        return [f"placement.num_slots={slots} cannot hold {experts} experts; give at least {experts}"]
    if slots % ep_size == 0:
        return []
    more = math.ceil(slots / ep_size) * ep_size
    if kind is PlacementKind.REPLICATED:
        return [
            f"placement.num_slots={slots} does not divide over ep_size={ep_size}; the nearest that do are "
            f"{' and '.join(str(n) for n in (more - ep_size, more) if n >= experts)}"
        ]
    return [
        f"{experts} experts of '{point.model.name}' do not divide over ep_size={ep_size} under placement={kind}; the "
        f"nearest ep_size that does is {' or '.join(map(str, nearest_divisors(experts, ep_size)))}, or use "
        f"placement=replicated ({more} slots)"
    ]


def nearest_divisors(number: int, near: int) -> list[int]:
    """The largest divisor of `number` below `near` and the smallest above it, as far as they exist."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    return below + [d for d in divisors if d > near][:1]


def routing_problems(point: Point) -> list[str]:
    """Parameters of the routing that are out of range or cannot be met. Files are checked where they are read."""
    routing, problems = point.routing, []
    if not 0.0 <= routing.masked_fraction < 1.0:
        problems.append(f"routing.masked_fraction={routing.masked_fraction} must lie between 0 and 1, 1 excluded")
    if not 0.0 <= routing.hot_fraction <= 1.0:
        problems.append(f"routing.hot_fraction={routing.hot_fraction} must lie between 0 and 1")
    if not 0.0 <= routing.exponent <= 8.0:
        problems.append(f"routing.exponent={routing.exponent} must lie between 0 (uniform) and 8")
    reachable = point.placement.num_slots // point.ep_size
    if routing.kind in (RoutingKind.LOCAL_ONLY, RoutingKind.ALL_TO_ONE) and point.model.top_k > reachable:
        problems.append(
            f"routing={routing.kind} keeps a token on one rank, which holds {reachable} slots at "
            f"ep_size={point.ep_size}: fewer than top_k={point.model.top_k} of '{point.model.name}'"
        )
    return problems


def _format_problems(point: Point) -> list[str]:
    problems: list[str] = []
    for name, row_format in (("dispatch_format", point.dispatch_format), ("combine_format", point.combine_format)):
        try:
            row_size(row_format, point.model.hidden)
        except ValueError as error:
            problems.append(f"model '{point.model.name}', {name}: {error}")
    return problems


def _token_problems(point: Point) -> list[str]:
    problems: list[str] = []
    if any(t < 0 for t in point.tokens):
        problems.append(f"tokens of ranks {list(point.tokens)}: a rank cannot have fewer than 0 tokens")
    elif not any(point.tokens):
        problems.append(f"no rank has any token (ep_size={point.ep_size}); there would be nothing to time")
    if len(point.tokens) == point.ep_size and max(point.tokens) > point.max_tokens_per_rank:
        problems.append(
            f"max_tokens_per_rank={point.max_tokens_per_rank} is less than the {max(point.tokens)} tokens of the "
            "fullest rank; raise it or leave it out"
        )
    return problems
