"""`epcross doctor`: is this machine, or this cluster, fit for a sweep?"""

import json
from pathlib import Path

import click

from epcross.harness.commands import Number, config_dir_option, console, json_option, overrides_argument


@click.command("doctor", short_help="Check a machine or a cluster's nodes before measuring.")
@overrides_argument
@click.option("--nodes", type=click.IntRange(min=1), help="Look at that many nodes of the cluster.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results/doctor"),
    show_default=True,
    help="Where the ranks of a cluster leave what they saw; every node must see it.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Number(min=1.0),
    default=1800.0,
    show_default=True,
    help="Seconds to wait for the job.",
)
@config_dir_option
@json_option
def command(
    overrides: tuple[str, ...],
    nodes: int | None,
    folder: Path,
    wait_s: float,
    config_dirs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Show what every rank sees, which baselines can run, what is wrong and what to do about it. Without a cluster it
    is this host; with cluster=NAME a short job looks at the compute nodes. With sweep=NAME it is judged by what that
    sweep needs. The exit code is 0 if nothing stops the sweep, else 1.

    \b
    Example: epcross doctor cluster=h200_x8 cluster.partition=gpu
    """
    from epcross.harness.doctor.examination import examine_request
    from epcross.harness.doctor.view import document, is_ready, show

    facts, found = examine_request(overrides, config_dirs, nodes, folder, wait_s)
    if as_json:
        click.echo(json.dumps(document(facts, found)))
    else:
        show(facts, found, console())
    return 0 if is_ready(found) else 1
