"""The situations of the contract suite: what every backend must get right, as small cases with a name and a reason."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import ContractShape, Int32
from epcross.harness.point import Model, Placement, Point, Routing
from epcross.harness.terms import PlacementKind, Regime, RoutingKind, RowFormat
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.tape import Payload

_USUAL = ContractShape()

IdsOf = Callable[[Point, Slots, int], list[Int32]]
"""Slot ids of every rank [T, top_k] for a point and a set number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One situation a backend must get right."""

    name: str
    why: str  # what goes wrong in it elsewhere
    point: Point
    payloads: tuple[Payload, ...] = (Payload.EXACT, Payload.RANDOM)
    ids: IdsOf | None = None  # instead of the point's routing


def cases(ep_size: int, backend: str = "contract", shape: ContractShape = _USUAL) -> tuple[Case, ...]:
    """All cases for a group of `ep_size` ranks.

    Args:
        backend: becomes the points' backend name.
        shape: the backend's own; names and number of the cases are the same with any.
    """

    def point(
        tokens: int | tuple[int, ...] = 6,
        *,
        capacity: int | None = None,
        experts_per_rank: int = 4,
        top_k: int = 3,
        hidden: int = shape.hidden,
        routing: Routing | None = None,
        placement: Placement | None = None,
        dispatch_format: RowFormat = RowFormat.BF16,
    ) -> Point:
        each = (tokens,) * ep_size if isinstance(tokens, int) else tokens
        num_experts = experts_per_rank * ep_size
        return Point(
            backend=backend,
            model=Model(name="contract", num_experts=num_experts, top_k=top_k, hidden=hidden, intermediate=hidden),
            ep_size=ep_size,
            tokens_per_rank=max(each),
            tokens=each,
            max_tokens_per_rank=max(each) if capacity is None else capacity,
            routing=routing or Routing(),
            placement=placement or Placement(num_slots=num_experts),
            dispatch_format=dispatch_format,
            regime=Regime.STEADY,
        )

    ragged = tuple((7 * rank + 3) % 11 for rank in range(ep_size))
    none_last = (5,) * (ep_size - 1) + (0,)
    more = 4 + shape.slots_multiple  # slots of a rank
    replicated = Placement(kind=PlacementKind.REPLICATED, num_slots=more * ep_size)
    hostile = (Payload.ADVERSARIAL, Payload.EXACT)
    found = [
        Case(name="plain", why="the common case; capacity equals tokens", point=point()),
        Case(name="one_token", why="averages below one token divide by zero", point=point(1)),
        Case(name="ragged", why="unequal counts, so offsets are no multiples", point=point(ragged)),
        Case(name="capacity_above_tokens", why="strides follow capacity, not tokens", point=point(capacity=19)),
        Case(name="all_to_one", why="one rank receives everything", point=_kind(point, RoutingKind.ALL_TO_ONE)),
        Case(name="local_only", why="nothing crosses ranks", point=_kind(point, RoutingKind.LOCAL_ONLY)),
        Case(name="masked_ids", why="-1 indexes the last slot", point=point(routing=Routing(masked_fraction=0.4))),
        Case(name="masked_rows", why="tokens and a rank that choose nothing", point=point(), ids=_masked_rows),
        Case(name="rotated", why="own and received ids differ strongly", point=point(ragged), ids=_rotated),
        Case(name="every_expert", why="fan-out to all ranks, all slots used", point=point(top_k=4 * ep_size)),
        Case(name="odd_top_k", why="metadata rows that fill no vector", point=point(top_k=5, experts_per_rank=more)),
        Case(name="odd_hidden", why="rows that end inside a vector", point=point(hidden=67)),
        Case(name="tiny_rows", why="rows shorter than a vector", point=point(hidden=4), payloads=(Payload.EXACT,)),
        Case(name="replicated", why="more slots than experts", point=point(placement=replicated)),
    ]
    if ep_size > 1:
        found += [
            Case(name="zero_tokens_on_a_rank", why="a rank sends nothing", point=point(none_last)),
            Case(name="zero_received_on_a_rank", why="a rank receives nothing", point=point(), ids=_none_to_last),
        ]
    for row_format in RowFormat:
        scaled = point(hidden=shape.format_hidden, dispatch_format=row_format)
        if row_format is not RowFormat.BF16:
            found.append(Case(name=f"format_{row_format}", why="scale rows travel beside rows", point=scaled))
        why = "payload words equal to a sentinel, NaN of any payload"
        found.append(Case(name=f"any_bits_{row_format}", why=why, point=scaled, payloads=hostile))
    return tuple(found)


def _kind(point: Callable[..., Point], kind: RoutingKind) -> Point:
    return point(routing=Routing(kind=kind))


def _chosen(point: Point, slots: Slots, number: int, source: int, among: NDArray[np.integer]) -> Int32:
    """Distinct slots [T, top_k] of those given, shifted from token to token and from set to set."""
    token = np.arange(point.tokens[source])[:, None]
    start = token * 3 + source + number
    place = start + np.arange(point.model.top_k) * (1 + (token + number) % 2 * (len(among) - 2))
    return among[place % len(among)].astype(np.int32)


def _rotated(point: Point, slots: Slots, number: int) -> list[Int32]:
    """Every token goes to the next rank."""
    return [
        _chosen(point, slots, number, source, np.flatnonzero(slots.slot_rank == (source + 1) % point.ep_size))
        for source in range(point.ep_size)
    ]


def _none_to_last(point: Point, slots: Slots, number: int) -> list[Int32]:
    """No token chooses the last rank."""
    among = np.flatnonzero(slots.slot_rank != point.ep_size - 1)
    return [_chosen(point, slots, number, source, among) for source in range(point.ep_size)]


def _masked_rows(point: Point, slots: Slots, number: int) -> list[Int32]:
    """Every other token, and all tokens of one rank, choose nothing."""
    ids = [_chosen(point, slots, number, source, np.arange(slots.num_slots)) for source in range(point.ep_size)]
    for chosen in ids:
        chosen[number % 2 :: 2] = -1
    ids[number % point.ep_size][:] = -1
    return ids
