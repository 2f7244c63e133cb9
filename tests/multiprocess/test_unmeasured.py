"""A run in which every row is unavailable or unsupported says so in a sentence, and by its exit code."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests._points import small_point

from _spawn import PYTHONPATH, TIMING
from epcross.harness.analysis.unmeasured import reasons_of, why_unmeasured
from epcross.harness.cli import run as cli
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.planning.plan import Plan
from epcross.harness.record import Record
from epcross.harness.slurm import status_view, submit_view
from epcross.harness.storing.rows import RunContext, failed_records
from epcross.harness.storing.store import open_run, read_units
from epcross.harness.terms import Status

pytestmark = pytest.mark.beside

OWN = """
from tests.broken_backends import ReferenceBackend

class Absent(ReferenceBackend):
    def unavailable(self):
        return "the library libabsent is not installed"
"""
SWEEP = """
description: one point of each backend
timing: smoke
grid: {backend: [absent, here], ep_size: 2, model: tiny, tokens_per_rank: 1, regime: steady}
"""
SENTENCE = "No point was measured: its only row is unavailable (the library libabsent is not installed)"


def rows(*ended: tuple[Status, str]) -> list[Record]:
    context = RunContext(run_id="run", measure_hash="", machine="", allocation_id="", git_sha="", git_dirty=False)
    row = failed_records(small_point(), TIMING, 0, context, Status.UNAVAILABLE, "no GPU")[0]
    return [replace(row, status=status, reason=reason or None) for status, reason in ended]


def test_the_sentence_names_the_commonest_reasons() -> None:
    absent, impossible = (Status.UNAVAILABLE, "no GPU"), (Status.UNSUPPORTED, "EP 3")
    assert why_unmeasured(rows(absent, absent)) == "No point was measured: all 2 rows are unavailable (no GPU)"
    assert why_unmeasured(rows(absent)) == "No point was measured: its only row is unavailable (no GPU)"
    assert why_unmeasured(rows(impossible, absent, absent)) == (
        "No point was measured: all 3 rows are unavailable or unsupported (2: no GPU; 1: EP 3)"
    )
    many = [(Status.UNSUPPORTED, f"EP {size}") for size in range(5)]
    assert str(why_unmeasured(rows(*many, many[0]))).endswith(
        "unsupported (2: EP 0; 1: EP 1; 1: EP 2; 2: 2 other reasons)"
    )


def test_a_run_with_a_number_a_failure_or_no_rows_is_none_of_them() -> None:
    absent = (Status.UNAVAILABLE, "no GPU")
    assert why_unmeasured([]) is None  # of a floor alone
    for other in (Status.OK, Status.ERROR, Status.SKIPPED, Status.INCORRECT):
        assert why_unmeasured(rows(absent, (other, "" if other is Status.OK else "why"))) is None


def test_every_reason_is_told_with_its_rows_the_commonest_first() -> None:
    found = rows(
        (Status.NO_TIMING, "clock"), (Status.OK, ""), (Status.ERROR, "broken"), (Status.UNSUPPORTED, "EP 3"),
        (Status.ERROR, "broken"), (Status.UNAVAILABLE, "EP 3"),
    )  # fmt: skip
    name = found[0].backend
    assert [tuple(each.values()) for each in reasons_of(found)] == [
        (name, "error", "broken", 2),
        (name, "no_timing", "clock", 1),
        (name, "unsupported", "EP 3", 1),
        (name, "unavailable", "EP 3", 1),
    ]
    assert [list(each) for each in reasons_of(found)] == [["backend", "status", "reason", "rows"]] * 4
    assert reasons_of(rows((Status.OK, ""))) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "own/own.py": OWN,
        "own/backend/absent.yaml": 'target: own:Absent\nlabel: absent\ncolor: "#777777"\n',
        "own/backend/here.yaml": 'target: tests.broken_backends:ReferenceBackend\nlabel: here\ncolor: "#777777"\n',
        "own/sweep/one.yaml": SWEEP,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def epcross(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "epcross.harness.cli", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended


def test_a_run_that_measured_nothing_is_no_success(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = epcross(folder, "run", "sweep=one", "backend=absent", "--config-dir", "own")
    assert ended.returncode == NOTHING_SHOWN, ended.stderr
    *_, sentence, path = ended.stdout.splitlines()
    assert sentence == SENTENCE
    assert epcross(folder, "status", path).stdout.splitlines()[-1] == SENTENCE
    resumed = epcross(folder, "run", "--resume", path, "--json")
    summary = json.loads(resumed.stdout)
    assert resumed.returncode == summary["exit_code"] == NOTHING_SHOWN
    assert (summary["end"], summary["unmeasured"]) == ("done", SENTENCE)
    directory = open_run(Path(path))
    units, problems = read_units(directory)
    (unit,) = units
    why = {"backend": "absent", "status": "unavailable", "reason": "the library libabsent is not installed", "rows": 1}
    assert json.loads(epcross(folder, "status", path, "--json").stdout)["reasons"] == [why]
    # a run on Slurm tells them alike, whatever Slurm says of its jobs
    seen = SimpleNamespace(state="finished", silent="", pieces=())
    monkeypatch.setattr(status_view, "view", lambda run, plan, units: seen)
    status_view.show(directory, Plan.from_json(directory.plan), units, problems, as_json=True)
    assert json.loads(capsys.readouterr().out)["reasons"] == [why]
    again = epcross(folder, "point", unit.point_id, "--output-dir", "again")
    assert again.returncode == NOTHING_SHOWN, again.stderr
    assert again.stdout.splitlines()[-2] == SENTENCE
    # all is known before a job is submitted
    monkeypatch.setattr(submit_view, "submission", SimpleNamespace(resume=lambda path, fail_fast: (open_run(path), [])))
    assert submit_view.submit(Path(path), fail_fast=False, as_json=True) == NOTHING_SHOWN
    submitted = json.loads(capsys.readouterr().out)
    assert (submitted["exit_code"], submitted["unmeasured"]) == (NOTHING_SHOWN, SENTENCE)


def test_one_backend_that_can_be_used_is_enough(folder: Path) -> None:
    ended = epcross(folder, "run", "sweep=one", "--config-dir", "own", "--json")
    summary = json.loads(ended.stdout)
    assert ended.returncode == summary["exit_code"] == 0, ended.stderr
    assert summary["unmeasured"] is None
    assert summary["statuses"].keys() == {"ok", "unavailable"}


def test_a_rehearsal_without_a_backend_has_walked_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "P07", "--rehearse", "--no-doctor", "--json", "backend=onesided_fence", "device=cpu"]
    assert cli(words) == NOTHING_SHOWN
    (state,) = json.loads(capsys.readouterr().out)["runs"]
    assert state["unmeasured"].startswith("No point was measured: all ")
