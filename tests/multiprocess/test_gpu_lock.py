"""Locks of GPUs between real processes: one holder, told to whoever is refused, and free when it dies."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epcross.harness.running import gpu_lock
from epcross.harness.running.gpu_lock import GpuInUse, GpuLocks, gpu_holders
from epcross.harness.running.lock_file import PATIENCE_S, LockUnusable

HOLD = """
import sys, time
from pathlib import Path
from epcross.harness.running.gpu_lock import GpuLocks
folder, who, shared, *uuids = sys.argv[1:]
locks = GpuLocks(uuids, who, shared=bool(shared), folder=Path(folder))
print("held", flush=True)
time.sleep(1000)
"""


@contextmanager
def holding(folder: Path, who: str, *uuids: str, shared: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the locks."""
    words = [sys.executable, "-c", HOLD, str(folder), who, "yes" * shared, *uuids]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_holder_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    with holding(tmp_path, "run results/runs/one", "a", "b") as first:
        begin = time.monotonic()
        words = (
            rf"GPU b is in use by run results/runs/one \(process {first.pid}, since 20\d\d-.*Wait until it has ended"
        )
        with pytest.raises(GpuInUse, match=words):
            GpuLocks(["c", "b"], "run two", folder=tmp_path)
        assert time.monotonic() - begin < PATIENCE_S + 2
        with GpuLocks(["c"], "run two", folder=tmp_path):  # nothing is kept of what was refused
            assert [holder.who for holder in gpu_holders("c", tmp_path)] == ["run two"]
    assert gpu_holders("a", tmp_path) == []


def test_a_killed_holder_frees_it_and_its_words_are_gone(tmp_path: Path) -> None:
    with holding(tmp_path, "run one", "a") as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert (tmp_path / "epcross-gpu-a.lock").read_text() != ""  # nobody was there to clear them away
        assert gpu_holders("a", tmp_path) == []
        with GpuLocks(["a"], "run two", folder=tmp_path):
            assert [holder.who for holder in gpu_holders("a", tmp_path)] == ["run two"]


def test_checks_share_what_a_measurement_has_alone(tmp_path: Path) -> None:
    with holding(tmp_path, "check one", "a", shared=True), holding(tmp_path, "check two", "a", shared=True):
        with pytest.raises(GpuInUse, match=r"check one \(.*\) and check two \(.*\)"):
            GpuLocks(["a"], "a run", folder=tmp_path)
        with GpuLocks(["a"], "check three", shared=True, folder=tmp_path):
            pass
    with (
        GpuLocks(["a"], "a run", folder=tmp_path),
        pytest.raises(GpuInUse, match="a run"),
    ):
        GpuLocks(["a"], "check four", shared=True, folder=tmp_path)


def test_of_many_that_come_at_once_one_measures_or_all_share(tmp_path: Path) -> None:
    """Whoever shares holds it alone for a moment; the others wait that long."""
    words = [sys.executable, "-c", HOLD, str(tmp_path), "one of many"]
    for shared, holders in (("", 1), ("yes", 4)):
        racing = [
            subprocess.Popen([*words, shared, "a", "b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        try:
            told = [process.stdout.readline() for process in racing if process.stdout]
            assert told.count("held\n") == holders
        finally:
            for process in racing:
                process.kill()
                process.communicate()


def test_the_lock_of_one_user_serves_all_and_outlives_whoever_tidies_up(tmp_path: Path) -> None:
    path = tmp_path / "epcross-gpu-a.lock"
    before = os.umask(0o077)
    try:
        GpuLocks(["a"], "run one", folder=tmp_path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with GpuLocks(["a"], "run one", folder=tmp_path):
        path.unlink()
        # who deletes a lock has none; the new one works again
        with GpuLocks(["a"], "run two", folder=tmp_path), pytest.raises(GpuInUse, match="run two"):
            GpuLocks(["a"], "run three", folder=tmp_path)


def test_nonsense_in_the_file_is_passed_over(tmp_path: Path) -> None:
    """Anybody may write there."""
    path = tmp_path / "epcross-gpu-a.lock"
    nonsense = b'nonsense\n{"who": 3}\n\xff\xfe\n[]\n7\n' + b"[" * 5000 + b"\n"
    path.write_bytes(nonsense)
    with GpuLocks(["a"], "run \x1b[2Jone", folder=tmp_path):
        path.write_bytes(nonsense + path.read_bytes())
        assert [holder.who for holder in gpu_holders("a", tmp_path)] == ["run [2Jone"]


@pytest.mark.parametrize("kind", ["folder", "symlink", "fifo"])
def test_what_is_no_lock_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "epcross-gpu-a.lock"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    match kind:
        case "folder":
            path.mkdir()
        case "symlink":
            path.symlink_to(victim)
        case _:
            os.mkfifo(path)
    with pytest.raises(LockUnusable, match=rf"{path} cannot be used as the lock.*have {path} deleted.*EPCROSS_LOCKS"):
        GpuLocks(["a"], "run one", folder=path.parent)
    assert victim.read_text() == "precious"


def test_the_words_of_a_holder_that_lives_in_another_container_are_shown(tmp_path: Path) -> None:
    with GpuLocks(["a"], "run one", folder=tmp_path):
        path = tmp_path / "epcross-gpu-a.lock"
        path.write_text(path.read_text().replace('"pid_namespace": "', '"pid_namespace": "other '))
        assert [holder.who for holder in gpu_holders("a", tmp_path)] == ["run one"]
        path.write_text("")
        with pytest.raises(GpuInUse, match="a process that has not said who it is"):
            GpuLocks(["a"], "run two", folder=tmp_path)


def test_gpus_that_nobody_knows_need_no_lock() -> None:
    assert gpu_lock.gpus_here({"gpus": None, "gpu_software": None}) == []
    listed = [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]
    assert gpu_lock.gpus_here({"gpus": listed, "gpu_software": None}) == ["a", "b"]
    assert gpu_lock.gpus_here({"gpus": listed, "gpu_software": {"gpus": [{"uuid": "b"}]}}) == ["b"]
