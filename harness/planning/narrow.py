"""`backend=` and `compute=` in a sweep whose blocks name their own: they keep the blocks that have what is named.

    blocks:
      - grid: {backend: layer_a, compute: deepgemm}
      - grid: {backend: fused_b, backend.options.staging: false}

Here `backend=fused_b` is the second block as it stands: an option or a stage of one block says nothing of another's
backend. A name that no block has goes to the blocks that take theirs from the part common to all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epcross.harness.planning.grid import override_axis, values_of
from epcross.harness.planning.schema import Block, Sweep

NARROWING = ("backend", "compute")
"""Who is measured. All other factors say how, and replace what the sweep says of them."""


def narrowed(
    sweep: Sweep,
    where: str,
    words: Mapping[str, list[Any]],
    known: Mapping[str, Collection[str]],
    problems: list[str],
) -> tuple[list[Block], set[str]]:
    """The products of `sweep` that `words` leave, and the factors that are narrowed, which nothing replaces any more.

    Args:
        where: what the sweep is called in sentences.
        words: factor -> values, of the command line.
        known: factor -> names that exist; a name that does not is somebody else's problem.
        problems: gets a sentence for each factor that the sweep has no block for.
    """
    pairs = list(zip(sweep.products(), sweep.blocks or (Block(),), strict=True))
    done = set()
    for factor in NARROWING:
        if factor in words and any(_values(own, factor) for _, own in pairs):
            values = [value for value in words[factor] if value in known[factor]]
            pairs = _kept(pairs, factor, values, where, problems)
            done.add(factor)
    return [product for product, _ in pairs], done


def without(blocks: Sequence[Block], absent: Sequence[str]) -> list[Block]:
    """The blocks without these backends; one that runs over no other is gone."""
    kept = []
    for block in blocks:
        backends = [name for name in values_of(block.grid.get("backend", [])) if name not in absent]
        if "backend" in block.grid and absent:
            block = replace(block, grid={**block.grid, "backend": backends})
        if backends or "backend" not in block.grid:
            kept.append(block)
    return kept


def _kept(
    pairs: Sequence[tuple[Block, Block]], factor: str, values: Sequence[str], where: str, problems: list[str]
) -> list[tuple[Block, Block]]:
    """Those of (product, its block alone) that have some of `values`, with these alone."""
    there = list(dict.fromkeys(value for product, _ in pairs for value in _values(product, factor)))
    new = [value for value in values if value not in there]
    homes = [product for product, own in pairs if _values(product, factor) and not _values(own, factor)]
    if factor == "compute" and not homes:  # a stage fits wherever there is one; a backend brings its block's settings
        homes = [product for product, _ in pairs if _values(product, factor)]
    if new and not homes:
        problems.append(
            f"{where} has no block for {factor}={','.join(new)}; each of its blocks names its own, of "
            f"{', '.join(map(str, there))}: choose among these, or take another sweep"
        )
    kept = []
    for product, own in pairs:
        here = _values(product, factor)
        wanted = [value for value in values if value in here or (value in new and product in homes)]
        if wanted:
            change = _restricted if all(value in here for value in wanted) else override_axis
            kept.append((change(product, factor, wanted), own))
    return kept


def _values(block: Block, factor: str) -> list[Any]:
    """The values that `factor` has in a block, none where it does not name it."""
    return [value for part in (block.grid, *block.zip) if factor in part for value in values_of(part[factor])]


def _restricted(block: Block, factor: str, wanted: Sequence[Any]) -> Block:
    """The block with those of its own values of `factor` that are `wanted`; rows of a zip stay whole."""
    grid = {**block.grid, factor: list(wanted)} if factor in block.grid else block.grid
    return Block(grid=grid, zip=tuple(_rows(table, factor, wanted) for table in block.zip), exclude=block.exclude)


def _rows(table: Mapping[str, Any], factor: str, wanted: Sequence[Any]) -> Mapping[str, Any]:
    """The rows of a table in which `factor` is `wanted`. A table without it, or with lists of unlike lengths, stays."""
    columns = {name: values_of(axis) for name, axis in table.items()}
    if factor not in columns or len({len(column) for column in columns.values()}) > 1:
        return table
    rows = [row for row, value in enumerate(columns[factor]) if value in wanted]
    return {name: [column[row] for row in rows] for name, column in columns.items()}
