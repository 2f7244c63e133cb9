"""From grid, zip and exclude to assignments: pure, ordered, and without repeats.

The order is the written one: earlier axes change slowest, zipped tables follow the grid.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from epcross.harness.planning.schema import Block

_LONGEST_RANGE = 100_000
"""A longer one is a slip, and is reported as a value of the wrong type."""

Assignment = dict[str, Any]
"""Factor -> value. A factor that is not named has its default."""


def values_of(axis: Any) -> list[Any]:
    """The values of an axis: a list as it is, {from, to} as every integer between, anything else as the only value."""
    if isinstance(axis, Mapping) and axis.keys() == {"from", "to"}:
        first, last = axis["from"], axis["to"]
        if type(first) is type(last) is int and 0 <= last - first <= _LONGEST_RANGE:
            return list(range(first, last + 1))
    return list(axis) if isinstance(axis, list | tuple) else [axis]


def override_axis(block: Block, factor: str, values: Sequence[Any]) -> Block:
    """The block with `factor` running over `values` and nothing else; its place in the order stays."""
    zipped = tuple({k: v for k, v in table.items() if k != factor} for table in block.zip)
    return Block(
        grid={**block.grid, factor: list(values)},
        zip=tuple(table for table in zipped if table),
        exclude=block.exclude,
    )


def block_problems(block: Block) -> list[str]:
    """What keeps the block from being expanded: unequal tables, a factor named twice, an axis without values."""
    problems: list[str] = []
    seen = set(block.grid)
    problems += [f"grid: {factor} has no values" for factor, axis in block.grid.items() if axis in ([], ())]
    for table in block.zip:
        lengths = {factor: len(values_of(axis)) for factor, axis in table.items()}
        if len(set(lengths.values())) > 1:
            described = ", ".join(f"{factor} has {length}" for factor, length in lengths.items())
            problems.append(f"zip: lists stepped together must have one length, but {described}")
        problems += [
            f"{factor} is named twice, in zip and in grid or another zip" for factor in table if factor in seen
        ]
        seen |= set(table)
    return problems


def expand(block: Block) -> Iterator[Assignment]:
    """Every assignment of the block before exclusion. The block must have no `block_problems`."""
    for parts in itertools.product(*axes_of(block)):
        yield {factor: value for part in parts for factor, value in part.items()}


def axes_of(block: Block) -> list[list[Assignment]]:
    """What the block is the product of: for each axis and each zipped table its partial assignments, in order."""
    axes: list[list[Assignment]] = [
        [{factor: value} for value in values_of(axis)] for factor, axis in block.grid.items()
    ]
    for table in block.zip:
        columns = [values_of(axis) for axis in table.values()]
        axes.append([dict(zip(table, row, strict=True)) for row in zip(*columns, strict=True)])
    return axes


def excluded(assignment: Mapping[str, Any], exclude: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the partial matches fits: each of its factors has the given value, or one of the given list."""
    return any(
        bool(match)
        and all(
            factor in assignment
            and (assignment[factor] == wanted or (isinstance(wanted, list | tuple) and assignment[factor] in wanted))
            for factor, wanted in match.items()
        )
        for match in exclude
    )
