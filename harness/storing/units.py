"""Finished units: one sealed file each, written once, never half there, never silently wrong.

Readers report a damaged file and count its unit as not done; only a resume moves it aside and measures it again.
"""

import errno
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.point import Point, Timing
from epcross.harness.record import COLUMNS, SCHEMA_VERSION, Record, Samples, UnitResult
from epcross.harness.storing.older import as_now
from epcross.harness.storing.regular_file import NotRegular, append_regular, read_regular
from epcross.harness.storing.rows import check_record, readable_problems
from epcross.harness.storing.run_directory import RunDirectory, make_folder
from epcross.harness.storing.sealed import TEMPORARY_SUFFIX, DamagedFile, read_sealed, seal, unseal, write_whole
from epcross.harness.storing.withdrawn import flags_beside

UnitKey = tuple[str, int]
"""(point_id, launch)"""

RowKey = tuple[str, str, int]
"""(point_id, phase, repeat)"""

_UNIT_NAME = re.compile(r"(?P<point_id>[0-9a-zA-Z_-]+)\.(?P<launch>\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProblem:
    """A file in units/ that cannot be used, and why."""

    path: Path
    text: str

    def __str__(self) -> str:
        return self.text


def start_unit(run: RunDirectory, point_id: str, launch: int) -> int:
    """Mark that a unit is started now; how often it had been started before, for the column `attempt`.

    Raises:
        StoreError: the mark cannot be written.
    """
    path = run.attempts / f"{point_id}.{launch}"
    try:
        with append_regular(path) as marks:  # a byte is appended whole or not at all
            marks.write(b"+")
        return path.stat().st_size - 1
    except OSError as error:
        raise StoreError(
            f"unit {point_id}.{launch} was not started: its mark in {run.attempts} cannot be written: "
            f"{error.strerror}. All units stored before are safe. {_next_step(error)}, then "
            f"`epcross run --resume {run.path}`"
        ) from error


def write_unit(run: RunDirectory, result: UnitResult) -> Path:
    """Store one unit as one file; writing the same result again does nothing.

    A sample that is not finite is stored as null and read back as NaN; a record must be finite.

    Raises:
        StoreError: the records break their own rules, the unit is already stored with another result, or the disk
            refuses. Units stored before are untouched in every case.
    """
    key = f"unit {result.point_id}.{result.launch}"
    problems = _unit_problems(result)
    if problems:
        raise StoreError(f"{key} was not stored; {len(problems)} problems:\n" + "\n".join(f"  - {p}" for p in problems))
    data = seal(_to_json(result))
    path = run.units / f"{result.point_id}.{result.launch}.json"
    try:
        if path.exists():
            return _already_there(path, data, key)
        write_whole(path, data)
    except OSError as error:
        raise StoreError(
            f"{key} could not be written to {run.path}: {error.strerror}. This unit is lost, all stored before it are "
            f"safe. {_next_step(error)}, then `epcross run --resume {run.path}` measures only what is missing"
        ) from error
    return path


def read_units(run: RunDirectory) -> tuple[list[UnitResult], list[UnitProblem]]:
    """Every whole unit, in order of (point_id, launch), and every file that cannot be used. Rows that a file beside
    `units/` withdraws carry the flag `known_issue`.

    Raises:
        StoreError: what withdraws some cannot be used.
    """
    results, problems = read_stored_units(run)
    rows = [record for result in results for record in result.records]
    places = [(row.run_id, row.backend, row.regime) for row in rows]
    stored = [row.flags for row in rows]
    flags = flags_beside(run.units, places, stored, whole=not problems)
    if flags == stored:
        return results, problems
    told = iter(flags)
    return [
        replace(result, records=tuple(replace(row, flags=next(told)) for row in result.records)) for result in results
    ], problems


def read_stored_units(run: RunDirectory) -> tuple[list[UnitResult], list[UnitProblem]]:
    """As `read_units`, with rows as they stand there, withdrawn or not."""
    results: list[UnitResult] = []
    problems: list[UnitProblem] = []
    for path in _unit_files(run):
        try:
            results.append(_read_unit(path))
        except (StoreError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(UnitProblem(path=path, text=f"{path.name}: {text}; it counts as not done"))
    results.sort(key=lambda result: (result.point_id, result.launch))
    return results, problems


def done_units(run: RunDirectory) -> set[UnitKey]:
    """The units that are stored whole, whatever their status."""
    return {(result.point_id, result.launch) for result in read_stored_units(run)[0]}


def set_aside_damaged(run: RunDirectory) -> list[Path]:
    """Move unusable unit files, and such a floor, to units/damaged/, and remove half-written ones; the new paths.

    What was moved counts as not measured, so a resume measures it again.

    Only the owner of the run may call it: the temporary file of a living writer would go too.

    Raises:
        StoreError: a file cannot be moved.
    """
    moved: list[Path] = []
    try:
        for temporary in run.units.glob(f".*{TEMPORARY_SUFFIX}"):
            temporary.unlink()
        for path in [problem.path for problem in read_stored_units(run)[1]] + _damaged_floor(run):
            make_folder(run.damaged)
            target = run.damaged / path.name
            number = 1
            while target.exists():  # damaged twice: keep both
                target = run.damaged / f"{path.name}.{number}"
                number += 1
            moved.append(path.rename(target))
    except OSError as error:
        raise StoreError(f"cannot set damaged units of {run.path} aside: {error.strerror}. Make it writable") from error
    return moved


def _damaged_floor(run: RunDirectory) -> list[Path]:
    path = run.path / "floor.json"
    try:
        whole = not path.exists() or isinstance(read_sealed(path), dict)
    except (DamagedFile, NotRegular):
        whole = False
    return [] if whole else [path]


def planned_keys(points: Sequence[Point], timing: Timing) -> list[RowKey]:
    """The key of every row that `points` must leave, in plan order."""
    return [
        (point_id, phase.value, repeat)
        for point_id, phases in ((point.point_id, point.phases) for point in points)
        for phase in phases
        for repeat in range(timing.repeats)
    ]


def missing_rows(results: Iterable[UnitResult], points: Sequence[Point], timing: Timing) -> list[RowKey]:
    """The planned rows that `results` lacks, in plan order.

    Raises:
        StoreError: `results` holds a row twice or one that was not planned; all such keys are named.
    """
    counts = Counter((r.point_id, r.phase, r.repeat) for result in results for r in result.records)
    planned = planned_keys(points, timing)
    problems = [f"{_words(key)}: {count} rows" for key, count in counts.items() if count > 1]
    problems += [f"{_words(key)}: not planned" for key in counts.keys() - set(planned)]
    if problems:
        raise StoreError("rows that a plan leaves exactly once are wrong:\n" + "\n".join(sorted(problems)))
    return [key for key in planned if key not in counts]


def _words(key: RowKey) -> str:
    return f"point {key[0]}, phase {key[1]}, repeat {key[2]}"


def _unit_files(run: RunDirectory) -> list[Path]:
    return sorted(path for path in run.units.glob("*.json") if not path.name.startswith("."))


def _to_json(result: UnitResult) -> dict[str, Any]:
    return {
        "point_id": result.point_id,
        "launch": result.launch,
        "records": [{name: getattr(record, name) for name in COLUMNS} for record in result.records],
        "samples": [
            {
                "phase": samples.phase,
                "repeat": samples.repeat,
                "values_us": [[float(v) if math.isfinite(v) else None for v in rank] for rank in samples.values_us],
            }
            for samples in result.samples
        ],
    }


def _read_unit(path: Path) -> UnitResult:
    name = _UNIT_NAME.fullmatch(path.name)
    if name is None:
        raise StoreError("is not named <point_id>.<launch>.json")
    content = read_sealed(path)
    try:
        unknown = {column for record in content["records"] for column in record} - set(COLUMNS)
        if unknown or any(record["schema_version"] > SCHEMA_VERSION for record in content["records"]):
            raise StoreError(
                f"was written by a newer epcross (columns unknown here: {', '.join(sorted(unknown)) or 'none'}); "
                f"this one reads schema version {SCHEMA_VERSION}"
            )
        result = UnitResult(
            point_id=content["point_id"],
            launch=content["launch"],
            records=tuple(Record(**as_now(record)) for record in content["records"]),
            samples=tuple(
                Samples(
                    phase=samples["phase"],
                    repeat=samples["repeat"],
                    values_us=[[math.nan if v is None else v for v in rank] for rank in samples["values_us"]],
                )
                for samples in content["samples"]
            ),
        )
        problems = _reading_problems(result)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"is not the content of a unit ({error!r})") from error
    if problems:
        raise DamagedFile(f"is not the content of a unit: {'; '.join(problems[:5])}")
    if (result.point_id, str(result.launch)) != (name["point_id"], name["launch"]):
        raise DamagedFile(f"holds unit {result.point_id}.{result.launch}, not the one of its name")
    return result


def _reading_problems(result: UnitResult) -> list[str]:
    """What would break those who use a unit that was read: values of a wrong type, words that are in no list."""
    problems = [f"{name} is {value!r}" for name, value in (("launch", result.launch),) if type(value) is not int]
    for record in result.records:
        problems += readable_problems(record)
    for samples in result.samples:
        if not all(set(map(type, rank)) <= {int, float} for rank in samples.values_us):
            problems.append(f"samples of {samples.phase} repeat {samples.repeat} are no numbers")
    return problems


def _unit_problems(result: UnitResult) -> list[str]:
    problems = [] if result.records else ["no records"]
    for record in result.records:
        where = f"{record.phase} repeat {record.repeat}"
        problems += [f"{where}: {problem}" for problem in check_record(record)]
        if (record.point_id, record.launch) != (result.point_id, result.launch):
            problems.append(f"{where}: belongs to unit {record.point_id}.{record.launch}")
    keys = Counter((record.phase, record.repeat) for record in result.records)
    problems += [f"{phase} repeat {repeat}: {count} records" for (phase, repeat), count in keys.items() if count > 1]
    sampled = Counter((samples.phase, samples.repeat) for samples in result.samples)
    for (phase, repeat), count in sampled.items():
        if (phase, repeat) not in keys or count > 1:
            problems.append(f"{phase} repeat {repeat}: {count} sets of samples for {keys[phase, repeat]} records")
    return problems


def _already_there(path: Path, data: bytes, key: str) -> Path:
    present = read_regular(path)
    if present == data:
        return path
    try:
        unseal(present)
    except DamagedFile:
        raise StoreError(f"{key}: {path} is there and damaged; a resume sets it aside and measures again") from None
    raise StoreError(
        f"{key} is already stored as {path} with another result; a unit is written once. "
        "Start a new run to measure it again"
    )


def _next_step(error: OSError) -> str:
    if isinstance(error, NotRegular):
        return f"Remove {error.filename}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free space there"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Make it writable"
    return "Check the disk"
