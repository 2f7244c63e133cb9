"""`epcross compare`: which points became slower or faster from one run to another; for CI by its exit code."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epcross.harness.commands import Number, console, json_option, warnings_as_lines
from epcross.harness.errors import InputError, StoreError
from epcross.harness.terms import Flag

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 40


@click.command("compare")
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option(
    "--margin",
    type=Number(min=0, max=10),
    default=0.03,
    show_default=True,
    help="Share by which two latencies may differ and still count as equal.",
)
@click.option(
    "--keep",
    multiple=True,
    type=click.Choice([flag.value for flag in Flag]),
    help=(
        "Use rows with this flag too; may be given several times. Without it flagged rows are left out, "
        "but for within_launch and power_capped, which captions say."
    ),
)
@json_option
def command(run_a: Path, run_b: Path, margin: float, keep: tuple[str, ...], as_json: bool) -> int:
    """Compare run B with run A, each a run directory, a merged folder or a rows.parquet, point by point, worst first.

    A point is slower or faster if its median changed by more than the margin and the 95 % interval of the ratio leaves
    1 out; equal if the whole interval lies within the margin; unclear otherwise, as always with one or two launches.

    \b
    Exit code: 0 no round trip (or layer) is slower
               1 at least one is slower beyond the margin
               2 wrong usage, or a run cannot be read
               3 no round trip (or layer) could be compared
    \b
    Example: epcross compare results/runs/BEFORE results/runs/AFTER --margin 0.05
    """
    from epcross.harness.analysis import frame
    from epcross.harness.analysis.compare import compare, exit_code
    from epcross.harness.analysis.compare_table import compare_table

    try:
        with warnings_as_lines():
            frames = [frame.load(path) for path in (run_a, run_b)]
    except StoreError as error:
        raise InputError(str(error)) from error  # its own exit code, 1, means slower here
    compared = compare(*frames, margin=margin, keep=keep)
    code = exit_code(compared)
    if as_json:
        runs = [sorted(map(str, rows["run_id"].unique())) for rows in frames]
        document = {
            "runs_a": runs[0],
            "runs_b": runs[1],
            "margin": margin,
            "exit_code": code,
            "verdicts": {str(verdict): int(count) for verdict, count in compared["verdict"].value_counts().items()},
            "left_out": compared.attrs["note"],
            "points": _plain(compared),
        }
        click.echo(json.dumps(document, allow_nan=False))
    else:
        console().print(compare_table(compared, *frames, shown=SHOWN))
    return code


def _plain(compared: "pd.DataFrame") -> list[dict[str, Any]]:
    """The lines as JSON values: what is missing or infinite is null."""

    import pandas as pd

    def plain(value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        if value is pd.NA:
            return None
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{name: plain(value) for name, value in line.items()} for line in compared.to_dict("records")]
