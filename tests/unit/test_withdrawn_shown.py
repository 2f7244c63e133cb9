"""Commands read what is withdrawn beside the units of a run, say it, and refuse a file that they cannot read."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import Change, make_run, points

from epcross.harness.analysis import material
from epcross.harness.cli import run as cli
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE, Withdrawal, read_withdrawn
from epcross.harness.terms import Regime

LINE = "shm_fence: steady is withdrawn: its clock was wrong (16 rows flagged known_issue)"


def withdrawn_run(folder: Path, change: Change | None = None) -> Path:
    run = make_run(folder, points(("shm_sentinel", "shm_fence"), [Regime.STEADY], tokens=(1, 4)), change)
    entry = {"run_id": run.name, "backend": "shm_fence", "regime": "steady", "reason": "its clock was wrong"}
    (run / WITHDRAWN_FILE).write_text(json.dumps([entry]))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two backends in steady state at two sizes; what Fence has, four units of four rows, is withdrawn."""
    return withdrawn_run(tmp_path)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_report_gives_the_reason_and_its_archive_keeps_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "evidence.tar.gz"
    assert cli(["report", str(run), "--output", str(tmp_path / "report"), "--pack", str(archive)]) == 0
    page = " ".join((tmp_path / "report" / "report.md").read_text().replace("\\", "").split())
    assert LINE in page
    assert "every ok repeat is flagged known_issue" in page
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    deposited = tmp_path / "out" / "evidence" / "runs" / run.name
    why = Withdrawal(run_id=run.name, backend="shm_fence", regime="steady", reason="its clock was wrong")
    assert read_withdrawn(deposited) == (why,)
    (found,) = material.open_runs([deposited])
    assert found.withdrawn == (why,)
    assert sum("known_issue" in row.flags.split() for row in found.records) == 16
    capsys.readouterr()


def test_status_says_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["status", str(run)]) == 0
    assert LINE in told(capsys)


def test_kept_rows_are_counted_by_compare_and_claims(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli(["compare", str(run), str(run)])
    assert "A: 16 of 32 rows left out: 16 known_issue; B: 16 of 32 rows left out: 16 known_issue" in told(capsys)
    cli(["compare", str(run), str(run), "--keep", "known_issue"])
    assert "A: flagged rows kept: 16 known_issue; B: flagged rows kept: 16 known_issue" in told(capsys)
    nvlink = withdrawn_run(tmp_path / "nvlink", lambda row: replace(row, domain="nvlink"))
    cli(["claims", str(nvlink), "--keep", "known_issue"])
    note = f"judged by 32 rows of domain nvlink in {nvlink.name}; "
    assert f"{note}flagged rows kept: 16 known_issue" in told(capsys)
    cli(["claims", str(nvlink)])
    assert f"{note}16 of 32 rows left out: 16 known_issue" in told(capsys)


@pytest.mark.parametrize(
    "command", [["report"], ["status"], ["status", "--json"], ["claims"], ["compare"], ["run", "--resume"]]
)
def test_what_cannot_be_read_is_refused_by_name(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / WITHDRAWN_FILE).write_text("garbage")
    assert cli([*command, str(run), *([str(run)] if command == ["compare"] else [])]) in (1, 2)
    assert f"{run / WITHDRAWN_FILE} is no JSON" in " ".join(capsys.readouterr().err.split())
