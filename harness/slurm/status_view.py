"""`epcross status` of a run on Slurm: every job, what keeps it, and what to do."""

import json
import sys
from collections import Counter
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epcross.harness.analysis.known_issues import withdrawn_lines
from epcross.harness.analysis.table import status_table
from epcross.harness.analysis.unmeasured import reasons_of, why_unmeasured
from epcross.harness.commands import WIDTH
from epcross.harness.commands.plan import duration
from epcross.harness.planning.plan import Plan
from epcross.harness.record import UnitResult
from epcross.harness.running.display import failure_line
from epcross.harness.slurm.follow import PieceState, PieceView, RunView, view
from epcross.harness.storing.run_directory import RunDirectory
from epcross.harness.storing.units import UnitProblem, missing_rows
from epcross.harness.storing.withdrawn import withdrawn_beside

SHOWN_FAILURES = 5


def show(
    run: RunDirectory, plan: Plan, units: list[UnitResult], problems: Sequence[UnitProblem], as_json: bool
) -> None:
    """Print how far a run is."""
    seen = view(run, plan, units)
    rows = [record for unit in units for record in unit.records]
    planned = len(plan.points) * plan.timing.launches
    unmeasured = why_unmeasured(rows) if seen.state == "finished" else None
    failures = [note for piece in seen.pieces for note in piece.pace.failures][-SHOWN_FAILURES:]
    if as_json:
        document = {
            "run_id": run.run_id,
            "state": seen.state,
            "slurm_silent": seen.silent or None,
            "units": len(units),
            "planned_units": planned,
            "missing_rows": len(missing_rows(units, plan.points, plan.timing)),
            "statuses": dict(Counter(str(row.status) for row in rows)),
            "reasons": reasons_of(rows),
            "unmeasured": unmeasured,
            "jobs": [_entry(piece) for piece in seen.pieces],
            "problems": [str(problem) for problem in problems],
            "failures": failures,
        }
        click.echo(json.dumps(document))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(f"{run.run_id}: {seen.state}", soft_wrap=True, markup=False)
    console.print(_table(seen))
    for piece in seen.pieces:
        for line in _lines(piece):
            console.print(line, soft_wrap=True, markup=False)
    if seen.silent:
        console.print(
            f"Slurm cannot be asked ({seen.silent}); this is what the files say.", soft_wrap=True, markup=False
        )
    console.print(status_table(rows, planned_units=planned, done_units=len(units), problems=problems))
    for line in withdrawn_lines(rows, withdrawn_beside(run.units)):
        console.print(line, soft_wrap=True, markup=False)
    if unmeasured:
        console.print(unmeasured, soft_wrap=True, markup=False)
    for note in failures:
        console.print(failure_line(note), soft_wrap=True, markup=False)


def _table(seen: RunView) -> Table:
    table = Table(expand=True)
    table.add_column("job", ratio=1)
    table.add_column("id")
    table.add_column("state")
    table.add_column("Slurm says", ratio=1)
    table.add_column("nodes", ratio=1)
    for heading in ("starts", "units"):
        table.add_column(heading, justify="right")
    for piece in seen.pieces:
        cells = (
            piece.piece.name,
            piece.job.job_id if piece.job else "-",
            str(piece.state),
            piece.slurm or "-",
            piece.nodes or "-",
            str(piece.starts),
            f"{piece.done} of {piece.planned}",
        )
        table.add_row(*map(Text, cells))
    return table


def _lines(piece: PieceView) -> list[str]:
    """What a person should know of a job besides its line in the table."""
    name = piece.piece.name
    if piece.state is PieceState.RUNNING:
        eta = "" if piece.pace.eta_s is None else f", about {duration(piece.pace.eta_s)} left"
        doing = piece.why or piece.pace.turn
        return [f"{name}: {doing or 'starting'}{eta}"]
    if piece.state is PieceState.FINISHED:
        return []
    words = [word for word in (piece.why, piece.next_step and f"next: {piece.next_step}") if word]
    return [f"{name}: {'. '.join(words)}"] if words else []


def _entry(piece: PieceView) -> dict[str, object]:
    return {
        "name": piece.piece.name,
        "job_id": piece.job.job_id if piece.job else None,
        "state": str(piece.state),
        "slurm": piece.slurm or None,
        "nodes": piece.nodes or None,
        "starts": piece.starts,
        "units": piece.done,
        "planned_units": piece.planned,
        "eta_s": piece.pace.eta_s if piece.state is PieceState.RUNNING else None,
        "why": piece.why or None,
        "next": piece.next_step or None,
    }
