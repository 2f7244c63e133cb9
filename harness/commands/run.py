"""`epcross run`: measure a sweep, or go on with a run that was interrupted."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from epcross.harness.commands import WIDTH, config_dir_option, json_option, overrides_argument
from epcross.harness.commands.attended import execute, exit_code

if TYPE_CHECKING:
    from epcross.harness.planning.plan import Plan
    from epcross.harness.running.launch import JobEnd
    from epcross.harness.running.session import Session


@click.command("run")
@overrides_argument
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    help="Go on with this run: its own plan, without the units that are stored.",
)
@click.option("--fail-fast", is_flag=True, help="End at the first row that is not as it should be.")
@config_dir_option
@json_option
def command(
    overrides: tuple[str, ...], resume: Path | None, fail_fast: bool, config_dirs: tuple[Path, ...], as_json: bool
) -> int:
    """Measure every point of a sweep: verify, time and verify again, on every rank. Ends with a table and the path of
    the run. Ctrl-C ends all ranks and keeps what is stored.

    With launcher=slurm the jobs are submitted and the command returns at once; `status`, `cancel` and `report` take the
    path of the run from then on.

    \b
    Exit code: 0 every row is as it should be: ok, or unsupported or unavailable with a reason
               1 a row is not, the run is not complete, or it was refused
               2 wrong usage
               3 nothing was measured: every row is unsupported or unavailable
               130 cancelled
    \b
    Example: epcross run sweep=quickstart
    """
    from epcross.harness.errors import ConfigError
    from epcross.harness.planning.build import build
    from epcross.harness.planning.plan import SLURM

    if resume and (overrides or config_dirs):
        raise ConfigError("--resume goes on with the plan of the run, so it takes no overrides and no --config-dir")
    plan = None if resume else build(overrides, config_dirs)
    if (plan.launcher.name == SLURM) if plan else _submitted_to_slurm(resume):
        from epcross.harness.slurm.submit_view import submit

        return submit(plan or resume, fail_fast=fail_fast, as_json=as_json)
    return _measure(plan or resume, fail_fast, as_json)


def _submitted_to_slurm(path: Path | None) -> bool:
    from epcross.harness.planning.plan import is_slurm_plan
    from epcross.harness.storing.store import open_run

    assert path is not None
    return is_slurm_plan(open_run(path).plan)


def _measure(what: "Plan | Path | None", fail_fast: bool, as_json: bool) -> int:
    """A new run of a plan, or the run at a path again, on this host."""
    from epcross.harness.commands.plan import absent_text
    from epcross.harness.planning.plan import Plan
    from epcross.harness.running import session as sessions

    assert what is not None
    session = sessions.start(what) if isinstance(what, Plan) else sessions.resume(what)
    session.fail_fast = fail_fast
    absent = session.plan.config.get("absent_backends")
    try:
        end = execute(session, said=absent_text(absent) if absent else "")
    except KeyboardInterrupt:
        click.echo(f"Go on with: epcross run --resume {session.run.path}", err=True)
        raise
    return _finish(session, end, as_json)


def _finish(session: "Session", end: "JobEnd", as_json: bool) -> int:
    from epcross.harness.analysis.known_issues import known_issue_lines, withdrawn_lines
    from epcross.harness.analysis.soak_table import failure_lines, soak_table, verified_rounds
    from epcross.harness.analysis.table import run_table
    from epcross.harness.analysis.unmeasured import why_unmeasured
    from epcross.harness.running.launch import End
    from epcross.harness.running.recorder import FINE
    from epcross.harness.storing.store import read_floor, read_units
    from epcross.harness.storing.withdrawn import withdrawn_beside
    from epcross.harness.terms import Status

    path = session.run.path
    units, problems = read_units(session.run)
    rows = [record for unit in units for record in unit.records]
    statuses = Counter(row.status for row in rows)
    planned = len(session.plan.points) * session.plan.timing.launches
    # with --json the document is all of stdout, and a person still sees the table
    console = Console(width=WIDTH if not sys.stdout.isatty() else None, highlight=False, stderr=as_json)
    floor = read_floor(session.run) or {}
    soaked = session.plan.soak is not None
    if rows:
        console.print(soak_table(rows, session.plan) if soaked else run_table(rows))
    for line in failure_lines(rows, session.plan) if soaked else ():
        console.print(line, soft_wrap=True, markup=False)
    issues = [
        *known_issue_lines(rows, session.plan.backends),
        *withdrawn_lines(rows, withdrawn_beside(session.run.units)),
    ]
    for line in issues:
        console.print(line, soft_wrap=True, markup=False)
    for name, entry in floor.items():
        console.print(_floor_line(name, entry), soft_wrap=True, markup=False)
    words = ", ".join(f"{count} {status}" for status, count in statuses.items()) or "no rows"
    console.print(f"{len(units)} of {planned} units: {words}", soft_wrap=True)
    for problem in problems:
        console.print(str(problem), soft_wrap=True, markup=False)
    if end.end is not End.DONE:
        console.print(f"The run is not complete: {end.reason}", soft_wrap=True, markup=False)
        console.print(f"Go on with: epcross run --resume {path}", soft_wrap=True, markup=False)
    unmeasured = why_unmeasured(rows) if end.end is End.DONE and not problems else None
    if unmeasured:
        console.print(unmeasured, soft_wrap=True, markup=False)
    console.print(str(path), soft_wrap=True, markup=False)
    # a soak ends when its time is over, wherever it is; to have verified nothing is no success
    allowed = FINE | {Status.SKIPPED} if soaked and verified_rounds(rows) else FINE
    no_floor = any("error" in entry for entry in floor.values())
    fine = end.end is End.DONE and not problems and not no_floor and set(statuses) <= allowed
    code = exit_code(end, fine=fine, measured=unmeasured is None)
    if as_json:
        summary = {
            "run_id": session.run.run_id,
            "path": str(path),
            "end": end.end,
            "exit_code": code,
            "reason": end.reason or None,
            "unmeasured": unmeasured,
            "known_issues": issues,
            "units": len(units),
            "planned_units": planned,
            "statuses": dict(statuses),
            "verified_rounds": verified_rounds(rows),
        }
        click.echo(json.dumps(summary))
    return code


def _floor_line(name: str, entry: dict[str, Any]) -> str:
    """The floor of one job: its numbers by name, or why there is none."""
    if "error" in entry:
        return f"floor of {name}: {entry['error']}"
    units = ("_us", "_gbps")
    numbers = [f"{key} {value:.3g}" for key, value in entry.items() if key.endswith(units) and isinstance(value, float)]
    return f"floor of {name}: {', '.join(numbers)}"
