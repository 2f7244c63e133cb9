"""Files that are whole or are known not to be: JSON with a checksum, written in one step.

A sealed file is one JSON object `{"sha256": "<of the content's bytes>", "content": ...}`, so any tool can read it, and
a reader here knows at once whether every byte is what was written. Writing goes to a temporary name in the same
folder, is flushed to the disk and renamed: a reader sees the old file, no file or the whole file.
"""

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.storing.regular_file import read_regular

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is still being written; one that stays behind belonged to a killed process."""

_HEAD = b'{"sha256":"%s","content":'
_HEAD_LENGTH = len(_HEAD % (b"0" * 64))
_TAIL = b"}\n"


class DamagedFile(StoreError):
    """A sealed file that was cut, changed or never was one."""


def seal(content: Any, *, indent: int | None = None) -> bytes:
    """The bytes of a sealed file with `content`.

    Raises:
        ValueError: `content` holds a NaN or an infinity, for which JSON has no word.
        TypeError: `content` holds something that is no JSON value.
    """
    separators = None if indent else (",", ":")
    return _sealed(json.dumps(content, allow_nan=False, indent=indent, separators=separators).encode())


def unseal(raw: bytes) -> Any:
    """The content of a sealed file's bytes.

    Raises:
        DamagedFile: the bytes are not exactly what `seal` made.
    """
    body = raw[_HEAD_LENGTH : -len(_TAIL)]
    if raw != _sealed(body):
        raise DamagedFile(f"cut or changed: {len(raw)} bytes whose checksum does not hold")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"its checksum holds, but it is no JSON: {error}") from error


def read_sealed(path: Path) -> Any:
    """The content of the sealed file at `path`.

    Raises:
        DamagedFile: it was cut or changed.
        OSError: it cannot be read, or is no regular file.
    """
    try:
        return unseal(read_regular(path))
    except DamagedFile as error:
        raise DamagedFile(f"{path} is damaged ({error})") from None


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step, flushed to the disk. On any failure the file there before is untouched.

    Raises:
        OSError: the disk is full, broken or read-only; no temporary file stays behind.
    """
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # a network disk may report a full quota only here
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """A fresh hidden name beside `path`, on the same file system, so that a rename is one step."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def flush_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):  # some network disks refuse to flush a folder; the file itself is flushed
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sealed(body: bytes) -> bytes:
    return _HEAD % hashlib.sha256(body).hexdigest().encode() + body + _TAIL
