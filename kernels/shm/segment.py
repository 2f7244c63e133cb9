"""POSIX shared memory of a process group: reserved before use, gone as soon as every rank has mapped it.

A segment is a file `epcross-<group>-<rank>-<pid>-<start>` in /dev/shm, named after the process that made it. It is
unlinked right after all ranks mapped it, so that from then on even `kill -9` leaks nothing; what a run that died before
left behind is found by its dead owner.
"""

import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from epcross.kernels.errors import EpcrossError

SHM_DIRECTORY = Path("/dev/shm")
PREFIX = "epcross-"

_NAME = re.compile(re.escape(PREFIX) + r".*-(?P<pid>\d+)-(?P<start>\d+)")


class SegmentError(EpcrossError):
    """Shared memory could not be reserved or mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSegment:
    """A segment whose owner is dead."""

    path: Path
    size_bytes: int
    pid: int


class Segment:
    """One mapped segment. `buffer` is a writable buffer of exactly the size asked for."""

    def __init__(self, path: Path, buffer: mmap.mmap, *, owned: bool) -> None:
        self.path = path
        self.buffer = buffer
        self._owned = owned

    @property
    def name(self) -> str:
        """What peers map it by."""
        return self.path.name

    def unlink(self) -> None:
        """Remove the name; mappings stay. Only the owner's call does anything; idempotent."""
        if self._owned:
            self.path.unlink(missing_ok=True)
            self._owned = False

    def close(self) -> None:
        """Remove the name and unmap. Idempotent. Raises BufferError while a kernel still holds the mapping."""
        self.unlink()
        self.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def segment_name(shared_name: str, rank: int) -> str:
    """The name of this process's segment as `rank` of the group `shared_name`."""
    stem = re.sub(r"[^A-Za-z0-9_.]", "_", shared_name)
    pid = os.getpid()
    return f"{PREFIX}{stem}-{rank}-{pid}-{_start_time(pid)}"


def reserve(shared_name: str, rank: int, size_bytes: int, *, directory: Path = SHM_DIRECTORY) -> Segment:
    """Create, fill with zeros and map a segment; every page is there before this returns.

    Raises:
        SegmentError: there is no room, or the directory cannot be written. Nothing is left behind.
    """
    size_bytes = max(size_bytes, mmap.PAGESIZE)
    try:
        free = free_bytes(directory)
        if size_bytes > free:
            raise _no_room(directory, size_bytes, free)
        path = directory / segment_name(shared_name, rank)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SegmentError(
            f"cannot make shared memory in {directory}: {error}; mount a tmpfs there (containers: --shm-size or --ipc)"
        ) from error
    try:
        # a sparse file on a full tmpfs is a SIGBUS at first touch; this makes it an error here
        os.posix_fallocate(descriptor, 0, size_bytes)
        return Segment(path, _mapped(descriptor, size_bytes), owned=True)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _no_room(directory, size_bytes, free_bytes(directory)) from error
    finally:
        os.close(descriptor)


def attach(name: str, size_bytes: int, *, directory: Path = SHM_DIRECTORY) -> Segment:
    """Map a peer's segment.

    Raises:
        SegmentError: it is not there or has another size than expected: the ranks disagree on the shapes.
    """
    path = directory / name
    size_bytes = max(size_bytes, mmap.PAGESIZE)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentError(
            f"cannot map {path} of a peer: {error}; ranks of the cpu domain must share one host and one {directory}"
        ) from error
    try:
        found = os.fstat(descriptor).st_size
        if found != size_bytes:
            raise SegmentError(
                f"{path} has {found} bytes and {size_bytes} were expected: give all ranks the same shapes"
            )
        return Segment(path, _mapped(descriptor, size_bytes), owned=False)
    finally:
        os.close(descriptor)


def attach_all(own: Segment, names: Sequence[str], size_bytes: int) -> list[Segment]:
    """Every rank's segment in rank order; `own` stands in its own place."""
    segments: list[Segment] = []
    try:
        for name in names:  # one at a time: those mapped so far are closed if the next fails
            segment = own if name == own.name else attach(name, size_bytes, directory=own.path.parent)
            segments.append(segment)
    except SegmentError:
        for segment in segments:
            if segment is not own:
                segment.close()
        raise
    return segments


def free_bytes(directory: Path = SHM_DIRECTORY) -> int:
    """Bytes that can still be reserved."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def stale_segments(directory: Path = SHM_DIRECTORY) -> list[StaleSegment]:
    """Segments whose owner is gone (or whose pid now belongs to a process that started at another time)."""
    stale = []
    try:
        paths = sorted(directory.glob(f"{PREFIX}*"))
    except OSError:
        return []
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is None or _start_time(int(match["pid"])) == int(match["start"]):
            continue
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            continue  # its owner, or another clean-up, was faster
        stale.append(StaleSegment(path=path, size_bytes=size_bytes, pid=int(match["pid"])))
    return stale


def remove_stale(directory: Path = SHM_DIRECTORY) -> list[StaleSegment]:
    """Remove the segments of dead runs; returns those removed. Segments of other users are left alone."""
    removed = []
    for segment in stale_segments(directory):
        try:
            segment.path.unlink()
        except (FileNotFoundError, PermissionError):
            continue
        removed.append(segment)
    return removed


def _mapped(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map with page tables filled: no page fault inside a timed window."""
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _no_room(directory: Path, need: int, free: int) -> SegmentError:
    return SegmentError(
        f"{directory} has {free} bytes free and a rank needs {need}: lower max_tokens_per_rank, ep_size or hidden, "
        f"remove stale segments ({directory}/{PREFIX}*), or enlarge it (mount -o remount,size=...; "
        "containers: --shm-size)"
    )


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none. With the pid it names a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the command before it may hold anything
