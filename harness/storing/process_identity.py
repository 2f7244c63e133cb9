"""Which process it is that a file names, and whether it lives: pids alone are given again."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; None if there is no such process (a zombie is none).

    Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime); the name before them may hold blanks.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def this_process() -> dict[str, Any]:
    """This process as JSON values, to be known again on the same machine."""
    return {
        "pid": os.getpid(),
        "start": process_start(os.getpid()),
        "host": platform.node(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),  # containers of one host number processes each for itself
    }


def alive(owner: Mapping[str, Any]) -> str | None:
    """Why `owner` must be taken as alive; None if it is certainly dead."""
    here = this_process()
    if owner.get("host") != here["host"]:
        return "another host, which cannot be asked from here"
    if owner.get("boot") != here["boot"]:
        return None  # the machine was restarted since
    if owner.get("pid_namespace") != here["pid_namespace"]:
        return "another container, which cannot be asked from here"
    pid = owner.get("pid")
    return "alive" if isinstance(pid, int) and process_start(pid) == owner.get("start") else None
