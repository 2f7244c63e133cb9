"""`epcross status`: how far a run is, from its files, and of a run on Slurm from Slurm's word as well."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from epcross.harness.commands import WIDTH, json_option

SHOWN_FAILURES = 5


@click.command("status")
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def command(run: Path, as_json: bool) -> None:
    """Show whether a run is running, interrupted or finished, its rows by status, and its last failures. Reads files
    only, so it works while the run goes on and on any machine that sees them. Of a run on Slurm it shows every job: its
    state, how often it was started, what keeps it, and what to do.

    With --json, `reasons` has why rows have no number, the commonest first: backend, status, reason, and how many rows.

    \b
    Example: epcross status results/runs/20260131-120000-quickstart-1a2b
    """
    from epcross.harness.analysis.known_issues import withdrawn_lines
    from epcross.harness.analysis.table import status_table
    from epcross.harness.analysis.unmeasured import reasons_of, why_unmeasured
    from epcross.harness.planning.plan import SLURM, Plan
    from epcross.harness.running.display import failure_line, progress_line
    from epcross.harness.running.progress import Pace, ProgressReader
    from epcross.harness.storing.store import missing_rows, open_run, owner_of, read_units
    from epcross.harness.storing.withdrawn import withdrawn_beside

    directory = open_run(run)
    plan = Plan.from_json(directory.plan)
    units, problems = read_units(directory)
    if plan.launcher.name == SLURM:
        from epcross.harness.slurm.status_view import show

        return show(directory, plan, units, problems, as_json)
    rows = [record for unit in units for record in unit.records]
    pace = Pace()
    notes = ProgressReader(run).read()
    for note in notes:
        pace.take(note)
    owner = owner_of(run)
    missing = missing_rows(units, plan.points, plan.timing)
    state = "running" if owner else "interrupted" if missing else "finished"
    planned = len(plan.points) * plan.timing.launches
    unmeasured = why_unmeasured(rows) if state == "finished" else None
    if as_json:
        statuses: dict[str, int] = {}
        for row in rows:
            statuses[row.status] = statuses.get(row.status, 0) + 1
        document: dict[str, Any] = {
            "run_id": directory.run_id,
            "state": state,
            "owner": owner,
            "units": len(units),
            "planned_units": planned,
            "missing_rows": len(missing),
            "statuses": statuses,
            "reasons": reasons_of(rows),
            "unmeasured": unmeasured,
            "eta_s": pace.eta_s if owner else None,
            "problems": [str(problem) for problem in problems],
            "failures": pace.failures[-SHOWN_FAILURES:],
        }
        click.echo(json.dumps(document))
        return None
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(f"{directory.run_id}: {state}" + (f" by {owner}" if owner else ""), soft_wrap=True, markup=False)
    if owner:
        console.print(progress_line(pace), soft_wrap=True, markup=False)
    console.print(status_table(rows, planned_units=planned, done_units=len(units), problems=problems))
    for line in withdrawn_lines(rows, withdrawn_beside(directory.units)):
        console.print(line, soft_wrap=True, markup=False)
    for note in pace.failures[-SHOWN_FAILURES:]:
        console.print(failure_line(note), soft_wrap=True, markup=False)
    if unmeasured:
        console.print(unmeasured, soft_wrap=True, markup=False)
    if state == "interrupted":
        last = next((note for note in reversed(notes) if note["event"] in ("end", "session")), None)
        if last and last["event"] == "end" and last["reason"]:
            console.print(f"It ended early: {last['reason']}", soft_wrap=True, markup=False)
        console.print(f"Go on with: epcross run --resume {run}", soft_wrap=True, markup=False)
    return None
