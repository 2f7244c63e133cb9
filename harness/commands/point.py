"""`epcross point`: one stored point again, alone, to see whether it repeats or to look into it with a profiler."""

import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from epcross.harness.commands import WIDTH, warnings_as_lines
from epcross.harness.commands.attended import execute, exit_code

if TYPE_CHECKING:
    from epcross.harness.record import Record
    from epcross.harness.running.find_point import FoundPoint

RUNS = Path("results/runs")
PATIENCE = 10
"""Times the wall limit under a profiler, which may slow a worker down by as much."""


@click.command("point")
@click.argument("point_id")
@click.option(
    "--run",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The run that holds it, instead of the newest in results/runs that does.",
)
@click.option(
    "--profile", default="", help="Command that each worker is started under; {rank} and {log} are filled in."
)
@click.option(
    "--output-dir", default=RUNS, show_default=True, type=click.Path(path_type=Path), help="Where the new run goes."
)
def command(point_id: str, run: Path | None, profile: str, output_dir: Path) -> int:
    """Measure one stored point again, alone: one launch with all its seeds and chains, verified as ever. Prints its
    rows beside the stored ones and keeps them as a run of its own. The first digits of the id are enough.

    With --profile, workers run under the command given, such as 'perf record -o {log}'; their rows are flagged
    `profiled`, since they pay for it.

    The exit code is that of `epcross run`: 0 only if the rows are as they should be, 3 if nothing was measured.

    \b
    Example: epcross point 3f2a --profile 'strace -f -o {log}'
    """
    from epcross.harness.analysis.beside import beside_table, differences
    from epcross.harness.analysis.known_issues import known_issue_lines
    from epcross.harness.analysis.unmeasured import why_unmeasured
    from epcross.harness.planning.build import alone
    from epcross.harness.running import session as sessions
    from epcross.harness.running.find_point import describe, find_point, runs_in
    from epcross.harness.running.launch import End
    from epcross.harness.running.recorder import FINE
    from epcross.harness.storing.store import read_units

    _check_profile(profile)
    with warnings_as_lines():
        found = find_point(point_id, [run] if run else runs_in(RUNS))
    note = f"Point {found.point.point_id} of run {found.run.run_id} again, alone" + (
        f", under: {profile}" if profile else ""
    )
    timing = replace(found.plan.timing, launches=1)
    if profile:
        timing = replace(timing, wall_limit_s=timing.wall_limit_s * PATIENCE)
    with warnings_as_lines():
        stored = _stored(found)
    session = sessions.start(alone(found.plan, found.point, timing=timing, output_dir=output_dir, note=note))
    session.profile = profile
    end = execute(session)

    console = Console(width=WIDTH if not sys.stdout.isatty() else None, highlight=False)
    now = [record for unit in read_units(session.run)[0] for record in unit.records]
    console.print(Text(f"{found.point.point_id} of {found.run.run_id}: {describe(found.point)}"), soft_wrap=True)
    console.print(beside_table(now, stored))
    for line in [*differences(now, stored), *known_issue_lines(now, session.plan.backends)]:
        console.print(Text(line), soft_wrap=True)
    if end.end is not End.DONE:
        console.print(f"The run is not complete: {end.reason}", soft_wrap=True, markup=False)
    if profile:
        logs = sorted(session.run.logs.glob("*.profile*"))
        console.print(Text(f"From the profiler: {', '.join(map(str, logs))}" if logs else ""), soft_wrap=True)
    unmeasured = why_unmeasured(now) if end.end is End.DONE else None
    if unmeasured:
        console.print(unmeasured, soft_wrap=True, markup=False)
    console.print(str(session.run.path), soft_wrap=True, markup=False)
    fine = end.end is End.DONE and {record.status for record in now} <= FINE
    return exit_code(end, fine=fine, measured=unmeasured is None)


def _check_profile(profile: str) -> None:
    from epcross.harness.errors import ConfigError

    try:
        words = shlex.split(profile)
    except ValueError as error:
        raise ConfigError(f"--profile {profile!r} cannot be read: {error}; write it as in a shell") from error
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"--profile: there is no command '{words[0]}'; install it or give its path")


def _stored(found: "FoundPoint") -> list["Record"]:
    from epcross.harness.record import Record
    from epcross.harness.storing.parquet import read_rows_table

    rows = read_rows_table(found.rows).to_pylist()
    own = (found.point.point_id, found.run.run_id)
    return [Record(**row) for row in rows if (row["point_id"], row["run_id"]) == own]
