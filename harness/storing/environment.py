"""What a run ran on, as JSON: machine, software and limits. Whatever cannot be read is null, with the reason beside it.

Everything is read through a `Probe`, so that a machine that nobody has at hand can be described in a test.
"""

import json
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

import epcross
from epcross.harness.storing.probe import Probe

PACKAGES = (
    "numpy", "ml_dtypes", "scipy", "pandas", "pyarrow", "pybind11", "hydra-core", "submitit", "torch", "cuda-bindings",
    "cuda-core", "nvidia-cuda-nvrtc", "nvidia-ml-py", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
VARIABLES = (
    "MALLOC_ARENA_MAX", "NVIDIA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
VARIABLES_OF = (
    "CUDA_", "DG_", "EP_", "FLASHINFER_", "GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVSHMEM_", "OMP_", "OPENBLAS_",
    "TORCH_", "TRITON_", "TRTLLM_", "UCX_",
)  # fmt: skip
"""The only environment variables that are stored: these, and those of libraries, which begin so. They steer threads,
devices, transports and generated kernels; one whose name speaks of a secret is left out."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH")
_LIBRARIES = re.compile(r"/(lib(?:c|stdc\+\+|gomp|iomp5|openblas|nccl|nvshmem|cuda|cudart|mpi|fabric|ucp)[-.\d][^/]*)$")
_GPU_FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "pci.bus_id", "clocks.sm", "clocks.mem",
    "mig.mode.current",
)  # fmt: skip
_COMMAND_TIMEOUT_S = 10.0
_SOFTWARE_TIMEOUT_S = 60.0  # torch may have to be read from a cold disk


def collect(probe: Probe | None = None) -> dict[str, Any]:
    """The environment record. Takes at most the time limit of each outside command; never raises for an odd machine."""
    return _collect(probe or Probe())


def _stored(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in VARIABLES or (name.startswith(VARIABLES_OF) and not _SECRET.search(name))
    }


def _collect(probe: Probe) -> dict[str, Any]:
    absent: dict[str, str] = {}

    def read(name: str, source: Callable[[], Any]) -> Any:
        """The value of one field; None, and the reason in `absent`, if it cannot be had."""
        try:
            return source()
        except (OSError, ValueError, LookupError) as error:
            words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            absent[name] = " ".join(words.split()) or type(error).__name__
            return None

    gpus = read("gpus", lambda: _gpus(probe))
    return {
        "collected_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hostname": probe.hostname(),
        "container": read("container", lambda: _container(probe)),
        "kernel": read("kernel", lambda: probe.text("/proc/sys/kernel/osrelease").strip()),
        "cpu": {
            "model": read("cpu.model", lambda: _cpu_model(probe)),
            "architecture": probe.architecture(),
            "cores_available": read("cpu.cores_available", probe.affinity),
            "cores_online": read("cpu.cores_online", lambda: cpu_list(probe.text(f"{_CPUS}/online"))),
            "quota_cores": read("cpu.quota_cores", lambda: _quota_cores(probe)),
            "last_cache_bytes": read("cpu.last_cache_bytes", lambda: _last_cache_bytes(probe)),
            "numa_nodes": read("cpu.numa_nodes", lambda: _numa_nodes(probe)),
            "governor": read("cpu.governor", lambda: _governor(probe)),
            "turbo": read("cpu.turbo", lambda: _turbo(probe)),
        },
        "clocks": cpu_clock_snapshot(probe),
        "memory": {
            "total_bytes": read("memory.total_bytes", lambda: _memory_bytes(probe, "MemTotal")),
            "available_bytes": read("memory.available_bytes", lambda: _memory_bytes(probe, "MemAvailable")),
        },
        "dev_shm": read("dev_shm", lambda: _space(probe, "/dev/shm")),
        "epcross": epcross.__version__,
        "python": platform.python_version(),
        "packages": {name: read(f"packages.{name}", lambda name=name: _version(probe, name)) for name in PACKAGES},
        "libraries": read("libraries", lambda: _libraries(probe)),
        "compiler": read("compiler", lambda: _compiler(probe)),
        "gpus": gpus,
        "gpu_topology": read("gpu_topology", lambda: probe.output(["nvidia-smi", "topo", "-m"], _COMMAND_TIMEOUT_S)),
        "gpu_software": read("gpu_software", lambda: _gpu_software(probe)) if gpus else None,
        "variables": _stored(probe.variables),
        "absent": absent,
    }


def machine_facts(environment: dict[str, Any]) -> dict[str, Any]:
    """What makes two machines comparable, for `provenance.machine_hash`: products and shape, no names or serials.

    The cores and the quota that the run had count as part of the machine: they change the numbers as a smaller
    machine would. The exact kernel, memory and clock of the day do not.
    """
    cpu = environment["cpu"]
    cores = cpu["cores_available"]
    gpus = environment["gpus"]
    return {
        "cpu_model": cpu["model"],
        "architecture": cpu["architecture"],
        "cores": None if cores is None else len(cores),
        "quota_cores": cpu["quota_cores"],
        "last_cache_bytes": cpu["last_cache_bytes"],
        "numa_nodes": None if cpu["numa_nodes"] is None else len(cpu["numa_nodes"]),
        "gpus": None if gpus is None else [(gpu["name"], gpu["driver_version"], gpu["memory.total"]) for gpu in gpus],
        "gpu_topology": environment["gpu_topology"],
    }


def gpu_uuids(gpus: Iterable[Mapping[str, Any]] | None) -> list[str]:
    """UUIDs of `gpus`, as torch or the driver lists them, without the prefix that the driver alone gives them."""
    return [uuid for gpu in gpus or () if (uuid := str(gpu.get("uuid") or "").removeprefix("GPU-"))]


def allocation_id(probe: Probe | None = None) -> str | None:
    """The scheduler's job that this process runs in; None outside one."""
    job = (probe or Probe()).variables.get("SLURM_JOB_ID")
    return f"slurm-{job}" if job else None


def cpu_clock_snapshot(probe: Probe | None = None) -> dict[str, float | int | None]:
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


_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _cpu_model(probe: Probe) -> str:
    fields = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", probe.text("/proc/cpuinfo"), re.MULTILINE))
    if fields.get("model name"):
        return fields["model name"].strip()
    if "CPU part" in fields:  # aarch64 gives numbers only
        return f"implementer {fields['CPU implementer']} part {fields['CPU part']}"
    raise ValueError("/proc/cpuinfo names no model")


def _last_cache_bytes(probe: Probe) -> int:
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


def _numa_nodes(probe: Probe) -> dict[str, list[int]]:
    nodes = cpu_list(probe.text(f"{_NODES}/online"))
    return {str(node): cpu_list(probe.text(f"{_NODES}/node{node}/cpulist")) for node in nodes}


def _governor(probe: Probe) -> str:
    cores = probe.affinity()
    return " ".join(sorted({probe.text(f"{_CPUS}/cpu{core}/cpufreq/scaling_governor").strip() for core in cores}))


def _turbo(probe: Probe) -> bool:
    no_turbo = _text_or_empty(probe, f"{_CPUS}/intel_pstate/no_turbo").strip()
    return no_turbo == "0" if no_turbo else probe.text(f"{_CPUS}/cpufreq/boost").strip() == "1"


def _quota_cores(probe: Probe) -> float | None:
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


def _container(probe: Probe) -> str:
    """A word for the container this runs in, from the marks that the usual ones leave; `none` without any."""
    for mark, word in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/.singularity.d", "apptainer")):
        if probe.exists(mark):
            return word
    found = re.search(r"docker|kubepods|lxc|enroot|containerd", probe.text("/proc/self/cgroup"))
    return found[0] if found else "none"


def _memory_bytes(probe: Probe, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", probe.text("/proc/meminfo"), re.MULTILINE)
    if not found:
        raise ValueError(f"/proc/meminfo has no {name}")
    return int(found[1]) * 1024


def _space(probe: Probe, folder: str) -> dict[str, int]:
    total_bytes, free_bytes = probe.space(folder)
    return {"total_bytes": total_bytes, "free_bytes": free_bytes}


def _version(probe: Probe, name: str) -> str:
    try:
        return probe.version(name)
    except metadata.PackageNotFoundError:
        raise LookupError("not installed") from None


def _libraries(probe: Probe) -> dict[str, str]:
    """Shared libraries that can matter, as this process has them loaded: name to path."""
    paths = {line.split(maxsplit=5)[5] for line in probe.text("/proc/self/maps").splitlines() if line.count("/")}
    return {found[1]: path for path in sorted(paths) if (found := _LIBRARIES.search(path))}


def _compiler(probe: Probe) -> dict[str, str]:
    command = probe.variables.get("CXX") or "c++"
    words = probe.output([*command.split(), "--version"], _COMMAND_TIMEOUT_S)
    return {"command": command, "version": words.splitlines()[0]}


def _gpus(probe: Probe) -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    lines = [line for line in probe.output(command, _COMMAND_TIMEOUT_S).splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, (v.strip() for v in line.split(",")), strict=True)) for line in lines]


def _gpu_software(probe: Probe) -> dict[str, Any]:
    """Asked of another process: this one loads neither torch nor CUDA."""
    words = probe.output([sys.executable, "-P", "-m", "epcross.harness.storing.gpu_software"], _SOFTWARE_TIMEOUT_S)
    return json.loads(words.splitlines()[-1])


def _text_or_empty(probe: Probe, path: str) -> str:
    try:
        return probe.text(path)
    except OSError:
        return ""
