"""`epcross cancel` of a run on Slurm: ask the ranks, tell Slurm, wait for both."""

import subprocess
import time

import click

from epcross.harness.errors import EpcrossError, StoreError
from epcross.harness.running.session import CANCEL_FILE
from epcross.harness.slurm.state import PENDING
from epcross.harness.slurm.state import run as run_command
from epcross.harness.slurm.submit import alive_jobs
from epcross.harness.storing.run_directory import RunDirectory

ORDERLY_S = 5.0
"""For running ranks to end by themselves; then Slurm ends them."""

POLL_S = 0.5


def cancel(run: RunDirectory, wait_s: float) -> int:
    """End every job of the run. What is stored stays.

    Raises:
        EpcrossError: Slurm cannot be asked or told.
    """
    alive = alive_jobs(run)
    if not alive:
        click.echo(f"{run.path} has no job in the queue; nothing to cancel.")
        return 0
    try:
        (run.path / CANCEL_FILE).touch()  # running ranks see it, and end in good order
    except OSError as error:
        raise StoreError(f"cannot ask {run.path} to end: {error.strerror}; make the folder writable") from error
    _scancel([job_id for job_id, state in alive.items() if state.word in PENDING])
    begin = time.monotonic()
    told = False
    while alive := alive_jobs(run):
        waited_s = time.monotonic() - begin
        if not told and waited_s > min(ORDERLY_S, wait_s):
            _scancel(list(alive))
            told = True
        if waited_s > wait_s and told:
            words = ", ".join(f"{job_id} is {state.word}" for job_id, state in alive.items())
            click.echo(f"{run.path} was cancelled, and Slurm has not ended its jobs yet: {words}.", err=True)
            return 1
        time.sleep(POLL_S)
    click.echo(f"{run.path} has ended. Go on with: epcross run --resume {run.path}")
    return 0


def _scancel(ids: list[str]) -> None:
    if not ids:
        return
    try:
        result = run_command(["scancel", *ids])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EpcrossError(f"scancel gives no answer ({error}); cancel jobs {' '.join(ids)} on a login host") from error
    if result.returncode and "Invalid job id" not in result.stderr:
        raise EpcrossError(f"scancel {' '.join(ids)}: {' '.join(result.stderr.split())}")
