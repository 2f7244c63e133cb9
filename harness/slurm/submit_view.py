"""`epcross run` with launcher=slurm: submit, say what was submitted, return."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from epcross.harness.analysis.unmeasured import why_unmeasured
from epcross.harness.commands import WIDTH
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.planning.plan import Plan
from epcross.harness.slurm import submit as submission
from epcross.harness.storing.units import read_units


def submit(what: Plan | Path | None, *, fail_fast: bool, as_json: bool) -> int:
    """A new run of a plan, or the run at a path again. Returns once its jobs are in the queue: the exit code of
    `epcross run`, 0 if there are any."""
    assert what is not None
    run, jobs = (
        submission.start(what, fail_fast=fail_fast)
        if isinstance(what, Plan)
        else submission.resume(what, fail_fast=fail_fast)
    )
    console = Console(width=WIDTH if not sys.stdout.isatty() else None, highlight=False, stderr=as_json)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    for job in jobs:
        say(
            f"job {job.job_id}: {job.piece}, {job.nodes} nodes x {job.ranks_per_node} ranks, {job.time_min} min a start"
        )
    unmeasured = None
    if not jobs:
        unmeasured = why_unmeasured([record for unit in read_units(run)[0] for record in unit.records])
        say("Nothing is left to submit: every planned unit is stored, or cannot run and says why.")
    if unmeasured:
        say(unmeasured)
    say(f"How far it is: epcross status {run.path}")
    say(str(run.path))
    code = NOTHING_SHOWN if unmeasured else 0
    if as_json:
        document = {
            "run_id": run.run_id,
            "path": str(run.path),
            "exit_code": code,
            "jobs": {job.piece: job.job_id for job in jobs},
            "unmeasured": unmeasured,
        }
        click.echo(json.dumps(document))
    return code
