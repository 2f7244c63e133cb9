"""EPCROSS_LOCKS that names no usable folder: refused before anything is measured, by every command that locks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from _spawn import PYTHONPATH
from epcross.harness.running import lock_file
from epcross.harness.running.gpu_lock import GpuLocks
from epcross.harness.running.lock_file import LockUnusable, require_folder

pytestmark = pytest.mark.beside

RUN = ("run", "sweep=smoke", "backend=shm_fence", "ep_size=2", "model=tiny", "tokens_per_rank=1", "regime=steady")


def epcross(folder: Path, locks: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command in `folder`, with EPCROSS_LOCKS set."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "epcross.harness.cli", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "EPCROSS_LOCKS": locks},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_folder_that_is_good_stays_as_it_was(tmp_path: Path) -> None:
    require_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("missing", "No such file or directory"),
        ("a file", "Not a directory"),
        ("a dead link", "No such file or directory"),
        ("relative", "each process would look for it in its own current folder"),
        ("closed", "Permission denied"),
        ("without links", "Operation not permitted"),
        ("without locks", "No locks available"),
    ],
)
def test_a_folder_in_which_no_lock_can_be_held_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    def refusing(code: int) -> Any:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        return refuse

    folder = tmp_path / "locks"
    match kind:
        case "a file":
            folder.touch()
        case "a dead link":
            folder.symlink_to(tmp_path / "nowhere")
        case "relative":
            folder = Path("locks")
        case "closed":
            folder.mkdir()
            monkeypatch.setattr(lock_file.os, "mkdir", refusing(errno.EACCES))  # whoever runs this test
        case "without links":
            folder.mkdir()
            monkeypatch.setattr(lock_file.os, "link", refusing(errno.EPERM))
        case "without locks":
            folder.mkdir()
            monkeypatch.setattr(lock_file.fcntl, "flock", refusing(errno.ENOLCK))
    monkeypatch.setattr(lock_file, "_NAMED", str(folder))
    with pytest.raises(LockUnusable) as caught:
        GpuLocks((), "a run of cores alone", folder=folder)
    said = str(caught.value)
    assert said.startswith(f"EPCROSS_LOCKS={folder} cannot hold the locks that keep two measurements apart: {why}. ")
    assert "It must be the whole path of a folder that exists and can be written to" in said
    assert said.endswith("or unset it to take /tmp")
    monkeypatch.setattr(lock_file, "_NAMED", None)
    with pytest.raises(LockUnusable) as caught:
        require_folder(folder)
    assert str(caught.value).startswith(f"{folder} (EPCROSS_LOCKS is not set) cannot hold the locks")
    assert "let EPCROSS_LOCKS name another one" in str(caught.value)
    if kind in ("closed", "without links", "without locks"):
        monkeypatch.undo()
        assert list(folder.iterdir()) == []


def test_every_command_that_locks_refuses_before_it_measures(tmp_path: Path) -> None:
    measured = epcross(tmp_path, str(tmp_path), *RUN)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    (run,) = (tmp_path / "results" / "runs").iterdir()
    stored = sorted(path.name for path in (run / "units").iterdir())
    point_id = stored[0].partition(".")[0]
    locks = str(tmp_path / "lost")
    for words in (
        RUN,
        ("run", "sweep=floor", "ep_size=2"),
        ("run", "--resume", str(run)),
        ("check", "backend=shm_fence", "case=format_fp8"),
        ("point", point_id),
        ("reproduce", "P07", "--rehearse", "--no-doctor"),
    ):
        ended = epcross(tmp_path, locks, *words)
        assert ended.returncode == 1, words
        assert ended.stderr.splitlines()[-1].startswith(f"epcross: EPCROSS_LOCKS={locks} cannot hold the locks"), words
        assert "Traceback" not in ended.stderr
    assert list((tmp_path / "results" / "runs").iterdir()) == [run]
    assert not list((tmp_path / "results").glob("rehearsals/*"))
    assert sorted(path.name for path in (run / "units").iterdir()) == stored
    again = epcross(tmp_path, str(tmp_path), "run", "--resume", str(run))  # the refusal left it to nobody
    assert again.returncode == 0, again.stdout + again.stderr


def test_the_doctor_says_so_of_a_node_without_gpus_as_well(tmp_path: Path) -> None:
    locks = str(tmp_path / "lost")
    ended = epcross(tmp_path, locks, "doctor", "sweep=smoke", "--json")
    assert ended.returncode == 1
    (found,) = [finding for finding in json.loads(ended.stdout)["findings"] if finding["subject"] == "locks"]
    assert found["severity"] == "stops"
    assert found["text"].startswith(f"EPCROSS_LOCKS={locks} cannot hold the locks")
    assert found["next"].startswith("export EPCROSS_LOCKS=FOLDER")
