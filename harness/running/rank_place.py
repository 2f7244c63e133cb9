"""Where a rank's worker runs: its core, the flags that follow, and where it imports epcross from."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import epcross
from epcross.harness.running.processes import cores_in_order
from epcross.harness.terms import Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The core of a worker (None: any) and what rows must say about it."""

    core: int | None
    flags: tuple[Flag, ...] = ()


def place(rank: int, size: int) -> RankPlace:
    """A core of its own for each rank of this host, or shared cores and a flag where there are too few."""
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
