"""`epcross run`, `status` and `cancel` as a person uses them, on a small real sweep."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from _command import rows_of
from _spawn import PYTHONPATH, left_overs, until
from epcross.harness.planning.plan import Plan
from epcross.harness.running.progress import ProgressReader
from epcross.harness.storing.store import open_run, read_floor, read_units

SMALL = ("sweep=smoke", "backend=shm_fence,shm_sentinel", "model=tiny", "tokens_per_rank=1", "regime=steady")
SLOW = (*SMALL, "timing.chains=10", "timing.chain_ms=250", "timing.max_pairs=10000000")


class Epcross:
    """The command, started in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        return subprocess.Popen(
            [sys.executable, "-m", "epcross.harness.cli", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C of ours is for it alone
        )

    def __call__(self, *arguments: str, limit_s: float = 60.0) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=limit_s)
        assert "Traceback" not in err
        return process.returncode, out, err

    def run_folder(self) -> Path:
        """The one run, once it is a whole folder."""
        (header,) = until(lambda: list(self.folder.glob("results/runs/*/run.json")), 120)
        return header.parent


@pytest.fixture
def epcross(tmp_path: Path) -> Epcross:
    return Epcross(tmp_path)


def measuring(run: Path) -> bool:
    notes = ProgressReader(run).read()
    return any(n["event"] == "unit" for n in notes) and notes[-1]["event"] == "start"


def check_complete(path: Path) -> None:
    assert {record.status for record in rows_of(path)} == {"ok"}


def test_a_run_from_plan_to_table(epcross: Epcross) -> None:
    code, out, err = epcross("run", *SMALL, "--json", limit_s=240)  # the first run on a machine compiles
    assert code == 0, err
    summary = json.loads(out)  # the document is all of stdout; the table goes beside it
    path = Path(summary.pop("path"))
    text = err.splitlines()
    assert text[-1] == str(path)
    assert path.is_relative_to(epcross.folder / "results" / "runs")
    units = len(Plan.from_json(open_run(path).plan).points)
    assert summary == {
        "run_id": path.name,
        "end": "done",
        "exit_code": 0,
        "reason": None,
        "unmeasured": None,
        "known_issues": [],
        "units": units,
        "planned_units": units,
        "statuses": {"ok": units},
        "verified_rounds": units * 4,  # exact, two sets, and fresh ones afterwards
    }
    assert any("shm_fence" in line and "shm_sentinel" in line for line in text)
    assert re.search(r"^\d\d:\d\d:\d\d \d+ of \d+ units", err, re.MULTILINE)  # plain lines, since it is no terminal
    assert not (path / "owner").exists()
    check_complete(path)
    assert set(read_floor(open_run(path)) or {}) == {"cpu_ep2"}
    assert left_overs(open_run(path)) == []

    code, out, _ = epcross("status", str(path))
    assert code == 0
    assert out.startswith(f"{path.name}: finished\n")
    rows = len(read_units(open_run(path))[0])
    code, out, _ = epcross("run", "--resume", str(path), "--json")
    assert code == 0
    assert json.loads(out)["statuses"] == {"ok": rows}
    assert epcross("cancel", str(path))[:2] == (0, f"{path} is not running; nothing to cancel.\n")


def test_ctrl_c_keeps_what_is_stored_and_the_run_goes_on(epcross: Epcross) -> None:
    process = epcross.start("run", *SLOW, "--json")
    path = epcross.run_folder()
    until(lambda: measuring(path), 120)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    assert process.returncode == 130
    assert "Traceback" not in err
    summary = json.loads(out)
    assert (summary["end"], summary["reason"]) == ("cancelled", "cancelled by SIGINT")
    assert f"Go on with: epcross run --resume {path}" in err
    assert left_overs(open_run(path)) == []

    before = {(unit.point_id, unit.launch): unit for unit in read_units(open_run(path))[0]}
    code, out, err = epcross("run", "--resume", str(path))
    assert code == 0, err
    check_complete(path)
    after = {(unit.point_id, unit.launch): unit for unit in read_units(open_run(path))[0]}
    assert {key: after[key] for key in before} == before
    redone = [r for key in after.keys() - before.keys() for r in after[key].records]
    assert {r.attempt for r in redone} == {0, 1}  # the unit that was cut short says so
    assert all(("retried" in r.flags.split()) == (r.attempt == 1) for r in redone)
    assert {r.allocation_id for r in redone} == {f"{path.name}+1"}


def test_cancel_and_status_from_another_process(epcross: Epcross) -> None:
    process = epcross.start("run", *SLOW)
    path = epcross.run_folder()
    until(lambda: measuring(path), 120)
    code, out, _ = epcross("status", str(path), "--json")
    status: dict[str, Any] = json.loads(out)
    assert (code, status["state"]) == (0, "running")
    assert 0 < status["units"] < status["planned_units"]
    assert status["missing_rows"] > 0
    assert status["eta_s"] > 0
    assert str(process.pid) in status["owner"]
    code, _, err = epcross("run", "--resume", str(path))
    assert code == 1
    assert f"in use by process {process.pid}" in err

    begin = time.monotonic()
    code, out, _ = epcross("cancel", str(path))
    assert (code, out) == (0, f"{path} has ended. Go on with: epcross run --resume {path}\n")
    printed, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    assert process.returncode == 130
    assert "Traceback" not in err
    assert left_overs(open_run(path)) == []
    code, out, _ = epcross("status", str(path))
    assert out.startswith(f"{path.name}: interrupted\n")
    assert f"It ended early: cancelled by {path / 'cancel'}" in " ".join(out.split())
    assert f"Go on with: epcross run --resume {path}" in printed


def test_bad_requests_are_told_apart(epcross: Epcross) -> None:
    code, _, err = epcross("run", "sweep=smoke", "--resume", "somewhere")
    assert code == 2
    assert "--resume goes on with the plan of the run, so it takes no overrides" in err
    for arguments in (("run", "--resume"), ("status",), ("cancel",)):
        code, _, err = epcross(*arguments, str(epcross.folder))
        assert code == 2
        assert "is not a run directory: it has no run.json" in err
    assert list(epcross.folder.iterdir()) == []
