"""The sbatch script of a piece: what submitit is told, and its text, the same for `plan` and for submission."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epcross.harness.planning.checks import too_small
from epcross.harness.planning.schema import Cluster
from epcross.harness.slurm.layout import Layout, Piece

OWN = {
    "array": "it follows from launcher.points_per_job",
    "error": "logs lie in the run folder",
    "gpu-bind": "ranks must see the GPUs of their peers",
    "gpus": "it follows from the EP size; give it as 'gres' if the site wants that",
    "gpus-per-socket": "the launcher asks for GPUs by node",
    "gpus-per-task": "ranks must see the GPUs of their peers; the launcher asks for GPUs by node",
    "gpus-per-node": "it follows from the EP size; give it as 'gres' if the site wants that",
    "job-name": "it names the run",
    "no-requeue": "a run goes on after a requeue",
    "nodes": "it follows from the EP size and cluster.gpus_per_node",
    "ntasks": "it follows from the EP size",
    "ntasks-per-node": "it follows from the EP size",
    "open-mode": "logs of all starts are kept",
    "output": "logs lie in the run folder",
    "parsable": "sbatch must answer as it does by itself",
    "quiet": "sbatch must answer as it does by itself",
    "signal": "give cluster.signal_delay_s",
    "test-only": "it submits nothing; `epcross plan` shows the script",
    "time": "give cluster.time_min",
    "wait": "epcross run returns at once",
    "wrap": "the script is the launcher's",
}
"""Options of sbatch that a cluster may not give in its own lines, and why."""

_OPTION = re.compile(r"--([a-z][a-z0-9_-]*)(=[^\n\r\0]*)?")
_BINDS_GPUS = ("--gpu-bind", "--gpus-per-task", "--ntasks-per-gpu", "--tres-bind", "--tres-per-task")

FOLDER = "slurm"
"""In the run folder: scripts, submitit's files, and what the tasks say."""


def cluster_problems(cluster: Cluster) -> list[str]:
    """What of a cluster cannot be used, as sentences."""
    problems = too_small(
        "cluster",
        cluster,
        gpus_per_node=0,
        cores_per_node=0,
        nodes_per_domain=1,
        ranks_per_node=0,
        time_min=1,
        mem_gb_per_node=0,
        cpus_per_rank=0,
        signal_delay_s=10,
        max_requeues=0,
        max_array_size=1,
        max_jobs=0,
    )
    if not problems and cluster.signal_delay_s >= cluster.time_min * 60:
        problems.append(
            f"cluster.signal_delay_s={cluster.signal_delay_s} is no less than the time limit of "
            f"{cluster.time_min} min; a job would be warned before it starts"
        )
    if cluster.arch not in ("", "x86_64", "aarch64"):
        problems.append(f"cluster.arch is {cluster.arch!r}, but must be x86_64 or aarch64")
    for line in cluster.sbatch:
        if not (match := _OPTION.fullmatch(line)):
            problems.append(f"cluster.sbatch has {line!r}, but each must be one option, such as --switches=1")
        elif owned := _owned(match[1]):
            problems.append(f"cluster.sbatch may not give --{owned}: {OWN[owned]}")
    problems += [
        f"cluster.{name} holds the end of a line"
        for name in ("account", "partition", "qos", "constraint", "nodelist", "exclude")
        if any(mark in getattr(cluster, name) for mark in "\n\r\0")
    ]
    problems += [f"cluster.setup has {line!r}, but each must be one line" for line in cluster.setup if "\n" in line]
    for word in cluster.srun_args:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith(_BINDS_GPUS):
            problems.append(f"cluster.srun_args may not give --{name}: {OWN['gpu-bind']}")
        elif not word or any(mark in word for mark in "\n\r\0"):
            problems.append(f"cluster.srun_args has {word!r}, but each must be one word of a command line")
    if cluster.container_mounts and not cluster.container:
        problems.append("cluster.container_mounts are for a container, and cluster.container is empty")
    return problems


def _owned(name: str) -> str:
    """The option of `OWN` that sbatch would take `name` for, which may be its beginning; empty if none."""
    return name if name in OWN else next((own for own in OWN if len(name) > 3 and own.startswith(name)), "")


def parameters(cluster: Cluster, layout: Layout, name: str, folder: Path) -> dict[str, Any]:
    """What submitit's Slurm executor is told for one job. Nothing is given that the site decides.

    Args:
        folder: of scripts and logs, in the run folder.
    """
    extra: dict[str, Any] = {"requeue": True}
    if cluster.segment and layout.nodes > 1:
        extra["segment"] = layout.nodes
    for line in cluster.sbatch:
        option, equals, value = line.removeprefix("--").partition("=")
        extra[option] = value if equals else True
    if layout.gpus_per_node and "gres" not in extra:
        extra["gpus-per-node"] = layout.gpus_per_node
    wanted: dict[str, Any] = {
        "job_name": name,
        "time": cluster.time_min,
        "nodes": layout.nodes,
        "ntasks_per_node": layout.ranks_per_node,
        "signal_delay_s": cluster.signal_delay_s,
        "stderr_to_stdout": True,
        "srun_args": [*cluster.srun_args, *_container(cluster, folder)],
        "setup": list(cluster.setup) or None,
        "account": cluster.account or None,
        "partition": cluster.partition or None,
        "qos": cluster.qos or None,
        "constraint": cluster.constraint or None,
        "nodelist": cluster.nodelist or None,
        "exclude": cluster.exclude or None,
        "exclusive": cluster.exclusive or None,
        "mem": f"{cluster.mem_gb_per_node}GB" if cluster.mem_gb_per_node else None,
        "cpus_per_task": cluster.cpus_per_rank or None,
        "wckey": None,  # submitit's own would be refused where keys are checked
        "additional_parameters": extra,
    }
    return {key: value for key, value in wanted.items() if value is not None or key == "wckey"}


def python_command(cluster: Cluster) -> str:
    """The words that start Python on a compute node, for a shell."""
    return cluster.python or shlex.quote(sys.executable)


def text(cluster: Cluster, parts: Sequence[Piece], name: str, folder: Path) -> str:
    """The script with which `parts` are submitted."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{python_command(cluster)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    words = parameters(cluster, parts[0].layout, name, folder)
    if len(parts) > 1:
        words["map_count"] = len(parts)
    return _make_sbatch_string(command=command, folder=folder, **words)


def _container(cluster: Cluster, folder: Path) -> list[str]:
    """Options of pyxis, https://github.com/NVIDIA/pyxis. The run folder lies at the same place inside."""
    if not cluster.container:
        return []
    run = folder.absolute().parent
    mounts = ",".join([f"{run}:{run}", *cluster.container_mounts])
    return [f"--container-image={cluster.container}", f"--container-mounts={mounts}"]
