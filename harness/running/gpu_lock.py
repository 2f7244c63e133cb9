"""No two measurements on one GPU: each would time the other, and print numbers that look like its own.

Whoever times holds the lock of every GPU that its ranks use, alone, from before its run folder is made until its last
rank is gone. Whoever only uses a GPU, as a check does, shares its lock: checks may run beside each other, and none
beside a measurement. Cores have no such lock, since runs on cores of their own go well together: see `core_watch`.

Jobs or containers with a /tmp of their own do not meet here, unless EPCROSS_LOCKS names a folder that they share.
What they do to each other is seen by `measuring.gpu_processes`, where NVML tells it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from epcross.harness.errors import EpcrossError
from epcross.harness.planning.plan import Plan
from epcross.harness.point import processes
from epcross.harness.running.lock_file import FOLDER, Holder, LockFile, require_folder
from epcross.harness.running.rank_place import place
from epcross.harness.storing.environment import gpu_uuids
from epcross.harness.terms import Domain


class GpuInUse(EpcrossError):
    """A GPU is being measured on, or used where it should be measured on; the message says by whom."""


class GpuLocks:
    """The locks of the GPUs `uuids`, held until `close`; a context manager.

    Args:
        who: words for others, who are told them when they are refused.
        shared: beside others that share, for work that is not timed.

    Whoever measures makes one, of no GPU if it uses none: cores have their files in the same `folder`.

    Raises:
        GpuInUse: somebody else holds one. Nothing is held then.
        LockUnusable: there can be no locks in `folder`, or not that of one of the GPUs.
    """

    def __init__(self, uuids: Iterable[str], who: str, *, shared: bool = False, folder: Path = FOLDER) -> None:
        require_folder(folder)
        self._locks: list[LockFile] = []
        try:
            for uuid in sorted(set(uuids)):  # in one order, so that of two that come at once one is served
                lock = LockFile(_path(uuid, folder))
                self._locks.append(lock)
                if not lock.take(who, shared=shared):
                    raise GpuInUse(_refusal(uuid, lock.holders()))
        except BaseException:
            self.close()
            raise

    def say(self, who: str) -> None:
        """Other words for others; of locks that are not shared."""
        for lock in self._locks:
            lock.say(who)

    def close(self) -> None:
        """Give them up. Idempotent."""
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gpus_of_plan(plan: Plan, facts: Mapping[str, Any]) -> list[str]:
    """UUIDs of the GPUs that the ranks of `plan` use if all run on the host of `facts` (see `environment.collect`)."""
    uuids = gpus_here(facts)
    used = (gpus_of_ranks(job.domain, processes(job.ep_size, job.sharing), uuids) for job in plan.jobs)
    return sorted({uuid for found in used for uuid in found})


def gpus_here(facts: Mapping[str, Any]) -> list[str]:
    """UUIDs of the GPUs of a host, as torch counts them, or as the driver does where there is no torch to ask."""
    return gpu_uuids((facts.get("gpu_software") or {}).get("gpus") or facts.get("gpus"))


def gpus_of_ranks(domain: Domain, local_size: int, uuids: Sequence[str]) -> list[str]:
    """Those of this host's GPUs `uuids`, in CUDA's order, that `local_size` processes use."""
    indices = {place(rank, local_size, domain).gpu for rank in range(local_size)}
    return [uuid for index, uuid in enumerate(uuids) if index in indices]


def gpu_holders(uuid: str, folder: Path = FOLDER) -> list[Holder]:
    """Who holds the lock of a GPU now. Makes no file."""
    path = _path(uuid, folder)
    if not path.exists():
        return []
    lock = LockFile(path)
    try:
        return [] if lock.is_free() else lock.holders()
    finally:
        lock.close()


def _path(uuid: str, folder: Path) -> Path:
    return folder / f"epcross-gpu-{uuid}.lock"


def _refusal(uuid: str, holders: Sequence[Holder]) -> str:
    by = " and ".join(map(str, holders)) or "a process that has not said who it is"
    return (
        f"GPU {uuid} is in use by {by}, and two at once would spoil each other's numbers. Wait until it has ended and "
        "repeat the command, or take other GPUs (CUDA_VISIBLE_DEVICES)"
    )
