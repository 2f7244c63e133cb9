"""What one rank sees of its node, as one plain value that travels as JSON."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import epcross
from epcross.harness.doctor.gpus import Fabric, Gpu, parse_links, parse_peers, parse_query
from epcross.harness.doctor.probe import NodeProbe
from epcross.harness.running.seat import Seat

_COMMAND_LIMIT_S = 30.0
_IMEX = "/dev/nvidia-caps-imex-channels"
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse", "wekafs", "panfs", "9p", "afs")
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+[+\w.]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One rank's view."""

    seat: Seat
    arch: str = ""
    container: str = "none"
    pid_namespace: str = ""
    cores: int = 0
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES; None if unset
    peers: tuple[tuple[str, ...], ...] = ()  # words of the peer-access matrix
    imex_channels: int = 0
    imex: str = ""  # what its service says
    mps: bool = False
    take_descriptor: int = 0  # errno of taking a sibling's file; 0 is good
    locks_refused: str = ""  # why no locks can be held
    shm_free_bytes: int | None = None
    cache: str = ""  # where kernels compiled on this node are kept
    cache_disk: str = ""  # its file system
    cache_writable: bool = True
    nccl: str = ""
    nccl_version: str = ""
    version: str = epcross.__version__
    measure_hash: str = ""
    backends: Mapping[str, str | None] = field(default_factory=dict)  # name -> why it cannot be used here
    absent: Mapping[str, str] = field(default_factory=dict)  # what could not be learnt, and why

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of this rank: the one of its number on the node, among those that are visible."""
        seen = self.visible_gpus
        return seen[self.seat.local_rank] if self.seat.local_rank < len(seen) else None

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA would show this rank, in order."""
        if self.visible is None:
            return self.gpus
        found = []
        for word in filter(None, (part.strip() for part in self.visible.split(","))):
            match = [
                gpu for gpu in self.gpus if word == str(gpu.index) or (len(word) > 4 and gpu.uuid.startswith(word))
            ]
            if not match:
                break  # CUDA stops at the first that it does not know
            found += match[:1]
        return tuple(found)

    @property
    def domain(self) -> str:
        """The NVLink domain of this rank: cluster and clique of its GPU's fabric, or the node alone."""
        fabric = self.gpu.fabric if self.gpu else Fabric()
        return f"{fabric.cluster}.{fabric.clique}" if fabric.is_ready and fabric.cluster else self.seat.node

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Facts":
        """The facts that `to_json` described."""
        gpus = tuple(
            Gpu(
                **{
                    **gpu,
                    "fabric": Fabric(**gpu["fabric"]),
                    "throttle": tuple(gpu["throttle"]),
                    "processes": tuple(gpu["processes"]),
                    "holders": tuple(gpu["holders"]),
                }
            )
            for gpu in data["gpus"]
        )
        peers = tuple(map(tuple, data["peers"]))
        return cls(**{**data, "seat": Seat.from_json(data["seat"]), "gpus": gpus, "peers": peers})


