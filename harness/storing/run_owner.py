"""Which process may write to a run folder: the file `owner`, gone when that process has ended well."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.storing.process_identity import alive, this_process
from epcross.harness.storing.regular_file import read_regular
from epcross.harness.storing.sealed import write_whole


def claim(path: Path) -> None:
    """Make this process the only one that writes to the run folder; repeating it does no harm.

    Raises:
        StoreError: another process that lives, or may live on another host, owns it, or the folder cannot be written.
    """
    try:
        take(path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}. Free space there, make it writable, or start a new run"
        ) from error


def take(path: Path) -> None:
    """As `claim`, for a caller that has its own words for a folder that cannot be written.

    Raises:
        StoreError: another process that lives, or may live on another host, owns it.
        OSError: the folder cannot be written.
    """
    owner_file = path / "owner"
    with _folder_lock(path):  # of two processes that both find a dead owner, one may take over
        owner = _read_owner(owner_file)
        if owner is not None and owner != this_process():
            verdict = alive(owner)
            if verdict:
                raise StoreError(
                    f"{path} is in use by process {owner.get('pid')} on {owner.get('host')} ({verdict}). Wait for it "
                    f"or cancel it; if that process is gone, delete {owner_file} and try again"
                )
        write_whole(owner_file, json.dumps(this_process()).encode())


def release(path: Path) -> None:
    """Give the run folder up, if this process owns it."""
    owner_file = path / "owner"
    with contextlib.suppress(OSError), _folder_lock(path):
        if _read_owner(owner_file) == this_process():
            owner_file.unlink()


def owner_of(path: Path) -> str | None:
    """Who writes to the run folder now, as words; None if nobody does or the owner has died."""
    owner = _read_owner(path / "owner")
    verdict = alive(owner) if owner else None
    return f"process {owner.get('pid')} on {owner.get('host')} ({verdict})" if owner and verdict else None


def _read_owner(owner_file: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(read_regular(owner_file))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


@contextlib.contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a disk without locks; dead owners are judged on one host only
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
