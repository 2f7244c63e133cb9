"""The few Linux calls by which processes here keep from outliving their parents and from sharing cores."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
SHM = Path("/dev/shm")


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when `parent` ends; exit now if it has ended already."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died between our fork and the call above
        sys.exit(128 + signum)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be reaped here."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


def kill_group(leader: int) -> None:
    """SIGKILL to every process of the group that `leader` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def reap_group(leader: int, limit_s: float = 2.0) -> None:
    """Wait until the killed members of a group that became our children (see `adopt_orphans`) are gone."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-leader, os.WNOHANG) == (0, 0):
                time.sleep(0.002)


def remove_segments(shared_name: str) -> None:
    """Unlink the shared memory of a process group whose worker here is dead; peers that map it keep their mapping."""
    for path in SHM.glob(f"epcross-{shared_name}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def cores_in_order(available: Iterable[int]) -> list[int]:
    """Cores for ranks 0, 1, ...: one hardware thread of each core first, then the siblings.

    Source: Linux, Documentation/ABI/stable/sysfs-devices-system-cpu, `thread_siblings_list`.
    """
    seen: set[str] = set()
    first: list[int] = []
    later: list[int] = []
    for core in sorted(available):
        siblings = f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            name = Path(siblings).read_text().strip()
        except OSError:
            name = str(core)
        (later if name in seen else first).append(core)
        seen.add(name)
    return first + later
