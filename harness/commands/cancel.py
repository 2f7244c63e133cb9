"""`epcross cancel`: end a run from another shell, or another host that sees its folder."""

import time
from pathlib import Path

import click

from epcross.harness.commands import Number

POLL_S = 0.1


@click.command("cancel")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--wait", "wait_s", type=Number(min=0), default=15.0, show_default=True, help="Seconds to wait for its end."
)
def command(run: Path, wait_s: float) -> int:
    """End all ranks of a run in good order and wait until it is over. What is stored stays, and the run can be resumed.

    \b
    Example: epcross cancel results/runs/20260131-120000-quickstart-1a2b
    """
    from epcross.harness.errors import StoreError
    from epcross.harness.planning.plan import is_slurm_plan
    from epcross.harness.running.session import CANCEL_FILE
    from epcross.harness.storing.store import open_run, owner_of

    directory = open_run(run)  # says what is wrong with the path
    if is_slurm_plan(directory.plan):
        from epcross.harness.slurm.cancel import cancel

        return cancel(directory, wait_s)
    if owner_of(run) is None:
        click.echo(f"{run} is not running; nothing to cancel.")
        return 0
    try:
        (run / CANCEL_FILE).touch()
    except OSError as error:
        raise StoreError(f"cannot ask {run} to end: {error.strerror}; make the folder writable") from error
    deadline = time.monotonic() + wait_s
    while owner := owner_of(run):
        if time.monotonic() > deadline:
            click.echo(
                f"{run} was asked to end and is still owned by {owner}; try again, or kill that process.", err=True
            )
            return 1
        time.sleep(POLL_S)
    click.echo(f"{run} has ended. Go on with: epcross run --resume {run}")
    return 0