def collect(
    seat: Seat,
    probe: NodeProbe | None = None,
    *,
    backends: Mapping[str, str | None] | None = None,
    measure_hash: str = "",
) -> Facts:
    """What this rank sees. Never raises for an odd machine: what cannot be learnt is in `absent`."""
    asked = probe or NodeProbe()
    absent: dict[str, str] = {}

    def read(name: str, source: Callable[[], Any], default: Any) -> Any:
        try:
            return source()
        except (OSError, ValueError, LookupError) as error:
            absent[name] = " ".join(str(error).split())[:300] or type(error).__name__
            return default

    query = read("gpus", lambda: parse_query(asked.output(["nvidia-smi", "-q", "-x"], _COMMAND_LIMIT_S)), None)
    gpus: tuple[Gpu, ...] = query.gpus if query else ()
    if gpus:
        status = ["nvidia-smi", "nvlink", "--status"]
        links = read("links", lambda: parse_links(asked.output(status, _COMMAND_LIMIT_S)), {})
        gpus = tuple(
            dataclasses.replace(
                gpu,
                links=links.get(gpu.uuid, (0, 0))[0],
                dead_links=links.get(gpu.uuid, (0, 0))[1],
                holders=tuple(read("locks", lambda gpu=gpu: asked.gpu_holders(gpu.uuid), ())),
            )
            for gpu in gpus
        )
    matrix = ["nvidia-smi", "topo", "-p2p", "r"]
    peers = read("peers", lambda: parse_peers(asked.output(matrix, _COMMAND_LIMIT_S)), []) if len(gpus) > 1 else []
    cache = asked.cache_folder()
    nccl = _nccl(asked)
    return Facts(
        seat=seat,
        arch=asked.architecture(),
        container=read("container", lambda: _container(asked), "unknown"),
        pid_namespace=read("pid_namespace", lambda: asked.link("/proc/self/ns/pid"), ""),
        cores=len(read("cores", asked.affinity, [])),
        driver=query.driver if query else "",
        cuda=query.cuda if query else "",
        gpus=gpus,
        visible=asked.variables.get("CUDA_VISIBLE_DEVICES"),
        peers=tuple(map(tuple, peers)),
        imex_channels=len(read("imex_channels", lambda: asked.entries(_IMEX), [])) if gpus else 0,
        imex=_imex(asked) if any(gpu.fabric.cluster for gpu in gpus) else "",
        mps=asked.exists(asked.variables.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps") + "/control"),
        take_descriptor=read("take_descriptor", asked.take_descriptor, 255) if gpus else 0,
        locks_refused=asked.locks_refused(),
        shm_free_bytes=read("dev_shm", lambda: asked.space("/dev/shm")[1], None),
        cache=cache,
        cache_disk=read("cache_disk", lambda: disk_of(asked.text("/proc/self/mounts"), cache), ""),
        cache_writable=asked.writable(cache),
        nccl=nccl,
        nccl_version=read("nccl_version", lambda: _nccl_version(asked, nccl), "") if nccl else "",
        measure_hash=measure_hash,
        backends=dict(backends or {}),
        absent=absent,
    )


def nvlink_domain(seat: Seat, probe: NodeProbe | None = None) -> str:
    """The NVLink domain of a rank, in one question; its node where there is none, or nobody who could say."""
    asked = probe or NodeProbe()
    try:
        gpus = parse_query(asked.output(["nvidia-smi", "-q", "-x"], _COMMAND_LIMIT_S)).gpus
    except (OSError, ValueError, LookupError):
        return seat.node
    return Facts(seat=seat, gpus=gpus, visible=asked.variables.get("CUDA_VISIBLE_DEVICES")).domain


def disk_of(mounts: str, folder: str) -> str:
    """The kind of file system that `folder` lies on, from /proc/self/mounts."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 3:
            point = words[1].replace("\\040", " ")
            if (folder == point or folder.startswith(point.rstrip("/") + "/")) and len(point) >= best:
                best, kind = len(point), words[2]
    return kind


def is_network(disk: str) -> bool:
    """Whether a kind of file system is shared between nodes."""
    return disk.startswith(_NETWORK)


def _container(probe: NodeProbe) -> str:
    for mark, word in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/.singularity.d", "apptainer")):
        if probe.exists(mark):
            return word
    found = re.search(r"docker|kubepods|lxc|enroot|containerd", probe.text("/proc/self/cgroup"))
    return found[0] if found else "none"


def _imex(probe: NodeProbe) -> str:
    try:
        return " ".join(probe.output(["nvidia-imex-ctl", "-q"], _COMMAND_LIMIT_S).split())
    except LookupError as error:
        return str(error)


def _nccl(probe: NodeProbe) -> str:
    """The libnccl that a process with torch would load: one that is preloaded, torch's own, or the system's."""
    for path in _candidates(probe):
        if probe.exists(path):
            return path
    return ""


def _candidates(probe: NodeProbe) -> Sequence[str]:
    variables = probe.variables
    preloaded = [path for path in re.split(r"[: ]", variables.get("LD_PRELOAD", "")) if "libnccl" in path]
    beside = [f"{folder}/nvidia/nccl/lib/libnccl.so.2" for folder in probe.import_folders()]
    folders = [folder for folder in variables.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [f"/usr/lib/{probe.architecture()}-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64"]
    return [*preloaded, *beside, *(str(PurePosixPath(folder) / "libnccl.so.2") for folder in folders)]


def _nccl_version(probe: NodeProbe, path: str) -> str:
    found = _NCCL_VERSION.search(probe.content(path))
    if not found:
        raise ValueError(f"{path} names no version")
    return found[1].decode()
