"""What a run ran on, as JSON: machine, software and limits. Whatever cannot be read is null, with the reason beside it.

Everything is read through a `Probe`, so that a machine that nobody has at hand can be described in a test.
"""

import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import epcross
from epcross.harness.storing import cpu_facts
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
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # control sequences of a terminal (ECMA-48, 5.4)
_GPU_FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "pci.bus_id", "clocks.sm", "clocks.mem", "power.limit",
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
            "model": read("cpu.model", lambda: cpu_facts.model(probe)),
            "architecture": probe.architecture(),
            "cores_available": read("cpu.cores_available", probe.affinity),
            "cores_online": read("cpu.cores_online", lambda: cpu_facts.online(probe)),
            "quota_cores": read("cpu.quota_cores", lambda: cpu_facts.quota_cores(probe)),
            "last_cache_bytes": read("cpu.last_cache_bytes", lambda: cpu_facts.last_cache_bytes(probe)),
            "numa_nodes": read("cpu.numa_nodes", lambda: cpu_facts.numa_nodes(probe)),
            "governor": read("cpu.governor", lambda: cpu_facts.governor(probe)),
            "turbo": read("cpu.turbo", lambda: cpu_facts.turbo(probe)),
        },
        "clocks": cpu_facts.clock_snapshot(probe),
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


def as_stored(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The record as a run keeps it: the topology without the escapes with which nvidia-smi underlines its head. The
    hash of a machine is of the words as they were read, escapes and all, as it is in the rows of every run so far."""
    topology = environment.get("gpu_topology")
    plain = _ESCAPES.sub("", topology) if isinstance(topology, str) else topology
    return {**environment, "gpu_topology": plain} if "gpu_topology" in environment else dict(environment)


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
