"""What NVML says of the GPUs around each seed's series: how they are, and who else is on them; rows keep the worst."""

import json
from typing import Any, Protocol

from epcross.harness.backends.base import Group
from epcross.harness.measuring.gpu_processes import GpuProcesses, Listing, strangers
from epcross.harness.measuring.gpu_state import GpuMonitor, GpuState, nvml_here, slowed, summary
from epcross.harness.terms import Flag


class _Reads(Protocol):
    def read(self) -> Any:
        """What there is to see now; None if nothing is told."""


class GpuWatch:
    """The readings of one rank. Without arguments, as on the CPU, it sees nothing."""

    def __init__(self, monitor: _Reads | None = None, processes: _Reads | None = None) -> None:
        self._monitor, self._processes = monitor, processes
        self._states: list[GpuState] = []
        self._listings: list[Listing | None] = []

    def read(self) -> None:
        """One reading, before or after a series."""
        state = self._monitor.read() if self._monitor else None
        if state is not None:
            self._states.append(state)
        self._listings.append(self._processes.read() if self._processes else None)

    def fields(self, group: Group) -> tuple[dict[str, Any], frozenset[Flag]]:
        """Record fields of the readings of all ranks, and the flags that these earn. Collective."""
        own = {
            "states": [state.to_json() for state in self._states],
            "listings": [listing and listing.to_json() for listing in self._listings],
        }
        told = [json.loads(data) for data in group.all_gather(json.dumps(own).encode())]
        states = [GpuState(**{**s, "reasons": tuple(s["reasons"])}) for rank in told for s in rank["states"]]
        others = strangers([[listing and Listing.from_json(listing) for listing in rank["listings"]] for rank in told])
        found = (slowed(reason for state in states for reason in state.reasons), Flag.NOT_ALONE if others else None)
        return {**summary(states), "other_processes": others}, frozenset(flag for flag in found if flag is not None)


def open_watch() -> GpuWatch:
    """A watch of torch's current GPU; it sees nothing without NVML or a GPU."""
    found = nvml_here()
    return GpuWatch(GpuMonitor(*found), GpuProcesses(*found)) if found else GpuWatch()
