"""The machine misbehaves under a whole run: its disk fills while rows are stored, its wall clock runs backwards."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from _command import epcross, rows_of
from _spawn import left_overs
from epcross.harness.running.progress import Pace, ProgressReader
from epcross.harness.storing.store import done_units, open_run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.beside
SMALL = ("sweep=smoke", "backend=shm_fence", "model=tiny", "regime=steady")

FULL_DISK = """
import errno, os
_runs, _write = os.environ["FAKE_RUNS"], os.write

def write(descriptor, data):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if path.startswith(_runs) and not os.path.exists(_runs + "/roomy"):
        units = path.rpartition("/units/")[0]
        if units and sum(name[0] != "." for name in os.listdir(units + "/units")) >= 2:
            open(_runs + "/full", "w").close()
        if os.path.exists(_runs + "/full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _write(descriptor, data)

os.write = write
"""
"""As `sitecustomize` of every process: from the third unit on nothing more can be written, until `roomy` is there."""

BACKWARDS = """
import datetime, itertools, time
_ticks = itertools.count(1)

class Backwards(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(1_800_000_000 - 3600 * next(_ticks), tz)

datetime.datetime = Backwards
time.time = lambda: 1_800_000_000.0 - 3600 * next(_ticks)
"""
"""As `sitecustomize` of every process: each look at the wall clock finds it an hour earlier."""


def customised(folder: Path, custom: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command, with `custom` imported at the start of it and of every process below it."""
    place = folder / "custom"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(custom)
    path = os.pathsep.join([str(place), str(ROOT / "src")])
    return epcross(folder, *words, imports=path, FAKE_RUNS=str(folder / "results" / "runs"))


def run_folder(folder: Path) -> Path:
    (header,) = (folder / "results" / "runs").glob("*/run.json")
    return header.parent


def test_a_disk_that_fills_costs_the_unit_in_flight(tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = customised(tmp_path, FULL_DISK, "run", *SMALL)
    assert time.monotonic() - begin < 60
    path = run_folder(tmp_path)
    assert (path.parent / "full").exists()
    assert ended.returncode == 1
    said = " ".join(ended.stdout.split())
    assert "No space left on device. This unit is lost, all stored before it are safe. Free space there" in said
    assert f"Go on with: epcross run --resume {path}" in said
    assert len(done_units(open_run(path))) == 2
    assert [p.name for p in (path / "units").iterdir() if p.name.startswith(".")] == []  # nothing half-written
    assert left_overs(open_run(path)) == []
    status = customised(tmp_path, FULL_DISK, "status", str(path))
    assert status.returncode == 0
    assert "interrupted" in status.stdout

    before = {name: (path / "units" / name).read_bytes() for name in os.listdir(path / "units")}
    (path.parent / "roomy").touch()
    resumed = customised(tmp_path, FULL_DISK, "run", "--resume", str(path))
    assert resumed.returncode == 0, resumed.stderr
    assert {row.status for row in rows_of(path)} == {"ok"}
    assert {name: (path / "units" / name).read_bytes() for name in before} == before


def test_a_wall_clock_that_runs_backwards_changes_no_duration(tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = customised(tmp_path, BACKWARDS, "run", *SMALL)
    took_s = time.monotonic() - begin
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = run_folder(tmp_path)
    rows = rows_of(path)
    assert {row.status for row in rows} == {"ok"}
    assert all(row.wall_s is not None and 0 < row.wall_s < took_s for row in rows)
    assert all(0 < (row.latency_us or 0) < took_s * 1e6 for row in rows)
    assert {row.started_at[:4] for row in rows} <= {"2026", "2027"}  # the time of day is what the machine said
    notes = ProgressReader(path).read()
    times = [note["time"] for note in notes]
    assert times != sorted(times)  # the clock did go backwards
    pace = Pace()
    for note in notes:
        pace.take(note)
    assert 0 < pace.measured_s < took_s
    assert pace.done == pace.planned == len({row.point_id for row in rows})
    assert "-" not in "".join(re.findall(r"about (\S+) left", ended.stderr))
    status = customised(tmp_path, BACKWARDS, "status", str(path), "--json")
    assert json.loads(status.stdout)["state"] == "finished"
    again = customised(tmp_path, BACKWARDS, "run", "--resume", str(path))  # a folder from the future is a folder
    assert again.returncode == 0


ACROSS_HOSTS = "harness/slurm/follow.py"
"""A job's deadline is judged from another host, with which it shares no other clock; minutes of margin are added."""

ONLY_COMPARED = "harness/running/core_watch.py"
"""Whether a file was written to since: times of one file system, equal or not."""


def test_no_duration_comes_from_the_wall_clock() -> None:
    """`time.time` and differences of dates are wrong by whatever the clock is set by."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("harness", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path not in (ROOT / ACROSS_HOSTS, ROOT / ONLY_COMPARED)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\btime\.(time|time_ns|ctime|localtime)\(|total_seconds\(|timedelta|st_[acm]time", line)
    ]
    assert found == []


def test_a_resume_reads_what_a_kill_left(tmp_path: Path) -> None:
    ended = customised(tmp_path, "", "run", *SMALL, "tokens_per_rank=1")
    assert ended.returncode == 0, ended.stderr
    path = run_folder(tmp_path)
    next((path / "units").glob("*.json")).unlink()
    progress, floor = path / "progress.jsonl", path / "floor.json"
    progress.write_bytes(progress.read_bytes()[:-40] + b"\n{torn\n")
    whole = floor.read_bytes()
    floor.write_bytes(whole[: len(whole) // 2])  # by no kill of ours: something else cut it
    again = customised(tmp_path, "", "run", "--resume", str(path))
    assert again.returncode == 0, again.stderr
    assert (path / "units" / "damaged" / "floor.json").read_bytes() == whole[: len(whole) // 2]  # nothing is lost
    assert json.loads(floor.read_text())["content"].keys() == json.loads(whole)["content"].keys()  # measured again
    assert {row.status for row in rows_of(path)} == {"ok"}
    assert customised(tmp_path, "", "status", str(path)).stdout.startswith(f"{path.name}: finished")
