"""What the CPU of a machine is, what of it this process may use, and how its clocks stand.

What a machine does not tell raises OSError, ValueError or LookupError, except where it may be absent.
"""

import re
import statistics
from pathlib import PurePosixPath

from epcross.harness.storing.probe import Probe

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def model(probe: Probe) -> str:
    """Its product name."""
    fields = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", probe.text("/proc/cpuinfo"), re.MULTILINE))
    if fields.get("model name"):
        return fields["model name"].strip()
    if "CPU part" in fields:  # aarch64 gives numbers only
        return f"implementer {fields['CPU implementer']} part {fields['CPU part']}"
    raise ValueError("/proc/cpuinfo names no model")


def online(probe: Probe) -> list[int]:
    """Numbers of the cores that are switched on."""
    return cpu_list(probe.text(f"{_CPUS}/online"))


def last_cache_bytes(probe: Probe) -> int:
    """Size of the highest-level cache of the first available core."""
    core = probe.affinity()[0]
    sizes: dict[int, int] = {}
    for index in probe.entries(f"{_CPUS}/cpu{core}/cache"):
        if index.startswith("index"):
            folder = f"{_CPUS}/cpu{core}/cache/{index}"
            size = probe.text(f"{folder}/size").strip()  # such as 36608K
            sizes[int(probe.text(f"{folder}/level"))] = int(size.rstrip("KMG")) * _BINARY[size.lstrip("0123456789")]
    if not sizes:
        raise ValueError(f"{_CPUS}/cpu{core}/cache describes no cache")
    return sizes[max(sizes)]


def numa_nodes(probe: Probe) -> dict[str, list[int]]:
    """The cores of each NUMA node."""
    nodes = cpu_list(probe.text(f"{_NODES}/online"))
    return {str(node): cpu_list(probe.text(f"{_NODES}/node{node}/cpulist")) for node in nodes}


def governor(probe: Probe) -> str:
    """What sets the clock of the available cores; several words if they differ."""
    cores = probe.affinity()
    return " ".join(sorted({probe.text(f"{_CPUS}/cpu{core}/cpufreq/scaling_governor").strip() for core in cores}))


def turbo(probe: Probe) -> bool:
    """Whether clocks above the nominal one are allowed."""
    no_turbo = _text_or_empty(probe, f"{_CPUS}/intel_pstate/no_turbo").strip()
    return no_turbo == "0" if no_turbo else probe.text(f"{_CPUS}/cpufreq/boost").strip() == "1"


def quota_cores(probe: Probe) -> float | None:
    """The tightest CPU quota of this process's cgroup and those above it, in cores; None if unlimited."""
    limits = []
    for folder in _cpu_cgroups(probe):
        quota, _, period = _text_or_empty(probe, f"{folder}/cpu.max").partition(" ")  # version 2
        if not period:
            quota = _text_or_empty(probe, f"{folder}/cpu.cfs_quota_us").strip()  # version 1
            period = _text_or_empty(probe, f"{folder}/cpu.cfs_period_us").strip()
        if quota not in ("", "max", "-1") and period:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def clock_snapshot(probe: Probe | None = None) -> dict[str, float | int | None]:
    """Clocks and load now, cheap enough for before and after each point; null where this machine does not tell."""
    probe = probe or Probe()
    cores = set(probe.affinity())
    clocks = re.findall(
        r"^processor\s*:\s*(\d+)$.*?^cpu MHz\s*:\s*([\d.]+)$",
        _text_or_empty(probe, "/proc/cpuinfo"),
        re.MULTILINE | re.DOTALL,
    )
    mhz = [float(clock) for core, clock in clocks if int(core) in cores]
    counts = [_text_or_empty(probe, f"{_CPUS}/cpu{c}/thermal_throttle/core_throttle_count") for c in sorted(cores)]
    load = _text_or_empty(probe, "/proc/loadavg").split()
    quota_hits = [
        int(found[1])
        for folder in _cpu_cgroups(probe)
        if (found := re.search(r"^nr_throttled (\d+)", _text_or_empty(probe, f"{folder}/cpu.stat"), re.MULTILINE))
    ]
    return {
        "mhz_min": min(mhz, default=None),
        "mhz_median": statistics.median(mhz) if mhz else None,
        "mhz_max": max(mhz, default=None),
        "load_1min": float(load[0]) if load else None,
        "thermal_throttles": sum(map(int, counts)) if all(counts) else None,
        "quota_throttles": sum(quota_hits) if quota_hits else None,
    }


def throttled(before: dict[str, float | int | None], after: dict[str, float | int | None]) -> bool:
    """Whether heat or a CPU quota stopped a core between two snapshots; False where the machine does not tell."""
    for name in ("thermal_throttles", "quota_throttles"):
        first, last = before[name], after[name]
        if first is not None and last is not None and last > first:
            return True
    return False


def cpu_list(text: str) -> list[int]:
    """The numbers of a kernel list such as `0-3,8`.

    Raises:
        ValueError: `text` is no such list.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _cpu_cgroups(probe: Probe) -> list[str]:
    """Folders of the cgroups that limit this process's CPU time, innermost first.

    Inside a container the innermost path may be the host's and not exist here; the outer ones do.
    """
    folders = []
    for line in _text_or_empty(probe, "/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if path and (not controllers or "cpu" in controllers.split(",")):
            mount = PurePosixPath("/sys/fs/cgroup") / controllers
            inner = PurePosixPath(path.lstrip("/"))
            folders += [str(mount / folder) for folder in (inner, *inner.parents)]
    return list(dict.fromkeys(folders))


def _text_or_empty(probe: Probe, path: str) -> str:
    try:
        return probe.text(path)
    except OSError:
        return ""
