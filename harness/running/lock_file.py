"""A file that everybody on this machine may lock, and in which those that hold it say who they are.

The kernel knows who holds it, and frees it when the holder's process ends, however it ends. Files stay where they are:
to remove one that somebody is about to lock would make two locks of one. They lie in /tmp and not in TMPDIR, which
schedulers and users set differently, so that those who should meet would not. Containers with a /tmp of their own
meet in a folder that all of them see, if EPCROSS_LOCKS names it.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from epcross.harness.errors import EpcrossError
from epcross.harness.storing.process_identity import alive, this_process

_NAMED = os.environ.get("EPCROSS_LOCKS")
FOLDER = Path(_NAMED or "/tmp")

PATIENCE_S = 0.5
"""For those who hold a lock for a moment only: who looks whether it is free, or is about to share it."""

_POLL_S = 0.02
_MOST_BYTES = 1 << 16  # of a file; a line has some 200
_MOST_WORDS = 400
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LockUnusable(EpcrossError):
    """What lies where a lock, or the folder of all locks, should be cannot be used; the message says what and the next
    step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock, in its own words."""

    who: str  # such as `run results/runs/...`
    pid: int
    since: str  # UTC, ISO 8601

    def __str__(self) -> str:
        return f"{self.who} (process {self.pid}, since {self.since})"


class LockFile:
    """An open lock file; what is held ends with `close`, or with this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = open_lock(path)

    def take(self, who: str, *, shared: bool) -> bool:
        """Hold it alone or `shared`, and say so in the file; whether that was possible within `PATIENCE_S`."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._taken(who, shared):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def say(self, who: str) -> None:
        """Other words of the one who holds it alone."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, 0)
        self._add(who)

    def close(self) -> None:
        """Give up what is held. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_free(self) -> bool:
        """Whether nobody holds it. Until `close`, who wants it has to wait."""
        return self._locked(fcntl.LOCK_EX)

    def holders(self) -> list[Holder]:
        """Those who said that they hold it, without those who are certainly dead."""
        found = []
        for line in os.pread(self.fd, _MOST_BYTES, 0).splitlines():
            with contextlib.suppress(*_NONSENSE):  # anybody may write here
                words: Mapping[str, Any] = json.loads(line)
                if alive(words):
                    who, since = (_plain(words[name]) for name in ("who", "since"))
                    found.append(Holder(who=who, pid=int(words["pid"]), since=since))
        return found

    def _taken(self, who: str, shared: bool) -> bool:
        if not self._is_in_place():  # somebody tidied up after it was opened
            os.close(self.fd)
            self.fd = open_lock(self.path)
        # alone even where it will be shared: whoever was here is gone then, and its words with it
        if self._locked(fcntl.LOCK_EX):
            self.say(who)
            # not in one step: where another came between, it has the lock, and we have none
            done = not shared or self._locked(fcntl.LOCK_SH)
        else:
            done = shared and self._locked(fcntl.LOCK_SH)
            if done:
                self._add(who)
        return done and self._is_in_place()

    def _locked(self, how: int) -> bool:
        try:
            fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _unusable(self.path, error) from error
        return True

    def _add(self, who: str) -> None:
        line = {**this_process(), "who": who, "since": datetime.now(UTC).isoformat(timespec="seconds")}
        with contextlib.suppress(OSError):  # a full disk: it is held all the same
            os.write(self.fd, json.dumps(line).encode() + b"\n")  # whole and at the end, whoever else writes

    def _is_in_place(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fd), self.path.lstat())
        return False


def open_lock(path: Path) -> int:
    """The file at `path`, made if need be, for everybody to write to.

    Raises:
        LockUnusable: it is no such file, or cannot be made.
    """
    try:
        return _opened(path)
    except OSError as error:
        raise _unusable(path, error) from error


def require_folder(folder: Path = FOLDER) -> None:
    """Make a lock in `folder` and delete it: whoever cannot would measure beside others and not know it.

    Raises:
        LockUnusable: there is no such folder, locks cannot be made in it, or each process would find another one.
    """
    if not folder.is_absolute():
        raise _folder_unusable(folder, "each process would look for it in its own current folder")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".epcross-") as own:
            fd = _opened(Path(own) / "try.lock")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)
    except OSError as error:
        raise _folder_unusable(folder, error.strerror) from error


def _opened(path: Path) -> int:
    while True:
        # without O_CREAT, with which Linux keeps others' files in /tmp from being opened (fs.protected_regular)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, _OPEN)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
            raise OSError(0, "it is no file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".epcross-") as file:
            os.fchmod(file.fileno(), 0o666)  # before it has its name: no other user finds it closed
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)


def _unusable(path: Path, error: OSError) -> LockUnusable:
    return LockUnusable(
        f"{path} cannot be used as the lock that keeps two measurements apart: {error.strerror}. Make "
        f"{path.parent} writable, and have {path} deleted if it is there; or let EPCROSS_LOCKS name another folder, "
        "the same for all who measure on this machine"
    )


def _folder_unusable(folder: Path, why: str | None) -> LockUnusable:
    given = f"EPCROSS_LOCKS={_plain(folder)}" if _NAMED else f"{_plain(folder)} (EPCROSS_LOCKS is not set)"
    return LockUnusable(
        f"{given} cannot hold the locks that keep two measurements apart: {why}. It must be the whole path of a folder "
        "that exists and can be written to: make it so, or let EPCROSS_LOCKS name another one, the same for all who "
        "measure on this machine" + (", or unset it to take /tmp" if _NAMED else "")
    )


def _plain(words: Any) -> str:
    """Words of somebody else, as a terminal may show them."""
    return "".join(filter(str.isprintable, str(words)))[:_MOST_WORDS]
