"""A named pipe, a socket, a device or a folder in the place of a file of a run is told, and never waited for."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import make_run

from epcross.harness.cli import run as cli
from epcross.harness.errors import StoreError
from epcross.harness.running.progress import ProgressLog
from epcross.harness.storing.regular_file import NotRegular, append_regular, read_regular
from epcross.harness.storing.store import (
    RunDirectory,
    claim,
    compact,
    merge,
    open_run,
    owner_of,
    read_units,
    set_aside_damaged,
    start_unit,
)

pytestmark = pytest.mark.timeout(60)  # a pipe that is opened to be read waits without end


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as it:
        it.bind(os.path.relpath(path))  # the whole path may be longer than a socket's name


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "socket": (_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "folder": (Path.mkdir, "a folder"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path: Path, kind: str) -> None:
    make, words = SPECIAL[kind]
    make(tmp_path / "file")
    for use in (read_regular, append_regular):
        with pytest.raises(NotRegular, match=words):
            use(tmp_path / "file")


def test_a_regular_file_is_read_and_grows(tmp_path: Path) -> None:
    for word in (b"one", b"two"):
        with append_regular(tmp_path / "file") as file:
            file.write(word)
    assert read_regular(tmp_path / "file") == b"onetwo"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent")


def _pipe_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["run.json", "plan.json", "environment.json", "floor.json", "progress.jsonl"])
def test_every_verb_refuses_a_run_of_which_a_part_is_a_pipe(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs")
    _pipe_instead(run / name)
    verbs = {
        "status": ["status", str(run)],
        "report": ["report", str(run), "--output", str(tmp_path / "report")],
        "compare": ["compare", str(run), str(run)],
        "crossover": ["crossover", str(run)],
        "claims": ["claims", str(run)],
        "cancel": ["cancel", str(run)],
        "resume": ["run", "--resume", str(run)],
        "point": ["point", "0", "--run", str(run)],
    }
    refusing = {
        "floor.json": ("report",),  # the others read no floor; a resume sets it aside and measures it again
        "progress.jsonl": ("status", "resume"),
    }.get(name, tuple(verbs))
    for verb in refusing:
        assert cli(verbs[verb]) != 0, verb
        said = capsys.readouterr().err
        assert f"{name} cannot be" in said, verb
        assert "it is a named pipe, and a regular file belongs there" in said, verb


def test_a_unit_that_is_a_pipe_counts_as_not_done_and_is_set_aside(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path))
    whole, _ = read_units(run)
    unit = sorted(run.units.glob("*.json"))[0]
    _pipe_instead(unit)
    units, (problem,) = read_units(run)
    assert len(units) == len(whole) - 1
    assert str(problem).startswith(f"{unit.name}: it is a named pipe")
    _pipe_instead(run.path / "floor.json")
    assert {path.name for path in set_aside_damaged(run)} == {unit.name, "floor.json"}
    assert read_units(run)[1] == []


def test_what_is_appended_to_is_no_pipe(run: RunDirectory) -> None:
    os.mkfifo(run.attempts / "unit.0")
    with pytest.raises(StoreError, match=r"it is a named pipe.*Remove .*unit\.0, then"):
        start_unit(run, "unit", 0)
    os.mkfifo(run.path / "progress.jsonl")
    with pytest.raises(StoreError, match=r"progress\.jsonl cannot be opened: it is a named pipe"):
        ProgressLog(run.path)


def test_an_owner_that_is_a_pipe_is_nobody(run: RunDirectory) -> None:
    _pipe_instead(run.path / "owner")
    assert owner_of(run.path) is None
    claim(run.path)
    assert (run.path / "owner").is_file()


def test_tables_and_documents_that_are_pipes_are_not_merged(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path / "runs"))
    rows, _ = compact(run)
    _pipe_instead(rows)
    with pytest.raises(StoreError, match=r"rows\.parquet cannot be read: it is a named pipe"):
        merge(tmp_path / "merged", [rows])
    _pipe_instead(run.path / "floor.json")
    with pytest.raises(StoreError, match=r"nothing was merged"):
        merge(tmp_path / "merged", [run.path])
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["units", "attempts", "logs"])
def test_a_file_in_the_place_of_a_folder_is_told_with_the_next_step(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, units=False)
    (run / name).rmdir()
    (run / name).write_text("tidy")
    assert cli(["run", "--resume", str(run)]) == 1
    said = capsys.readouterr().err
    assert f"{run / name} is no folder, and the run keeps its {name} there. Restore it from a copy, or move" in said
