"""Environment variables that describe another job, or change what Slurm's commands ask and answer, kept from ours."""

import contextlib
import os
from collections.abc import Iterator

_FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_FOREIGN_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_KEPT = ("SLURM_CONF",)  # where the cluster is described


def foreign(name: str) -> bool:
    """Whether a variable is another job's, in which the command may be running, or an option of Slurm's commands that
    a person has set for their own use: SQUEUE_PARTITION, for one, would hide jobs."""
    return (name.startswith(_FOREIGN) or name in _FOREIGN_NAMES) and name not in _KEPT


def own() -> dict[str, str]:
    """The environment without them."""
    return {name: value for name, value in os.environ.items() if not foreign(name)}


@contextlib.contextmanager
def scrubbed() -> Iterator[None]:
    """The environment is without them meanwhile; sbatch hands its own on to the tasks."""
    removed = {name: os.environ.pop(name) for name in list(os.environ) if foreign(name)}
    try:
        yield
    finally:
        os.environ.update(removed)
