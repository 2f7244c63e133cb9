"""Soaks of real ranks: right backends pass, what goes wrong late is found, and the time limit holds."""

import time
from pathlib import Path

import pytest

from _command import epcross, rows_of, write_backends
from _spawn import left_overs
from epcross.harness.storing.store import open_run

SLACK_S = 8.0  # starting and ending a run, and one group that began just in time


def soak(folder: Path, *words: str, limit_s: float = 90.0) -> tuple[int, str, float, Path]:
    """Exit code, output, seconds and run folder of a soak."""
    begin = time.monotonic()
    ended = epcross(folder, "run", *words, f"output_dir={folder}/runs", limit_s=limit_s)
    took_s = time.monotonic() - begin
    (path,) = (folder / "runs").iterdir()
    assert left_overs(open_run(path)) == []
    return ended.returncode, " ".join(ended.stdout.split()), took_s, path


def test_our_protocols_stand_a_short_soak(tmp_path: Path) -> None:
    seconds = 10
    code, out, took_s, path = soak(tmp_path, "sweep=soak", f"soak.seconds={seconds}", "soak.case_s=1.5")
    assert code == 0, out
    assert took_s < seconds + SLACK_S
    rows = rows_of(path)
    assert {row.status for row in rows} <= {"ok", "skipped"}
    done = [row for row in rows if row.status == "ok"]
    assert len(done) >= 3
    # three rounds of timed sets, exact and fresh ones, and at least a burst of twelve
    assert all((row.verified_rounds or 0) >= 5 + 12 for row in done)
    assert all(row.reason and "soak.seconds=N" in row.reason for row in rows if row.status == "skipped")
    assert "rounds verified" in out


BROKEN = {
    "LateWrongRow": "wrong bytes in a row",
    "SleepsWhenRepeated": "a wrong combined sum",
}


def test_what_goes_wrong_only_late_is_found_and_can_be_run_again(tmp_path: Path) -> None:
    write_backends(tmp_path, {name: f"tests.late_backends:{name}" for name in BROKEN})
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "late.yaml").write_text(
        "description: Backends that are right at first.\n"
        "timing: soak\n"
        "soak: {seconds: 6, case_s: 1.5}\n"
        f"grid: {{backend: [{', '.join(BROKEN)}], model: tiny, ep_size: 2, tokens_per_rank: {{from: 3, to: 30}}}}\n"
    )
    code, out, _, path = soak(tmp_path, "sweep=late", f"--config-dir={tmp_path}")
    assert code == 1
    rows = rows_of(path)
    assert {row.backend for row in rows} == set(BROKEN)
    for row in rows:
        assert row.status in ("incorrect", "skipped")
        if row.status == "incorrect":
            assert row.failed_stage == "verify_after"
            assert row.failed_rank == 1
            assert "of the soak: rank 1: " in (row.reason or "")
            assert BROKEN[row.backend] in (row.reason or "")
    assert any(row.status == "incorrect" for row in rows)
    assert "again: epcross run sweep=late " in out


@pytest.mark.slow
def test_our_protocols_stand_five_minutes(tmp_path: Path) -> None:
    code, out, took_s, path = soak(tmp_path, "sweep=soak", "soak.seconds=300", "soak.seed=2", limit_s=400)
    assert code == 0, out
    assert took_s < 300 + SLACK_S
    assert sum(row.status == "ok" for row in rows_of(path)) > 100
