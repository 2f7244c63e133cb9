"""What `epcross plan launcher=slurm` shows: the jobs, what they cost, and the scripts that would be submitted."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from epcross.harness.backends.base import Backend
from epcross.harness.backends.loader import CannotImport
from epcross.harness.commands import console
from epcross.harness.commands.plan import duration
from epcross.harness.errors import ConfigError
from epcross.harness.planning.estimate import job_need, usable_cores
from epcross.harness.planning.plan import Plan
from epcross.harness.slurm import layout, script
from epcross.harness.slurm.layout import Piece
from epcross.harness.slurm.submit import job_label, problems

MOST_SCRIPTS = 4
"""Scripts that are printed; they differ in little. `--json` has all."""

RUN = "RUN"
"""Stands for the run folder, which has no name yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one piece takes."""

    time_s: float | None  # None: its backends cannot be imported here, so nothing is known
    starts: int  # jobs in a row that its time limit makes of it
    gpu_hours: float
    node_hours: float


def show(plan: Plan, as_json: bool, print_points: Callable[[Plan], None]) -> None:
    """Print the plan of a run on Slurm.

    Raises:
        ConfigError: it cannot be run there.
    """
    if found := problems(plan):
        raise ConfigError(found)
    pieces = layout.pieces(plan)
    costs = {piece.name: cost_of(piece, plan) for piece in pieces}
    arrays = layout.arrays(pieces, plan.cluster.max_array_size)
    if as_json:
        click.echo(json.dumps(_document(plan, pieces, costs, arrays)))
        return
    print_points(plan)
    out = console()
    out.print(_table(pieces, costs))
    out.print(Text(total_line(plan, costs)), soft_wrap=True)
    for parts in arrays[:MOST_SCRIPTS]:
        out.print(Text(f"\nThe script for {_names(parts)}:"), soft_wrap=True)
        out.print(Text(script_text(plan, parts)), soft_wrap=True)
    if len(arrays) > MOST_SCRIPTS:
        out.print(f"and {len(arrays) - MOST_SCRIPTS} more; --json has all")
    if plan.cluster.arch and plan.cluster.container == "":
        out.print(
            Text(f"Nodes of cluster={plan.cluster.name} are {plan.cluster.arch}: Python and libraries must be too."),
            soft_wrap=True,
        )


def cost_of(piece: Piece, plan: Plan) -> Cost:
    """What a piece takes, roughly."""
    backends: dict[tuple[str, Any], Backend] = {}
    cores = (plan.cluster.cores_per_node or usable_cores()) * piece.layout.nodes
    try:
        time_s: float | None = job_need(piece.job, plan, cores, backends).time_s
    except CannotImport:
        time_s = None
    # of an unknown time, the price is that of a whole job
    charged_s = plan.cluster.time_min * 60.0 if time_s is None else time_s
    usable_s = plan.cluster.time_min * 60.0 - plan.cluster.signal_delay_s
    nodes = piece.layout.nodes
    return Cost(
        time_s=time_s,
        starts=max(1, math.ceil(charged_s / usable_s)) if time_s is not None else 1,
        gpu_hours=nodes * piece.layout.paid_gpus_per_node * charged_s / 3600,
        node_hours=nodes * charged_s / 3600,
    )


def total_line(plan: Plan, costs: dict[str, Cost]) -> str:
    """What all pieces take."""
    known = [cost.time_s for cost in costs.values() if cost.time_s is not None]
    gpu_hours = sum(cost.gpu_hours for cost in costs.values())
    node_hours = sum(cost.node_hours for cost in costs.values())
    longest = f"about {duration(max(known))} once all jobs run" if known else "not known"
    return (
        f"{len(costs)} job{'s' if len(costs) != 1 else ''}: {gpu_hours:.3g} GPU-hours, {node_hours:.3g} node-hours; "
        f"wall time {longest}, at most {plan.cluster.time_min} min a start; results go to {plan.output_dir}"
    )


def script_text(plan: Plan, parts: tuple[Piece, ...]) -> str:
    """The script for some pieces, in a run that has no name yet."""
    return script.text(plan.cluster, parts, job_label(f"-{RUN}", parts), plan.output_dir / RUN / script.FOLDER)


def _document(
    plan: Plan, pieces: tuple[Piece, ...], costs: dict[str, Cost], arrays: list[tuple[Piece, ...]]
) -> dict[str, Any]:
    return {
        **plan.to_json(),
        "slurm": {
            "jobs": [
                {
                    "name": piece.name,
                    "points": len(piece.job.points),
                    **asdict(piece.layout),
                    **asdict(costs[piece.name]),
                }
                for piece in pieces
            ],
            "gpu_hours": sum(cost.gpu_hours for cost in costs.values()),
            "scripts": [
                {"jobs": [piece.name for piece in parts], "text": script_text(plan, parts)} for parts in arrays
            ],
        },
    }


def _table(pieces: tuple[Piece, ...], costs: dict[str, Cost]) -> Table:
    table = Table(expand=True, title="Slurm jobs", title_justify="left")
    table.add_column("job", ratio=1)
    table.add_column("backends", ratio=1)
    for heading in ("points", "nodes", "ranks/node", "GPUs/node", "time", "starts", "GPU-hours"):
        table.add_column(heading, justify="right")
    for piece in pieces:
        cost = costs[piece.name]
        table.add_row(
            Text(piece.name),
            Text(", ".join(piece.job.backends) or "floor only"),
            str(len(piece.job.points)),
            str(piece.layout.nodes),
            str(piece.layout.ranks_per_node),
            str(piece.layout.gpus_per_node),
            "?" if cost.time_s is None else duration(cost.time_s),
            str(cost.starts),
            f"{cost.gpu_hours:.3g}",
        )
    return table


def _names(parts: tuple[Piece, ...]) -> str:
    return parts[0].name if len(parts) == 1 else f"{parts[0].name} to {parts[-1].name}"
