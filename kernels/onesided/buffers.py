"""Workspaces that every rank of a group can address: torch symmetric memory, or one plain allocation.

Every rank tells all others what it has and wants before anything is allocated, and all judge the same answers, so that
either every rank goes on or every rank raises the same error, and none is left waiting.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from epcross.kernels.errors import DoesNotFit, EpcrossError, InvalidArguments, NotOneDomain

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch refuses symmetric memory to processes that share a GPU unless this is 1."""


class Transport(StrEnum):
    """How ranks come to address each other's memory."""

    LOCAL = "local"  # one allocation of one process
    POSIX_FD = "posix_fd"  # file descriptors, within a host
    FABRIC = "fabric"  # fabric handles, across the hosts of an NVLink domain; untested for want of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one process says of itself before memory is allocated."""

    process: int  # its rank in the group
    host: str
    gpu: str  # UUID
    wanted_bytes: int  # for all ranks of the process
    free_bytes: int
    fabric: bool  # can export a fabric handle
    may_overlap: bool  # OVERLAP_VARIABLE is set
    settings: tuple[tuple[str, str], ...]  # what must be the same on every rank, by name
    problems: tuple[str, ...] = ()


def judge(everyone: Sequence[Facts], ranks_per_gpu: int = 1) -> Transport:
    """The way that all processes of a group can take.

    Raises:
        InvalidArguments: some process has arguments that cannot be served, or other settings than the first.
        NotOneDomain: there is no way to map each other's memory.
        DoesNotFit: a GPU has less memory free than the processes on it want.
    """
    problems = [
        f"rank {facts.process}: {problem}" if len(everyone) > 1 else problem
        for facts in everyone
        for problem in facts.problems
    ]
    problems += _differences(everyone)
    if problems:
        raise InvalidArguments(problems)
    if apart := _apart(everyone, ranks_per_gpu):
        raise NotOneDomain("; ".join(apart))
    if full := _too_full(everyone):
        raise DoesNotFit("; ".join(full))
    if len(everyone) == 1:
        return Transport.LOCAL
    return Transport.FABRIC if all(facts.fabric for facts in everyone) else Transport.POSIX_FD


def _differences(everyone: Sequence[Facts]) -> list[str]:
    first = dict(everyone[0].settings) | {"workspace_bytes": str(everyone[0].wanted_bytes)}
    found = []
    for facts in everyone[1:]:
        own = dict(facts.settings) | {"workspace_bytes": str(facts.wanted_bytes)}
        found += [
            f"rank {facts.process} has {name}={own.get(name)} and rank {everyone[0].process} {name}={value}: "
            "it must be the same on every rank"
            for name, value in first.items()
            if own.get(name) != value
        ]
    return found


def _apart(everyone: Sequence[Facts], ranks_per_gpu: int) -> list[str]:
    found = []
    for gpu, sharing in _by_gpu(everyone).items():
        if len(sharing) == 1:
            continue
        who = ", ".join(str(facts.process) for facts in sharing)
        if len(sharing) > ranks_per_gpu:
            found.append(
                f"ranks {who} share GPU {gpu}, and ranks_per_gpu={ranks_per_gpu}: give each its own GPU, or say "
                f"ranks_per_gpu={len(sharing)} (under MPS)"
            )
        elif not all(facts.may_overlap for facts in sharing):
            found.append(f"ranks {who} share GPU {gpu}: set {OVERLAP_VARIABLE}=1 before torch is imported")
    without = [facts for facts in everyone if not facts.fabric]
    hosts = {facts.host for facts in everyone}
    if without and (len(hosts) > 1 or len(without) < len(everyone)):
        who = ", ".join(f"{facts.process} ({facts.host})" for facts in without)
        where = f"the group spans {len(hosts)} hosts" if len(hosts) > 1 else "the others of this host can"
        found.append(
            f"ranks {who} cannot export fabric handles, and {where}: use ranks of one NVLink domain whose fabric "
            "manager and IMEX daemon run, or ranks of one host that are set up alike"
        )
    return found


def _too_full(everyone: Sequence[Facts]) -> list[str]:
    found = []
    for gpu, sharing in _by_gpu(everyone).items():
        wanted = sum(facts.wanted_bytes for facts in sharing)
        free = min(facts.free_bytes for facts in sharing)
        if wanted > free:
            who = ", ".join(str(facts.process) for facts in sharing)
            found.append(
                f"the workspaces on GPU {gpu} (rank {who}) take {wanted} bytes and {free} bytes are free: lower "
                "max_tokens_per_rank, or free memory"
            )
    return found


def _by_gpu(everyone: Iterable[Facts]) -> dict[str, list[Facts]]:
    sharing = defaultdict(list)
    for facts in everyone:
        sharing[facts.gpu].append(facts)
    return dict(sharing)


