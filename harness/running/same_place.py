"""Whether a run may go on here: rows that are compared with each other come from the same code, machine and GPUs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.planning.plan import Plan
from epcross.harness.record import Record, UnitResult
from epcross.harness.storing.environment import gpu_uuids
from epcross.harness.storing.parquet import ROWS_FILE
from epcross.harness.storing.rows import RunContext
from epcross.harness.storing.run_directory import RunDirectory, replace_environment
from epcross.harness.terms import Domain, Status

_NOT_RUN = (Status.UNSUPPORTED, Status.UNAVAILABLE, Status.SKIPPED)


def refuse_packed(run: RunDirectory) -> None:
    """A run whose rows lie in the tables of a merged folder seems not to have begun. Raises `StoreError`."""
    tables = run.path.resolve().parent.parent / ROWS_FILE
    if run.path.resolve().parent.name == "runs" and tables.exists() and not any(run.units.glob("*")):
        raise StoreError(
            f"cannot resume {run.path}: it is the copy of a run whose rows lie in {tables}, where nothing can be added."
            " Resume the run itself, or start a new one with `epcross run`"
        )


def refuse_other_units(results: Sequence[UnitResult], plan: Plan, run: RunDirectory) -> None:
    """Raises `StoreError` if units lie there that `plan` has not, or that another run measured."""
    planned = {point.point_id for point in plan.points} | {item.point.point_id for item in plan.impossible}
    strangers = sorted(
        f"{result.point_id}.{result.launch}"
        for result in results
        if result.point_id not in planned
        or result.launch >= plan.timing.launches
        or any(record.run_id != run.run_id for record in result.records)
    )
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise StoreError(
            f"cannot resume {run.path}: units/ holds what this run did not measure: {', '.join(strangers[:3])}{more}."
            " Move them out of it and repeat the command"
        )


def refuse_other_code_or_machine(results: Sequence[UnitResult], context: RunContext, path: Path) -> None:
    """Raises `StoreError` unless all rows are of this code and this kind of machine."""
    stored = {record for result in results for record in result.records[:1]}
    problems = []
    if others := {r.measure_hash for r in stored} - {context.measure_hash}:
        problems.append(
            f"its rows were measured by other code (measure_hash {_short(others)}, now {context.measure_hash[:12]})"
        )
    if others := {r.machine for r in stored} - {context.machine}:
        problems.append(f"its rows were measured on another kind of machine ({_short(others)}, now {context.machine})")
    if problems:
        raise StoreError(f"cannot resume {path}: {'; '.join(problems)}. {_instead(stored)}")


def settle_gpus(results: Sequence[UnitResult], facts: Mapping[str, Any], run: RunDirectory) -> None:
    """Two GPUs of one product differ by more than a comparison may: raises `StoreError` unless rows that were measured
    on GPUs were measured on those that are here now. Of a run that measured nothing yet, `environment.json` becomes
    `facts`, which are of the machine that it goes on with."""
    ran = [result.records[0] for result in results if result.records and result.records[0].status not in _NOT_RUN]
    if not ran:
        replace_environment(run, facts)
        return
    if all(record.domain == Domain.CPU for record in ran):
        return
    before, now = _gpus(run.environment, facts)
    if before and before == now:
        return
    raise StoreError(
        f"cannot resume {run.path}: its rows were measured on GPUs {_named(before)}, and here are {_named(now)}."
        f" Ratios of rows from two sets of GPUs would compare the GPUs, too. {_instead(set(ran))}"
    )


def _gpus(*environments: Mapping[str, Any]) -> list[frozenset[str]]:
    """UUIDs of the GPUs of each: those that torch may use, where all tell them, else those that the driver lists."""
    usable = [(environment.get("gpu_software") or {}).get("gpus") for environment in environments]
    listed = [environment.get("gpus") for environment in environments]
    return [frozenset(gpu_uuids(found)) for found in (usable if all(usable) else listed)]


def _named(uuids: frozenset[str]) -> str:
    return " and ".join(sorted(uuids)) or "that nobody told the UUIDs of"


def _instead(stored: set[Record]) -> str:
    shas = sorted({r.git_sha[:12] for r in stored if r.git_sha})
    back = f", or go back to commit {' or '.join(shas)} and the machine of its rows" if shas else ""
    back += ", with the backends of your own folders as they were" if shas else ""
    return f"Start a new run with `epcross run`{back}"


def _short(hashes: set[str]) -> str:
    return ", ".join(sorted(h[:12] for h in hashes))
