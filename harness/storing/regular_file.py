"""Files of a run folder, opened only where they are regular files: a named pipe in the place of one would be waited for
without end, and a device has no end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotRegular(OSError):
    """Something else than a regular file stands where one belongs; `strerror` says what."""


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of the regular file at `path`, opened with `flags` of `os.open`. Never waits for a peer.

    Raises:
        NotRegular: it is a named pipe, a socket, a device or a folder.
        OSError: it cannot be opened.
    """
    try:
        # without O_NONBLOCK the open itself would wait for the other end of a pipe; regular files ignore it
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket; a pipe that nobody reads; a folder, to be written
            raise _not_regular(path, path.stat().st_mode) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _not_regular(path, mode)
    os.set_blocking(descriptor, True)
    return descriptor


def read_regular(path: Path) -> bytes:
    """The bytes of the regular file at `path`.

    Raises:
        NotRegular: as `open_regular`.
        OSError: it cannot be read.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def append_regular(path: Path) -> BinaryIO:
    """The regular file at `path`, made if it is missing, to append to.

    Raises:
        NotRegular: as `open_regular`.
        OSError: it cannot be written.
    """
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def seats(path: Path) -> list[Path]:
    """`path`, and what it leads to if that lies in another folder: what is said beside either counts."""
    target = path.resolve()
    return [path] if path.parent.resolve() == target.parent else [path, target]


def _not_regular(path: Path, mode: int) -> NotRegular:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return NotRegular(errno.EINVAL, f"it is {kind}, and a regular file belongs there", str(path))
