"""One start of one rank, as Slurm describes it: who it is, where it sits, and how the others reach it."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epcross.harness.errors import EpcrossError
from epcross.harness.running.seat import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of one rank, as Slurm describes it."""

    job_id: str
    restart: int
    rank: int
    size: int
    local_rank: int
    nodes: tuple[str, ...]
    node: str
    gpus: tuple[str, ...]

    @property
    def name(self) -> str:
        """Names this start of the job, and no other."""
        return f"{self.job_id}.{self.restart}"


def slurm_start() -> Start:
    """The start that this process is part of. Names of hosts say nothing where nodes share one: Slurm's own do."""
    from submitit import JobEnvironment

    environment = JobEnvironment()
    return Start(
        job_id=environment.job_id,
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        rank=environment.global_rank,
        size=environment.num_tasks,
        local_rank=environment.local_rank,
        nodes=tuple(environment.hostnames),
        node=os.environ.get("SLURMD_NODENAME") or environment.hostname,
        gpus=tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))),
    )


def own_seat(start: Start) -> Seat:
    """This rank's seat as far as it knows; the others tell how many share the node."""
    seat = Seat(
        rank=start.rank,
        node=start.node,
        local_rank=start.local_rank,
        local_size=0,
        host=socket.gethostname(),
        gpus=start.gpus,
        domain=start.node,
    )
    if not start.gpus:
        return seat
    from epcross.harness.doctor.facts import nvlink_domain

    return replace(seat, domain=nvlink_domain(seat))


def seated(found: Sequence[Mapping[str, Any]]) -> tuple[Seat, ...]:
    """The rank map, from what every rank says of itself."""
    seats = [Seat.from_json(seat) for seat in found]
    count = Counter(seat.node for seat in seats)
    return tuple(replace(seat, local_size=count[seat.node]) for seat in seats)


def own_address(start: Start) -> str:
    """The address at which the other nodes reach this one: the one from which it reaches them. Nothing is sent.

    Raises:
        EpcrossError: no other node's name can be resolved.
    """
    peers = [node for node in start.nodes if node != start.node]
    if not peers:
        return "127.0.0.1"
    for peer in peers:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return probe.getsockname()[0]
    raise EpcrossError(
        f"{start.node} cannot reach {', '.join(peers)}: their names do not resolve there. Slurm's node names must be "
        "known to every node (DNS or /etc/hosts)"
    )
