"""What a report is made of: the runs as they lie on disk, with everything that is wrong about them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epcross.harness.errors import ConfigError
from epcross.harness.planning.plan import Plan
from epcross.harness.record import Record
from epcross.harness.storing.parquet import ROWS_FILE, SAMPLES_FILE, read_rows_table, read_samples_table, samples_table
from epcross.harness.storing.run_directory import RunDirectory, open_run, read_floor
from epcross.harness.storing.units import missing_rows, planned_keys, read_units
from epcross.harness.storing.withdrawn import Withdrawal, withdrawn_beside

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, opened: its rows, its floor, and what it lacks."""

    directory: RunDirectory
    plan: Plan
    records: tuple[Record, ...]
    samples: "pa.Table"  # of SAMPLES_SCHEMA
    floor: dict[str, Any]  # by job; empty if none was measured
    missing: int  # planned rows that are not there
    problems: tuple[str, ...]  # unit files that cannot be used
    withdrawn: tuple[Withdrawal, ...] = ()  # of its rows, as wrong

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self.directory.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Runs of one domain, their rows in one list and their samples in one long frame."""

    runs: tuple[Run, ...]
    samples: "pd.DataFrame"  # run_id, point_id, phase, repeat, rank, iteration, value_us
    frame: "pd.DataFrame"  # the rows as `frame.load` gives them, for fits and crossovers

    @property
    def records(self) -> tuple[Record, ...]:
        """The rows of all runs."""
        return tuple(record for run in self.runs for record in run.records)

    def floor(self, run_id: str, ep_size: int) -> dict[str, Any] | None:
        """The floor that `run_id` measured at this EP size; None if it has none."""
        for run in self.runs:
            for entry in run.floor.values():
                if run.run_id == run_id and entry.get("ep_size") == ep_size and "error" not in entry:
                    return entry
        return None


def load(paths: Sequence[Path]) -> Material:
    """The runs at `paths`: run directories, and merged folders with all the runs in them.

    Raises:
        StoreError: a path is neither, or one of its documents is damaged.
        ConfigError: a run is given twice, or the runs are of several domains.
    """
    import pyarrow as pa

    from epcross.harness.analysis.frame import load as load_frame

    runs = open_runs(paths)
    domains = {run.run_id: sorted({str(point.domain) for point in run.plan.points}) for run in runs}
    if len({domain for found in domains.values() for domain in found}) > 1:
        found = "; ".join(f"{run_id}: {', '.join(words)}" for run_id, words in domains.items())
        raise ConfigError(f"rows of different domains do not go on one page ({found}); report each domain by itself")
    samples = pa.concat_tables([run.samples for run in runs]).unify_dictionaries().to_pandas()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of damaged units: they are in `Run.problems` already
        frame = load_frame(*paths)
    return Material(runs=runs, samples=samples, frame=frame)


def open_runs(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Every run at `paths`, of whatever domain: run directories, and merged folders with all the runs in them.

    Raises:
        StoreError: a path is neither, or one of its documents is damaged.
        ConfigError: a run is given twice.
    """
    runs = tuple(run for path in paths for run in _open_all(path))
    ids = [run.run_id for run in runs]
    twice = sorted({run_id for run_id in ids if ids.count(run_id) > 1})
    if twice:
        raise ConfigError([f"run {run_id} is given {ids.count(run_id)} times; give it once" for run_id in twice])
    return runs


def _open_all(path: Path) -> list[Run]:
    """The run at `path`, or every run of the merged folder there."""
    merged = sorted(document.parent for document in path.glob("runs/*/run.json"))
    if (path / "run.json").exists() or not merged:
        return [_open(path, tables=path)]
    return [_open(folder, tables=path) for folder in merged]


def _open(path: Path, *, tables: Path) -> Run:
    """The run whose documents are at `path`; its rows are its units, or else in the tables of that folder."""
    directory = open_run(path)
    plan = Plan.from_json(directory.plan)
    if (tables / ROWS_FILE).exists() and not directory.units.is_dir():  # a deposited run has tables and no units
        import pyarrow.compute as pc

        own = pc.field("run_id") == directory.run_id
        records = tuple(Record(**row) for row in read_rows_table(tables / ROWS_FILE).filter(own).to_pylist())
        samples, problems = read_samples_table(tables / SAMPLES_FILE).filter(own), []
        missing = len(planned_keys(plan.points, plan.timing)) - len(records)
        rows_at = tables / ROWS_FILE
    else:
        units, problems = read_units(directory)
        records = tuple(record for unit in units for record in unit.records)
        samples = samples_table(directory.run_id, units)
        missing = len(missing_rows(units, plan.points, plan.timing))
        rows_at = directory.units
    return Run(
        directory=directory,
        plan=plan,
        records=records,
        samples=samples,
        floor=read_floor(directory) or {},
        missing=missing,
        problems=tuple(str(problem) for problem in problems),
        withdrawn=tuple(entry for entry in withdrawn_beside(rows_at) if entry.run_id == directory.run_id),
    )
