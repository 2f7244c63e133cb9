"""What is read from the notes of a run."""

from pathlib import Path
from typing import Any

import pytest

from epcross.harness.running.display import failure_line, progress_line
from epcross.harness.running.progress import Pace, ProgressLog, ProgressReader, attempts


def unit(second: int, reason: str | None = None) -> dict[str, Any]:
    return {
        "time": f"2026-01-01T00:00:{60 - second:02d}+00:00",  # a wall clock that runs backwards
        "monotonic_s": 1000.0 + second,
        "event": "unit",
        "backend": "b",
        "point_id": "p",
        "launch": 0,
        "statuses": {"error" if reason else "ok": 2},
        "reason": reason,
        "failed_rank": 1 if reason else None,
        "failed_stage": "time" if reason else None,
    }


def test_pace_counts_from_the_first_turn_of_the_session() -> None:
    turn = {"monotonic_s": 1010.0, "event": "turn", "job": "cpu_ep2", "kind": "measure", "launch": 1}
    pace = Pace()
    pace.take({"monotonic_s": 1000.0, "event": "session", "units": 10, "done": 3})
    pace.take(unit(5))  # an impossible point: written without a process
    assert pace.eta_s is None
    pace.take({**turn, "backend": "b"})
    pace.take(unit(12))
    pace.take(unit(14, "it fell"))
    assert (pace.planned, pace.done) == (10, 6)
    assert pace.eta_s == pytest.approx(4 * 4 / 2)  # two units in four seconds, four are left
    assert progress_line(pace) == "6 of 10 units, about 8 s left; cpu_ep2: b, launch 1"
    assert [failure_line(note) for note in pace.failures] == ["b p launch 0: 2 error, rank 1 in time: it fell"]


def test_a_started_unit_counts_as_an_attempt(tmp_path: Path) -> None:
    log, reader = ProgressLog(tmp_path), ProgressReader(tmp_path)
    assert reader.read() == []
    for point_id, launch in (("p", 0), ("p", 1), ("p", 0), ("", 0)):
        log.note("start", point_id=point_id, launch=launch)
    assert attempts(reader.read()) == {"p.0": 2, "p.1": 1}


def test_a_line_that_is_not_finished_waits(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    path = tmp_path / "progress.jsonl"
    path.write_text('{"event": "a"}\n{"eve')
    assert reader.read() == [{"event": "a"}]
    path.write_text('{"event": "a"}\n{"event": "b"}\n')
    assert reader.read() == [{"event": "b"}]
    assert reader.read() == []


def test_lines_that_a_crash_spoiled_are_left_out(tmp_path: Path) -> None:
    ProgressLog(tmp_path).note("session", units=3, done=0)
    path = tmp_path / "progress.jsonl"
    (whole,) = path.read_bytes().splitlines(keepends=True)
    spoiled = [
        b'{"time": "2026-01-01T0' + whole,  # a power cut, and the next session on the same line
        b"\0" * 40 + b"\n",
        b"\xff\xfe\n",
        b"[1, 2]\n",
        whole.replace(b"units", b"unitz"),
    ]
    path.write_bytes(b"".join(spoiled) + whole)
    (note,) = ProgressReader(tmp_path).read()
    pace = Pace()
    pace.take(note)
    assert (pace.planned, pace.done) == (3, 0)
