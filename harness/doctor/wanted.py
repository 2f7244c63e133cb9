"""What the ranks that the doctor looks at are for: the largest job of a sweep, or a whole node."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epcross.harness.backends.loader import CannotImport
from epcross.harness.doctor.findings import Wanted
from epcross.harness.errors import ConfigError
from epcross.harness.planning.build import build
from epcross.harness.planning.estimate import job_need, usable_cores
from epcross.harness.planning.plan import SLURM, Plan
from epcross.harness.planning.typed import Mismatch
from epcross.harness.slurm.layout import Layout, layout_of
from epcross.harness.terms import Domain, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Which ranks to look at, and for what."""

    plan: Plan
    layout: Layout | None  # None: a whole node, or as many ranks as this host has GPUs
    wanted: Wanted


def read_request(words: Sequence[str], config_dirs: Sequence[Path], nodes: int | None) -> Request:
    """The request that words such as cluster=h200_x8 and sweep=NAME make.

    Raises:
        ConfigError: they cannot be read, or the sweep's largest job does not fit the cluster.
    """
    named = any(word.startswith("cluster=") and word != "cluster=local" for word in words)
    launcher = [] if any(word.startswith("launcher=") for word in words) or not named else [f"launcher={SLURM}"]
    plan = build([*words, *launcher], config_dirs)
    if any(word.startswith("sweep=") for word in words):
        return _of_sweep(plan)
    cluster = plan.cluster
    gpus = cluster.gpus_per_node
    count = nodes or 1
    scope = Scope.SCALE_UP if count <= cluster.nodes_per_domain else Scope.SCALE_OUT
    layout = Layout(nodes=count, ranks_per_node=gpus or 1, gpus_per_node=gpus)
    domain = Domain.NVLINK if gpus else Domain.CPU
    return Request(
        plan=plan,
        layout=layout if named else None,
        wanted=Wanted(domain=domain, scope=scope, arch=cluster.arch if named else ""),
    )


def _of_sweep(plan: Plan) -> Request:
    if not plan.jobs:
        raise ConfigError(f"sweep '{plan.sweep}' has no job that could run; epcross plan sweep={plan.sweep} says why")
    job = max(plan.jobs, key=lambda job: job.ep_size)
    try:
        layout = layout_of(job, plan.cluster) if plan.launcher.name == SLURM else None
    except Mismatch as error:
        raise ConfigError(str(error)) from error
    try:
        need = job_need(job, plan, plan.cluster.cores_per_node or usable_cores(), {})
        shm_bytes, gpu_bytes = need.shm_bytes, need.rank_memory_bytes
    except CannotImport:
        shm_bytes = gpu_bytes = 0  # what this machine cannot import it cannot size
    wanted = Wanted(
        domain=job.domain, scope=job.scope, arch=plan.cluster.arch, shm_bytes=shm_bytes, gpu_bytes=gpu_bytes
    )
    return Request(plan=plan, layout=layout, wanted=wanted)
