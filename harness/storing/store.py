"""The one door to results on disk: create and open runs, write and read units, compact, load, merge.

Nothing else writes results. A finished unit is one atomic file; tables are derived from those files at any time.
"""

from epcross.harness.storing.merge import MergeSummary, merge
from epcross.harness.storing.parquet import compact, load_rows, load_samples, write_checksums
from epcross.harness.storing.run_directory import RunDirectory, create_run, open_run, read_floor, write_floor
from epcross.harness.storing.run_owner import claim, owner_of, release
from epcross.harness.storing.units import (
    RowKey,
    UnitKey,
    UnitProblem,
    done_units,
    missing_rows,
    planned_keys,
    read_units,
    set_aside_damaged,
    start_unit,
    write_unit,
)

__all__ = [
    "MergeSummary",
    "RowKey",
    "RunDirectory",
    "UnitKey",
    "UnitProblem",
    "claim",
    "compact",
    "create_run",
    "done_units",
    "load_rows",
    "load_samples",
    "merge",
    "missing_rows",
    "open_run",
    "owner_of",
    "planned_keys",
    "read_floor",
    "read_units",
    "release",
    "set_aside_damaged",
    "start_unit",
    "write_checksums",
    "write_floor",
    "write_unit",
]