def gather(group: "ProcessGroup | None", value: Any) -> list[Any]:
    """`value` of every process of the group, which is also a barrier for the hosts. None: this process alone."""
    if group is None or group.size() == 1:
        return [value]
    from torch import distributed

    values: list[Any] = [None] * group.size()
    distributed.all_gather_object(values, value, group=group)
    return values


T = TypeVar("T")


def together(group: "ProcessGroup", action: Callable[[], T], kind: type[EpcrossError], words: str) -> T:
    """What `action` returns, once it has on every rank; if it raised torch's `RuntimeError` on some, `kind` on all."""
    made: list[T] = []
    problem = ""
    try:
        made.append(action())
    except RuntimeError as error:
        problem = f"rank {group.rank()} {words}: {error}"
    if problems := [found for found in gather(group, problem) if found]:
        raise kind("; ".join(problems))
    return made[0]


def facts_here(
    group: "ProcessGroup | None",
    device: "torch.device",
    wanted_bytes: int,
    settings: dict[str, str],
    problems: Sequence[str] = (),
) -> Facts:
    """What this process says. Touches the device only if there is nothing to complain about."""
    import torch

    known = not problems
    if known:
        torch.cuda.empty_cache()  # what torch keeps for later counts as free
    return Facts(
        process=0 if group is None else group.rank(),
        host=_host(),
        gpu=str(torch.cuda.get_device_properties(device).uuid) if known else "",
        wanted_bytes=wanted_bytes,
        free_bytes=torch.cuda.mem_get_info(device)[0] if known else 0,
        fabric=known and group is not None and group.size() > 1 and exports_fabric_handles(device.index),
        may_overlap=os.environ.get(OVERLAP_VARIABLE) == "1",
        settings=tuple(settings.items()),
        problems=tuple(problems),
    )


def _host() -> str:
    """Two containers of one host have the same boot id, and two hosts of one name do not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}" if boot else socket.gethostname()


def exports_fabric_handles(device: int) -> bool:
    """Whether memory of this GPU can be handed to other hosts; asks by exporting a little of it."""
    from cuda.bindings import driver

    from epcross.kernels.onesided.launch import DriverError, call

    fabric = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    try:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        if not call(driver.cuDeviceGetAttribute, attribute, call(driver.cuDeviceGet, device)):
            return False
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = device
        wanted.requestedHandleTypes = fabric
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = call(driver.cuMemGetAllocationGranularity, wanted, least)
        memory = call(driver.cuMemCreate, size, wanted, 0)
        try:
            call(driver.cuMemExportToShareableHandle, memory, fabric, 0)
        finally:
            call(driver.cuMemRelease, memory)
    except DriverError:
        return False
    return True


class Workspaces:
    """The workspaces of this process's ranks, and where those of all ranks are mapped.

    `memory` is uint8 [local_ranks, bytes_per_rank]; `addresses` has one entry for each rank of the exchange.
    """

    def __init__(
        self,
        group: "ProcessGroup | None",
        device: "torch.device",
        *,
        bytes_per_rank: int,
        local_ranks: int,
        transport: Transport,
    ) -> None:
        """Allocate and map; collective. What `judge` allowed can still fail, with torch's own words.

        Raises:
            NotOneDomain: the memory cannot be mapped; on every rank.
            DoesNotFit: it was taken meanwhile; on every rank.
        """
        import torch

        self.transport = transport
        self._handle: Any = None
        total = bytes_per_rank * local_ranks
        if group is None or transport is Transport.LOCAL:
            try:
                flat = torch.empty(total, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:  # taken by another process since it was free
                free = torch.cuda.mem_get_info(device)[0]
                raise DoesNotFit(
                    f"the workspaces take {total} bytes and {free} bytes are free: lower "
                    "max_tokens_per_rank, or free memory"
                ) from error
            bases = [flat.data_ptr()]
        else:
            from torch.distributed import _symmetric_memory

            flat = together(
                group,
                lambda: _symmetric_memory.empty(total, dtype=torch.uint8, device=device),
                DoesNotFit,
                f"cannot allocate {total} bytes for its workspaces, which were free: lower max_tokens_per_rank, or see "
                "who else takes memory of this GPU (nvidia-smi)",
            )
            self._handle = together(
                group,
                lambda: _symmetric_memory.rendezvous(flat, group),
                NotOneDomain,
                f"cannot map the workspaces of its peers ({transport}): ranks must be of one NVLink domain (nvidia-smi "
                "topo -m) and, in containers, share a PID namespace",
            )
            bases = [int(base) for base in self._handle.buffer_ptrs]
        self.memory: torch.Tensor | None = flat.view(local_ranks, bytes_per_rank)
        self.addresses = [base + local * bytes_per_rank for base in bases for local in range(local_ranks)]

    def close(self) -> None:
        """Let go of the memory. Idempotent; waits for no peer: what peers have mapped stays until they close too."""
        self.memory = self._handle = None
        self.addresses = []
