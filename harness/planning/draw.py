"""Cases of a soak: points drawn at random from the product that a sweep describes.

A case is a function of (seed, case number) and the sweep alone, so that one of many can be drawn again by itself. It
takes one value of each axis; values that make no point together are drawn again.
"""

from epcross.harness.errors import ConfigError
from epcross.harness.planning.assemble import Assembler
from epcross.harness.planning.checks import point_problems
from epcross.harness.planning.config import Config
from epcross.harness.planning.grid import Assignment, axes_of, excluded
from epcross.harness.planning.schema import Soak
from epcross.harness.planning.typed import Mismatch
from epcross.harness.point import Point
from epcross.harness.workload import counter

TRIES = 500
"""Draws for one case. Ranges of which so few fit together are a mistake."""

_DRAW = 201  # purpose of the counter stream; workload uses lower numbers


def drawn_points(config: Config, soak: Soak) -> dict[Point, int]:
    """The points of a soak and their case numbers, in order; a case equal to an earlier one is left out.

    Raises:
        ConfigError: a case was not found, with the problems of its last draw.
    """
    assembler = Assembler(config)
    numbers = range(max(1, int(soak.seconds / soak.case_s))) if soak.only is None else (soak.only,)
    axes = [axes_of(block) for block in config.blocks]
    points: dict[Point, int] = {}
    for number in numbers:
        points.setdefault(_case(config, axes, assembler, soak.seed, number), number)
    return points


def _case(config: Config, axes: list[list[list[Assignment]]], assembler: Assembler, seed: int, number: int) -> Point:
    problems: tuple[str, ...] = ()
    for attempt in range(TRIES):
        key = counter.key(_DRAW, seed, number, attempt)
        block = _below(key, 0, len(axes))
        assignment = dict(config.defaults)
        for place, axis in enumerate(axes[block], start=1):
            assignment.update(axis[_below(key, place, len(axis))])
        if excluded(assignment, config.blocks[block].exclude):
            problems = ("every assignment is excluded",)
            continue
        try:
            point = assembler.point(assignment)
        except (Mismatch, ConfigError) as error:
            problems = error.problems if isinstance(error, ConfigError) else (str(error),)
            continue
        problems = tuple(point_problems(point))
        if not problems:
            return point
    raise ConfigError(
        [
            f"case {number} of the soak: {TRIES} draws gave no point that can exist; widen the ranges. The last draw:",
            *problems,
        ]
    )


def _below(key: int, place: int, limit: int) -> int:
    return int(counter.below(counter.words(key, place, 1), limit)[0])
