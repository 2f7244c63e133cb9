"""Who else is on this process's GPU, by NVML: processes that are none of the run's spoil its numbers.

A run's own are known by their session: each worker leads one, and what it starts stays in it. Servers of MPS do no work
of their own, and their clients are listed themselves.

In a container NVML may list nothing, or pids as the host counts them. So a list that lacks the process which asks is
not used: nothing is said rather than something wrong.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MPS_SERVER = "nvidia-cuda-mps"
"""The name of its server and of its control daemon, as far as the kernel keeps it: 15 characters. Source: proc(5)."""

_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
"""Clients of MPS may stand in the second list alone. Source: NVML API reference, device queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What was found at one moment: the sessions of the processes on one GPU, one entry for each process."""

    host: str  # and its namespace of pids: numbers mean the same within one
    own: int  # session of the process that asked
    sessions: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Listing":
        """What `to_json` described."""
        return cls(host=data["host"], own=data["own"], sessions=tuple(data["sessions"]))


class System:
    """What the kernel says of a process. A test passes another, and so other processes."""

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def host(self) -> str:
        """This host, and the namespace in which it counts the processes that this one sees."""
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"

    def session(self, pid: int) -> int | None:
        """The session of a process; None if there is no such process any more. Asks no /proc, which may hide it."""
        try:
            return os.getsid(pid)
        except ProcessLookupError:
            return None
        except PermissionError:  # it is there, and none of ours
            return -1

    def name(self, pid: int) -> str:
        """Its name; empty if that is hidden."""
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return ""


class GpuProcesses:
    """Lists the processes of one GPU. `nvml` is the module pynvml, or a stand-in."""

    def __init__(self, nvml: Any, handle: Any, system: System | None = None) -> None:
        self._nvml, self._handle, self._system = nvml, handle, system or System()

    def read(self) -> Listing | None:
        """The processes now; None if NVML does not tell, or numbers them otherwise than this process sees them."""
        system, own = self._system, self._system.pid()
        listed, clients = (set(self._list(name)) for name in _LISTS)
        if own not in listed | clients:
            return None
        # of a process whose name is hidden nobody can say that it is no server, where there are clients of one
        servers = {MPS_SERVER, ""} if clients else {MPS_SERVER}
        # a process may be listed a moment longer than it lives
        sessions = {
            pid: system.session(pid)
            for pid in sorted(listed | clients)
            if pid in clients or system.name(pid) not in servers
        }
        return Listing(
            host=system.host(),
            own=system.session(own) or 0,
            sessions=tuple(session for session in sessions.values() if session is not None),
        )

    def _list(self, name: str) -> list[int]:
        ask = getattr(self._nvml, name, None)  # older bindings lack the second
        try:
            return [int(process.pid) for process in ask(self._handle)] if ask else []
        except self._nvml.NVMLError:
            return []


def strangers(listings: Sequence[Sequence[Listing | None]]) -> int | None:
    """The most processes of any GPU at any moment that are in no session of a rank; None if no list says who is who.

    `listings[r]` are rank r's. Where some ranks were told and others were not, as in containers of their own, the
    sessions of those are not known, and nothing is said.
    """
    found = [listing for own in listings for listing in own]
    known = [listing for listing in found if listing is not None]
    if not known or len(known) < len(found):
        return None
    ranks = {(listing.host, listing.own) for listing in known}
    return max(sum((listing.host, session) not in ranks for session in listing.sessions) for listing in known)
