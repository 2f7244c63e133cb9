"""Every fault at every stage of a unit's life costs its own point, names rank and stage, and leaves all others ok."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from _spawn import TIMING, config, finish, job, left_overs, new_run, point
from epcross.harness.record import Record
from epcross.harness.running.launch import End
from epcross.harness.storing.store import missing_rows, read_units
from epcross.harness.terms import Stage

STAGES = [Stage.PREPARE, Stage.VERIFY_BEFORE, Stage.TIME, Stage.VERIFY_AFTER, Stage.CLOSE]
WORDS = {
    "kill": ("error", "its process was killed by SIGKILL"),
    "raise": ("error", "RuntimeError: the fake was told to raise"),
    "stop": ("timeout", "not done within the wall limit of 1 s"),
    "hang": ("timeout", "not done within the wall limit of 1 s"),
}
"""Fault -> status and the words that the row begins with."""

CASES = [(fault, stage, number % 2) for number, (fault, stage) in enumerate((f, s) for f in WORDS for s in STAGES)]
AT_START = list(WORDS)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Record]:
    """One job with all faults, a good point after each, by what was asked for."""
    folder = tmp_path_factory.mktemp("matrix")
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        run = new_run(folder)
        faulty = {
            (fault, stage, rank): point(number, fault=fault, stage=str(stage), rank=rank)
            for number, (fault, stage, rank) in enumerate(CASES, start=100)
        }
        start = {
            (fault, Stage.START): point(number, backend="start", fault=fault)
            for number, fault in enumerate(AT_START, start=200)
        }
        good = {number: point(number) for number in range(1, len(CASES) + 1)}
        points = [p for pair in zip(faulty.values(), good.values(), strict=True) for p in pair]
        points += [*start.values(), *[point(number, backend="start") for number in range(50, 54)]]
        once = replace(TIMING, launches=1, wall_limit_s=1.0)
        backends = {
            "fake": config(),
            "start": config("start", target="_spawn:FailsAtStart", env={"FAKE_FOLDER": str(folder)}),
        }
        end, took_s = finish(job(run, points, timing=once, backends=backends), limit_s=150)
        assert end.end is End.DONE
        assert took_s < 100
        units, problems = read_units(run)
        assert problems == []
        assert missing_rows(units, points, once) == []
        assert left_overs(run) == []
    by_id = {unit.point_id: unit.records[0] for unit in units}
    asked = {**faulty, **start, "good": None}
    rest = [p for p in points if p not in asked.values()]
    return {
        **{key: by_id[p.point_id] for key, p in asked.items() if p is not None},
        **{("good", number): by_id[p.point_id] for number, p in enumerate(rest)},
    }


@pytest.mark.parametrize(("fault", "stage", "rank"), CASES)
def test_a_fault_names_itself_its_rank_and_its_stage(
    rows: dict[Any, Record], fault: str, stage: Stage, rank: int
) -> None:
    row = rows[fault, stage, rank]
    status, words = WORDS[fault]
    assert (row.status, row.failed_rank, row.failed_stage) == (status, rank, stage)
    assert str(row.reason).startswith(words)
    assert row.latency_us is None


@pytest.mark.parametrize("fault", AT_START)
def test_a_fault_while_the_backend_is_made(rows: dict[Any, Record], fault: str) -> None:
    row = rows[fault, Stage.START]
    status, words = WORDS[fault]
    assert (row.status, row.failed_stage) == (status, Stage.START)
    assert row.failed_rank in (0, 1)  # whichever came first
    assert str(row.reason).startswith(words)


def test_every_other_point_is_measured(rows: dict[Any, Record]) -> None:
    good = [row for key, row in rows.items() if key[0] == "good"]
    assert len(good) == len(CASES) + 4
    assert {row.status for row in good} == {"ok"}
