"""Where compiled kernels are kept, how files get there whole, and the lock that lets one process build while the others
wait for it."""

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from epcross.kernels.errors import BuildError

LOCK_LIMIT_S = 180.0


def cache_directory() -> Path:
    """Where artifacts are kept: EPCROSS_CACHE_DIR, else inside the virtual environment, else the user's cache.

    The only reader of that variable.
    """
    if chosen := os.environ.get("EPCROSS_CACHE_DIR"):
        return Path(chosen)
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "var" / "cache" / "epcross"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epcross"


@contextlib.contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock that the kernel releases with its holder, however it dies. The holder's pid is in the file.

    Raises:
        BuildError: another process, which is named, holds it for longer than `limit_s`.
    """
    with path.open("a+") as file:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = path.read_text().strip() or "unknown"
                    raise BuildError(
                        f"process {owner} has been building the kernels for more than {limit_s:g} s ({path}): "
                        "wait for it, or end it and try again"
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that everybody may read: whole or not at all, for every other process, and nothing else is left."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".build-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
