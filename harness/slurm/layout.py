"""How the ranks of a job lie on nodes, and how a job that is too long for one allocation is cut. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from epcross.harness.errors import ConfigError
from epcross.harness.planning.plan import Job, Plan
from epcross.harness.planning.schema import Cluster
from epcross.harness.planning.typed import Mismatch
from epcross.harness.point import Point
from epcross.harness.terms import Domain, Scope, Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What one Slurm job asks for. Ranks are tasks, dealt to nodes in blocks; those of one launch are one task."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int = 0  # asked for
    paid_gpus_per_node: int = 0  # kept from others: all of the node's if it is taken whole

    @property
    def tasks(self) -> int:
        """Of the whole job."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One Slurm job of a run: a planned job, or a part of its points."""

    name: str
    job: Job
    layout: Layout


def layout_of(job: Job, cluster: Cluster) -> Layout:
    """Nodes and ranks per node for one job.

    Raises:
        Mismatch: they cannot be laid so on this cluster; the message is a sentence.
    """
    if job.domain is Domain.CPU:
        return _cpu_layout(job, cluster)
    if not cluster.gpus_per_node:
        raise Mismatch(
            f"cluster={cluster.name} has no GPUs (gpus_per_node=0), and domain={job.domain} needs them; name another "
            "cluster, or give cluster.gpus_per_node=N"
        )
    if job.domain is Domain.SHARED_GPU:
        if job.sharing is Sharing.PROCESSES:
            raise Mismatch(
                "sharing=processes needs a server of MPS, which launcher=slurm does not start; inside an allocation "
                "(salloc, then srun --pty) run it with launcher=local"
            )
        return Layout(nodes=1, ranks_per_node=1, gpus_per_node=1, paid_gpus_per_node=_paid(1, cluster))
    nodes = _nodes(job, cluster.gpus_per_node)
    if job.scope is Scope.SCALE_UP and nodes > cluster.nodes_per_domain:
        raise Mismatch(
            f"ep_size={job.ep_size} needs {nodes} nodes, and one NVLink domain of cluster={cluster.name} has "
            f"{cluster.nodes_per_domain} of {cluster.gpus_per_node} GPUs; lower ep_size, or take scope=scale_out with "
            "a backend that spans domains"
        )
    gpus = _even(job, nodes, cluster.gpus_per_node)
    return Layout(nodes=nodes, ranks_per_node=gpus, gpus_per_node=gpus, paid_gpus_per_node=_paid(gpus, cluster))


def pieces(plan: Plan) -> tuple[Piece, ...]:
    """The Slurm jobs of a plan, in order.

    Raises:
        ConfigError: with every job that cannot be laid out.
    """
    problems: list[str] = []
    found: list[Piece] = []
    for job in plan.jobs:
        try:
            layout = layout_of(job, plan.cluster)
        except Mismatch as error:
            problems.append(str(error))
            continue
        parts = list(_parts(job, plan.launcher.points_per_job))
        for number, part in enumerate(parts):
            name = job.name + (f"_part{number:03d}" if len(parts) > 1 else "")
            found.append(Piece(name=name, job=part, layout=layout))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def narrowed(plan: Plan, piece: Piece) -> Plan:
    """The plan of one piece alone."""
    return replace(plan, points=piece.job.points, impossible=(), jobs=(piece.job,))


def arrays(found: tuple[Piece, ...], max_array_size: int) -> list[tuple[Piece, ...]]:
    """Pieces that can be submitted together: parts of one planned job, at most `max_array_size` of them."""
    groups: dict[str, list[Piece]] = {}
    for piece in found:
        groups.setdefault(piece.job.name, []).append(piece)
    size = max(1, max_array_size)
    return [tuple(group[at : at + size]) for group in groups.values() for at in range(0, len(group), size)]


def _cpu_layout(job: Job, cluster: Cluster) -> Layout:
    most = cluster.ranks_per_node or job.ep_size
    if job.scope is Scope.SCALE_UP:
        if job.ep_size > most:
            raise Mismatch(
                f"domain=cpu keeps its ranks on one node, whose memory they share: ep_size={job.ep_size} is above "
                f"cluster.ranks_per_node={cluster.ranks_per_node}. Lower ep_size, or take scope=scale_out with a "
                "backend that spans nodes, such as gloo"
            )
        return Layout(nodes=1, ranks_per_node=job.ep_size)
    nodes = _nodes(job, most)
    return Layout(nodes=nodes, ranks_per_node=_even(job, nodes, most))


def _nodes(job: Job, most: int) -> int:
    """As few nodes as hold the ranks; what is to be scaled out takes two at least."""
    return max(math.ceil(job.ep_size / most), 2 if job.scope is Scope.SCALE_OUT else 1)


def _even(job: Job, nodes: int, most: int) -> int:
    """Ranks per node, the same on each.

    Raises:
        Mismatch: they do not divide.
    """
    if job.ep_size % nodes:
        low, high = job.ep_size // nodes * nodes, (job.ep_size // nodes + 1) * nodes
        raise Mismatch(
            f"ep_size={job.ep_size} needs {nodes} nodes of at most {most} ranks and does not divide by {nodes}; "
            f"take ep_size={low} or {high}"
        )
    return job.ep_size // nodes


def _paid(gpus: int, cluster: Cluster) -> int:
    return cluster.gpus_per_node if cluster.exclusive else gpus


def _parts(job: Job, most: int) -> Iterator[Job]:
    """`job` in parts of about `most` points. Points that differ in backend and options alone stay together."""
    if not most or len(job.points) <= most:
        yield job
        return
    compared: dict[Point, list[Point]] = {}
    for point in job.points:
        compared.setdefault(replace(point, backend="", options=()), []).append(point)
    part: list[Point] = []
    for points in compared.values():
        if part and len(part) + len(points) > most:
            yield _with(job, part)
            part = []
        part += points
    yield _with(job, part)


def _with(job: Job, points: list[Point]) -> Job:
    backends = tuple(name for name in job.backends if any(point.backend == name for point in points))
    return replace(job, points=tuple(points), backends=backends)
