"""Whether the cores of a run's ranks were its own: ranks of two runs on one core time each other.

Such runs are not refused, as they are on a GPU: on a CPU somebody may well want many small runs at once, whose numbers
nobody reads. Their rows are flagged. Runs on cores of their own, such as on the halves of a machine, see nothing of
each other.

Each run shares a lock on a file for each core. A unit was alone if nobody else shares it before and after, and nobody
has come meanwhile: whoever comes writes into the file.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from epcross.harness.running.lock_file import FOLDER, LockUnusable, open_lock
from epcross.harness.running.rank_place import place
from epcross.harness.running.seat import Seat
from epcross.harness.terms import Domain

_FLOCK = "hhqqi"
"""struct flock of 64-bit Linux: type, whence, start, length, pid. Source: fcntl(2)."""


class CoreWatch:
    """Watches `cores` (numbers of the kernel) for this run, whose ranks on this host it speaks for, until `close`.

    A core whose file cannot be used is not watched: nothing is said rather than something wrong. A `folder` that cannot
    be used is refused before a run begins (`lock_file.require_folder`).
    """

    def __init__(self, cores: Iterable[int], folder: Path = FOLDER) -> None:
        self._files: list[int] = []
        self._before: list[int] | None = None
        for core in sorted(set(cores)):
            with contextlib.suppress(LockUnusable, OSError):
                self._files.append(_shared(folder / f"epcross-core-{core}.lock"))

    def begin(self) -> None:
        """Something is timed from now on."""
        self._before = self._came() if self._alone() else None

    def was_alone(self) -> bool:
        """Whether no other run had a rank on one of the cores since `begin`."""
        return self._before == self._came() and self._alone()

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        for file in self._files:
            os.close(file)
        self._files = []

    def _alone(self) -> bool:
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)  # which would be refused if another one shares
        answers = (fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted) for file in self._files)
        return all(struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK for answer in answers)

    def _came(self) -> list[int]:
        """When somebody came last, in nanoseconds; as fine as the clock of the file system."""
        return [os.fstat(file).st_mtime_ns for file in self._files]


def _shared(path: Path) -> int:
    """The file at `path`, locked beside others, and written to for them to see. Raises `OSError`, `LockUnusable`."""
    file = open_lock(path)
    try:
        # of the open file, not of this process: to look for others' locks must not cost one's own
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, 0, 0, 0, 0))
        os.ftruncate(file, 0)
        os.write(file, b"%d\n" % os.getpid())
    except BaseException:
        os.close(file)
        raise
    return file


def watch_cores(seat: Seat, domain: Domain) -> CoreWatch:
    """The watch of the cores of all ranks of a host, for its first rank: they may well share cores with each other. The
    others' watches have no cores, and so has one where ranks are bound to none."""
    ranks = range(seat.local_size if seat.local_rank == 0 else 0)
    cores = (place(rank, seat.local_size, domain).core for rank in ranks)
    return CoreWatch(core for core in cores if core is not None)
