"""The order of process groups: launches outermost, backends taking turns within each, odd launches in reverse."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from epcross.harness.point import Point
from epcross.harness.running.job import Turn, TurnKind


def turn_order(backends: Sequence[str], launch: int) -> tuple[str, ...]:
    """ABBA: what drifts through a launch (clocks, heat) favours each backend equally often."""
    return tuple(reversed(backends)) if launch % 2 else tuple(backends)


def turns(
    points: Iterable[Point], launches: int, *, done: AbstractSet[tuple[str, int]] = frozenset(), floor: bool = False
) -> tuple[Turn, ...]:
    """Every process group that `points` of one EP size need, without the units in `done`; groups left empty vanish.

    A group's `position` is its place in the whole launch, so it does not depend on what was done before.

    Args:
        done: (point_id, launch) of units that are stored.
        floor: whether to measure the floor first.
    """
    by_backend: dict[str, list[str]] = {}
    for point in points:
        by_backend.setdefault(point.backend, []).append(point.point_id)
    found = [Turn(kind=TurnKind.FLOOR)] if floor else []
    for launch in range(launches):
        for position, backend in enumerate(turn_order(tuple(by_backend), launch)):
            left = tuple(point_id for point_id in by_backend[backend] if (point_id, launch) not in done)
            if left:
                found.append(Turn(backend=backend, launch=launch, position=position, point_ids=left))
    return tuple(found)


def not_again(launch: int, rank: int | None, stage: str | None, reason: str | None) -> str:
    """Why a point that failed in one launch is skipped in the later ones."""
    who = "it" if rank is None else f"rank {rank}"
    return f"not tried again: in launch {launch} {who} failed in {stage}: {reason}"
