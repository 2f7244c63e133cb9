"""Nodes that nobody has at hand, as the doctor's probe would find them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epcross.harness.doctor.facts import Facts, collect
from epcross.harness.doctor.probe import NodeProbe
from epcross.harness.running.seat import Seat

GPU = """
  <gpu id="0000000{index}:00:00.0">
    <product_name>{name}</product_name>
    <mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
    <uuid>{uuid}</uuid>
    <fabric>
      <state>{state}</state>
      <status>{status}</status>
      <cliqueId>{clique}</cliqueId>
      <clusterUuid>{cluster}</clusterUuid>
    </fabric>
    <fb_memory_usage><total>143771 MiB</total><used>0 MiB</used><free>{free} MiB</free></fb_memory_usage>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_thermal_slowdown>{thermal}</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <clocks><sm_clock>1980 MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
    <processes>{processes}</processes>
  </gpu>
"""


@dataclass
class Node(NodeProbe):
    """One node of `gpus` GPUs; the fields are what may be wrong with it."""

    name: str = "n1"
    gpus: int = 2
    product: str = "NVIDIA H200"
    driver: str = "570.124.06"
    cuda: str = "12.8"
    arch: str = "x86_64"
    mig: str = "Disabled"
    state: str = "Completed"
    status: str = "Success"
    clique: str = "0"
    cluster: str = ""
    channels: Sequence[str] = ()
    free_mib: int = 140000
    thermal: str = "Not Active"
    pids: Sequence[int] = ()
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)  # UUID -> who holds its lock
    lock_problem: str = ""
    no_locks: str = ""
    links: Sequence[int] = (18, 18, 18, 18, 18, 18, 18, 18)  # active, of 18
    bad_pairs: Sequence[tuple[int, int]] = ()
    taking: int = 0  # errno of pidfd_getfd
    namespace: str = "pid:[4026531836]"
    shm_free: int = 1 << 34
    disk: str = "ext4"
    can_write: bool = True
    nccl: bytes = b"\0NCCL version 2.28.9+cuda13.0\0"
    uuids: Sequence[str] = ()
    more: Mapping[str, str] = field(default_factory=dict)  # environment variables
    has_mps: bool = False

    @property
    def variables(self) -> Mapping[str, str]:
        return {"HOME": "/home/me", **self.more}

    def hostname(self) -> str:
        return self.name

    def architecture(self) -> str:
        return self.arch

    def affinity(self) -> list[int]:
        return list(range(32))

    def text(self, path: str) -> str:
        if path == "/proc/self/mounts":
            return f"/dev/sda1 / ext4 rw 0 0\nserver:/home /home {self.disk} rw 0 0\n"
        return ""

    def exists(self, path: str) -> bool:
        return path == "/site/nvidia/nccl/lib/libnccl.so.2" or (self.has_mps and path.endswith("nvidia-mps/control"))

    def entries(self, folder: str) -> list[str]:
        if not self.channels:
            raise FileNotFoundError(2, "No such file or directory", folder)
        return list(self.channels)

    def space(self, folder: str) -> tuple[int, int]:
        return 2 * self.shm_free, self.shm_free

    def link(self, path: str) -> str:
        return self.namespace

    def writable(self, folder: str) -> bool:
        return self.can_write

    def cache_folder(self) -> str:
        return "/home/me/.cache/epcross"

    def import_folders(self) -> list[str]:
        return ["/site"]

    def content(self, path: str) -> bytes:
        return self.nccl

    def take_descriptor(self) -> int:
        return self.taking

    def gpu_holders(self, uuid: str) -> list[str]:
        if self.lock_problem:
            raise LookupError(self.lock_problem)
        return list(self.held.get(uuid, ()))

    def locks_refused(self) -> str:
        return self.no_locks

    def uuid(self, index: int) -> str:
        return self.uuids[index] if self.uuids else f"GPU-{self.name}-{index}"

    def output(self, command: Sequence[str], timeout_s: float) -> str:
        words = list(command)
        if words[0] == "nvidia-imex-ctl":
            return "NOT READY"
        if not self.gpus:
            raise LookupError("nvidia-smi is not installed")
        if words == ["nvidia-smi", "-q", "-x"]:
            return self._query()
        if words == ["nvidia-smi", "nvlink", "--status"]:
            return "".join(self._links(index) for index in range(self.gpus))
        assert words == ["nvidia-smi", "topo", "-p2p", "r"]
        heads = "".join(f"\tGPU{index}" for index in range(self.gpus))
        rows = [
            f" \x1b[4mGPU{a}\x1b[0m" + "".join(f"\t{self._pair(a, b)}" for b in range(self.gpus))
            for a in range(self.gpus)
        ]
        return f" {heads}\n" + "\n".join(rows) + "\n\nLegend:\n\n  X = Self\n  OK = Status Ok\n"

    def _query(self) -> str:
        processes = "".join(f"<process_info><pid>{pid}</pid></process_info>" for pid in self.pids)
        gpus = "".join(
            GPU.format(
                index=index,
                name=self.product,
                uuid=self.uuid(index),
                mig=self.mig,
                state=self.state,
                status=self.status,
                clique=self.clique,
                cluster=self.cluster,
                free=self.free_mib,
                thermal=self.thermal,
                processes=processes,
            )
            for index in range(self.gpus)
        )
        head = f"<driver_version>{self.driver}</driver_version><cuda_version>{self.cuda}</cuda_version>"
        return f'<?xml version="1.0" ?>\n<nvidia_smi_log>{head}{gpus}</nvidia_smi_log>'

    def _links(self, index: int) -> str:
        lines = [f"\t Link {n}: {'26.562 GB/s' if n < self.links[index] else '<inactive>'}\n" for n in range(18)]
        return f"GPU {index}: {self.product} (UUID: {self.uuid(index)})\n" + "".join(lines)

    def _pair(self, a: int, b: int) -> str:
        if a == b:
            return "X"
        return "CNS" if (a, b) in self.bad_pairs or (b, a) in self.bad_pairs else "OK"


def ranks_of(*nodes: Node, per_node: int = 2) -> list[Facts]:
    """The facts of `per_node` ranks on each node, in order."""
    found = []
    for number, node in enumerate(nodes):
        for local in range(per_node):
            seat = Seat(
                rank=number * per_node + local, node=node.name, local_rank=local, local_size=per_node, host=node.name
            )
            found.append(collect(seat, node, backends={"gloo": None}, measure_hash="f00d"))
    return found
