"""Where a rank sits: its node, its place there, and what it sees. The rank map of a job is one seat for each rank."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place."""

    rank: int
    node: str
    local_rank: int
    local_size: int  # ranks on this node
    host: str = ""  # what the node calls itself
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names those of the node
    domain: str = ""  # NVLink domain, or the node whose memory is shared

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Seat":
        """The seat that `to_json` described."""
        return cls(**{**data, "gpus": tuple(data["gpus"])})


def seat_here(rank: int, size: int) -> Seat:
    """The seat of a rank whose job runs on this host alone."""
    name = platform.node()
    return Seat(rank=rank, node=name, local_rank=rank, local_size=size, host=name, domain=name)


def domains(seats: Sequence[Seat]) -> dict[str, list[int]]:
    """Domain -> its ranks, in rank order."""
    found: dict[str, list[int]] = {}
    for seat in seats:
        found.setdefault(seat.domain, []).append(seat.rank)
    return found


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
