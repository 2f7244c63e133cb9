"""`epcross` in a process of its own, on these sources: what tests of whole runs start and look at."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from _spawn import PYTHONPATH
from epcross.harness.planning.plan import Plan
from epcross.harness.record import Record
from epcross.harness.storing.store import missing_rows, open_run, read_units


def epcross(
    folder: Path, *words: str, limit_s: float = 120.0, imports: str = PYTHONPATH, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """`epcross WORDS` in `folder`, to its end, with `imports` as Python's path and `variables` in its environment; it
    may fail, but with words of its own."""
    ended = subprocess.run(
        # -P, as the installed command has it: what lies in `folder` is none of its modules
        [sys.executable, "-P", "-m", "epcross.harness.cli", *words],
        env={**os.environ, "PYTHONPATH": imports, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert "Traceback" not in ended.stdout + ended.stderr
    return ended


def write_backends(folder: Path, targets: Mapping[str, str]) -> None:
    """A configuration folder with a backend of each name, whose class is the target."""
    (folder / "backend").mkdir()
    for name, target in targets.items():
        (folder / "backend" / f"{name}.yaml").write_text(f'target: {target}\nlabel: {name}\ncolor: "#777777"\n')


def rows_of(path: Path) -> list[Record]:
    """All rows of a run; every planned one is there, once."""
    run = open_run(path)
    units, problems = read_units(run)
    assert problems == []
    plan = Plan.from_json(run.plan)
    assert missing_rows(units, plan.points, plan.timing) == []
    return [record for unit in units for record in unit.records]
