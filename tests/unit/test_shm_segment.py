"""Shared-memory segments: reserved or refused, never leaked, and stale ones told from live ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from epcross.kernels.shm import segment
from epcross.kernels.shm.segment import (
    SegmentError,
    attach,
    attach_all,
    free_bytes,
    remove_stale,
    reserve,
    segment_name,
    stale_segments,
)


def test_a_segment_is_zero_shared_and_gone_after_unlink(tmp_path: Path) -> None:
    with reserve("group/one", 0, 10_000, directory=tmp_path) as own:
        assert re.fullmatch(rf"epcross-group_one-0-{os.getpid()}-\d+", own.name)
        assert own.buffer[:10_000] == bytes(10_000)
        with attach(own.name, 10_000, directory=tmp_path) as peer:
            own.unlink()
            assert list(tmp_path.iterdir()) == []
            peer.buffer[17] = 42  # the mapping outlives the name
            assert own.buffer[17] == 42
    own.close()


def test_pages_are_there_before_use(tmp_path: Path) -> None:
    with reserve("g", 0, 1 << 20, directory=tmp_path) as own:
        assert own.path.stat().st_blocks * 512 >= 1 << 20


def test_too_little_room_names_both_sizes_and_leaves_nothing(tmp_path: Path) -> None:
    need = free_bytes(tmp_path) + (1 << 30)
    with pytest.raises(SegmentError, match=rf"has \d+ bytes free and a rank needs {need}: lower max_tokens_per_rank"):
        reserve("g", 0, need, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_room_lost_between_the_look_and_the_reservation_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    with pytest.raises(SegmentError, match=r"bytes free and a rank needs 8192"):
        reserve("g", 0, 8192, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_directory_for_shared_memory_is_said(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=r"cannot make shared memory in .*none.*mount a tmpfs"):
        reserve("g", 0, 8192, directory=tmp_path / "none")


def test_peers_with_other_shapes_or_hosts_are_refused(tmp_path: Path) -> None:
    with reserve("g", 0, 8192, directory=tmp_path) as own:
        with pytest.raises(SegmentError, match="has 8192 bytes and 16384 were expected"):
            attach(own.name, 16384, directory=tmp_path)
        with pytest.raises(SegmentError, match="must share one host"):
            attach_all(own, [own.name, "epcross-g-1-1-1"], 8192)
        assert own.buffer[0] == 0  # the own mapping survives


def test_only_segments_of_dead_owners_are_stale(tmp_path: Path) -> None:
    leak = (
        "import os, signal, sys; from pathlib import Path; from epcross.kernels.shm.segment import reserve;"
        "print(reserve('dead', 3, 4096, directory=Path(sys.argv[1])).name, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", leak, str(tmp_path)], capture_output=True, text=True, check=False)
    assert child.returncode == -9, child.stderr
    reused_pid = tmp_path / f"epcross-old-0-{os.getpid()}-1"  # our pid, but another start time
    reused_pid.write_bytes(bytes(100))
    (tmp_path / "epcross-notes.txt").write_text("not ours")
    with reserve("live", 0, 4096, directory=tmp_path) as own:
        stale = stale_segments(tmp_path)
        assert [item.path.name for item in stale] == sorted([child.stdout.strip(), reused_pid.name])
        assert {item.size_bytes for item in stale} == {4096, 100}
        assert remove_stale(tmp_path) == stale
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([own.name, "epcross-notes.txt"])
        assert remove_stale(tmp_path) == []


def test_names_fit_a_file_name() -> None:
    assert len(segment_name("x" * 40, 1000)) < 255
