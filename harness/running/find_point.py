"""From the first digits of a point's id to the run that holds it."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from epcross.harness.analysis.inputs import option_words
from epcross.harness.errors import StoreError
from epcross.harness.planning.plan import Plan
from epcross.harness.planning.tokens import counted, nominal_words
from epcross.harness.point import Point
from epcross.harness.storing.run_directory import RunDirectory, open_run

MOST_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPoint:
    """A stored point: its run's documents, its plan, and the folder that holds its rows."""

    run: RunDirectory
    plan: Plan
    point: Point
    rows: Path  # a run directory, or a folder of tables


def runs_in(folder: Path) -> list[Path]:
    """The run directories that lie directly in `folder`, newest first, by their names."""
    return sorted((path.parent for path in folder.glob("*/run.json")), key=lambda path: path.name, reverse=True)


def documents(path: Path) -> list[Path]:
    """The folders with the documents of the runs at `path`: a run directory itself, or a folder that `merge` made.

    Raises:
        StoreError: it is neither.
    """
    found = [path] if (path / "run.json").exists() else runs_in(path / "runs")
    if not found:
        raise StoreError(f"{path} holds no run: neither run.json nor runs/*/run.json. Give the path of a run")
    return found


def find_point(prefix: str, runs: Sequence[Path]) -> FoundPoint:
    """The point whose id begins with `prefix`, in the first of `runs` that holds it.

    Of several runs those that cannot be read are passed over, with a warning each.

    Raises:
        StoreError: no point or several distinct ones begin so, or the only run cannot be read.
    """
    found: dict[str, FoundPoint] = {}
    for path in runs:
        try:
            for folder in documents(path):
                run = open_run(folder)
                plan = Plan.from_json(run.plan)
                for point in plan.points:
                    if point.point_id.startswith(prefix.lower()):
                        found.setdefault(point.point_id, FoundPoint(run=run, plan=plan, point=point, rows=path))
        except StoreError as error:
            if len(runs) == 1:
                raise
            warnings.warn(f"not looked into: {error}", stacklevel=2)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        where = f"{len(runs)} runs, the first {runs[0]}" if runs else "no run, for results/runs here holds none"
        raise StoreError(
            f"no point begins with {prefix}; looked into {where}. Name the run with --run; its point ids stand in "
            "plan.json and in the column point_id"
        )
    raise StoreError(f"{len(found)} points begin with '{prefix}'; give more digits of one:\n" + _listed(found.values()))


def describe(point: Point) -> str:
    """A point in one line."""
    options = "".join(f" {option_words(*each)}" for each in point.options)
    stage = f" with {point.compute}" if point.compute else ""
    stage += "".join(f" {option_words(*each)}" for each in point.compute_options)
    tokens = nominal_words(point.tokens_per_rank, min(point.tokens), sum(point.tokens), point.ep_size)
    stage += f", {point.weight_format} weights" if point.weight_format else ""
    return (
        f"{point.backend}{options}{stage}, EP {point.ep_size}, {counted(tokens)} per rank, "
        f"{point.model.name}, {point.routing.kind} routing, {point.placement.kind}, {point.dispatch_format} out, "
        f"{point.combine_format} back, {point.regime}, {point.domain}"
    )


def _listed(found: Iterable[FoundPoint]) -> str:
    lines = [f"  {each.point.point_id}  {describe(each.point)}  ({each.run.run_id})" for each in found]
    more = [f"  and {len(lines) - MOST_LISTED} more"] if len(lines) > MOST_LISTED else []
    return "\n".join(lines[:MOST_LISTED] + more)
