"""`epcross reproduce`: from a published statement to a verdict on it, on this machine or a cluster."""

from pathlib import Path

import click

from epcross.harness.commands import config_dir_option, json_option


@click.command("reproduce", short_help="Measure what a published statement needs, and judge it.")
@click.argument("words", nargs=-1, metavar="[STATEMENT | KEY=VALUE]...")
@click.option("--collect", is_flag=True, help="Measure nothing: judge by the newest runs of these statements.")
@click.option("--rehearse", is_flag=True, help="Walk the same path in minutes, with tiny points on CPUs.")
@click.option("--plan", "plan_only", is_flag=True, help="Stop before anything is submitted or measured.")
@click.option("--no-doctor", is_flag=True, help="Do not look at the machine first.")
@config_dir_option
@json_option
def command(
    words: tuple[str, ...],
    collect: bool,
    rehearse: bool,
    plan_only: bool,
    no_doctor: bool,
    config_dirs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Reproduce STATEMENTs: ids of claims such as P01, or names of their sweeps; all of them if none is named. First
    the doctor looks at the machine, then the plan is shown with its GPU-hours, then every sweep is submitted to
    cluster=NAME, or measured here. Later, from any shell, --collect prints published | ours | ratio | verdict.

    \b
    Example: epcross reproduce P06 cluster=gb200_nvl72 cluster.partition=batch
             epcross reproduce P06 --collect
    """
    from epcross.harness.reproduction.path import Request, walk

    request = Request(
        names=tuple(word for word in words if "=" not in word),
        overrides=tuple(word for word in words if "=" in word),
        config_dirs=config_dirs,
        rehearse=rehearse,
        plan_only=plan_only,
        doctor=not no_doctor,
        as_json=as_json,
    )
    return walk(request, collect=collect)
