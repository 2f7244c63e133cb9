"""The ways in which a node can be asked, beyond those of a run's record. A test passes another: another node."""

import os
import subprocess
import sys
from pathlib import Path

from epcross.harness.storing.probe import Probe

_TAKE_LIMIT_S = 20.0

_TAKE_FD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pidfd = os.pidfd_open(int(sys.argv[1]))
fd = libc.syscall(438, pidfd, 0, 0)  # pidfd_getfd(2)
sys.exit(0 if fd >= 0 else ctypes.get_errno() or 255)
"""


class NodeProbe(Probe):
    """Asks the node that this process runs on."""

    def link(self, path: str) -> str:
        """Where a symbolic link leads. Raises `OSError`."""
        return os.readlink(path)

    def writable(self, folder: str) -> bool:
        """Whether files can be made in a folder, or in the first folder above it that exists."""
        while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
            folder = os.path.dirname(folder)
        return os.access(folder, os.W_OK)

    def cache_folder(self) -> str:
        """Where kernels that are compiled on this node are kept."""
        from epcross.kernels.shm.build import cache_directory

        return str(cache_directory())

    def import_folders(self) -> list[str]:
        """Where this interpreter finds its libraries."""
        return [folder for folder in sys.path if folder]

    def content(self, path: str) -> bytes:
        """The bytes of a file. Raises `OSError`."""
        return Path(path).read_bytes()

    def gpu_holders(self, uuid: str) -> list[str]:
        """Who holds the lock of a GPU, in words. Raises `LookupError` if it cannot be used as a lock."""
        from epcross.harness.running.gpu_lock import gpu_holders
        from epcross.harness.running.lock_file import LockUnusable

        try:
            return [str(holder) for holder in gpu_holders(uuid.removeprefix("GPU-"))]
        except LockUnusable as error:
            raise LookupError(str(error)) from error

    def locks_refused(self) -> str:
        """Why no locks can be held on this node, as a sentence; empty if they can."""
        from epcross.harness.running.lock_file import LockUnusable, require_folder

        try:
            require_folder()
        except LockUnusable as error:
            return str(error)
        return ""

    def take_descriptor(self) -> int:
        """The error number with which a process is refused a file of its sibling, as a rank takes its peer's memory; 0
        if it is not refused."""
        with subprocess.Popen(["sleep", str(_TAKE_LIMIT_S)], stdin=subprocess.DEVNULL) as sibling:
            try:
                taken = subprocess.run(
                    [sys.executable, "-c", _TAKE_FD, str(sibling.pid)],
                    capture_output=True,
                    timeout=_TAKE_LIMIT_S,
                    check=False,
                )
                return taken.returncode
            except (OSError, subprocess.TimeoutExpired):
                return 255
            finally:
                sibling.kill()
