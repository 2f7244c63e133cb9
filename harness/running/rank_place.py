"""Where a rank's worker runs: its core or GPU, the flags that follow, and where it imports epcross from."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import epcross
from epcross.harness.running.processes import cores_in_order
from epcross.harness.terms import Domain, Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The core of a worker (None: any), its GPU on this host (None: none), and what rows must say about it."""

    core: int | None
    gpu: int | None = None
    flags: tuple[Flag, ...] = ()


def place(rank: int, size: int, domain: Domain = Domain.CPU) -> RankPlace:
    """Where the worker of process `rank` of `size` on this host runs.

    On the CPU each has a core of its own, or they share cores and a flag says so where there are too few. On a GPU a
    worker only enqueues, beside threads of the driver that one core would starve, so it is bound to no core; it has the
    GPU of its own number, or GPU 0 with the others.
    """
    if domain in (Domain.NVLINK, Domain.SHARED_GPU):
        return RankPlace(core=None, gpu=rank if domain is Domain.NVLINK else 0)
    cores = cores_in_order(os.sched_getaffinity(0))
    flags = (Flag.OVERSUBSCRIBED,) if size > len(cores) else ()
    return RankPlace(core=cores[rank % len(cores)], flags=flags)


def import_folder(folder: Path) -> Path:
    """A folder with nothing but epcross in it, for workers with an interpreter of their own.

    The folder this interpreter imports from may be its site-packages, whose other contents must not leak.
    """
    link = folder / "imports" / "epcross"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another rank made it
        link.symlink_to(Path(epcross.__file__).resolve().parent, target_is_directory=True)
    return link.parent
