"""The order of process groups."""

from collections import Counter

from epcross.harness.point import Model, Placement, Point
from epcross.harness.running.job import Turn, TurnKind
from epcross.harness.running.schedule import turn_order, turns
from epcross.harness.terms import Regime


def point(backend: str, tokens: int) -> Point:
    return Point(
        backend=backend,
        model=Model(name="m", num_experts=8, top_k=2, hidden=64, intermediate=64),
        ep_size=2,
        tokens_per_rank=tokens,
        tokens=(tokens, tokens),
        max_tokens_per_rank=tokens,
        placement=Placement(num_slots=8),
        regime=Regime.STEADY,
    )


POINTS = [point(backend, tokens) for tokens in (1, 2) for backend in ("a", "b", "c")]


def test_odd_launches_run_in_reverse() -> None:
    assert [turn_order("abc", launch) for launch in range(3)] == [("a", "b", "c"), ("c", "b", "a"), ("a", "b", "c")]


def test_every_unit_is_visited_once_and_launches_are_outermost() -> None:
    found = turns(POINTS, 4)
    assert [(t.launch, t.backend, t.position) for t in found] == [
        (launch, backend, position)
        for launch, order in enumerate(["abc", "cba", "abc", "cba"])
        for position, backend in enumerate(order)
    ]
    visits = Counter((point_id, t.launch) for t in found for point_id in t.point_ids)
    assert visits == Counter({(p.point_id, launch): 1 for p in POINTS for launch in range(4)})
    # over an even number of launches no backend is earlier than another
    places = {b: sum(t.position for t in found if t.backend == b) for b in "abc"}
    assert len(set(places.values())) == 1


def test_done_units_are_left_out_and_places_stay() -> None:
    done = {(p.point_id, 0) for p in POINTS if p.backend != "b"} | {(POINTS[1].point_id, 0)}
    first, *rest = turns(POINTS, 2, done=done)
    assert first == Turn(backend="b", launch=0, position=1, point_ids=(POINTS[4].point_id,))
    assert [t.launch for t in rest] == [1, 1, 1]
    assert turns(POINTS, 1, done={(p.point_id, 0) for p in POINTS}) == ()


def test_the_floor_comes_first() -> None:
    assert turns([], 3, floor=True) == (Turn(kind=TurnKind.FLOOR),)
    assert [t.kind for t in turns(POINTS[:1], 1, floor=True)] == [TurnKind.FLOOR, TurnKind.MEASURE]
