"""Which kernel serves a call, and with what grid: pure functions of the shapes and the GPU.

A grid is (local rank and vectors of a row, peers, role and tokens); csrc/place.cuh divides the work by it, and any grid
is right. Blocks wait for peers, so there are never more than the GPU holds at once (`resident_blocks`): two ranks whose
waiting blocks keep out the blocks that would send to each other would wait forever.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from epcross.kernels.onesided.layout import LANES, MAX_FLAGS, Layout, Protocol

BLOCK_THREADS = 128
"""At most `EPCROSS_MAX_THREADS` of csrc/kernels.cu."""

PER_LANE = {"narrow": 1, "wide": 4}
"""Vectors that a lane moves at a time, by variant."""

_WARPS = BLOCK_THREADS // LANES
_ROLES = 2  # half of the blocks send, half receive


class Phase(StrEnum):
    """The two calls of a round."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One launch."""

    kernel: str
    grid: tuple[int, int, int]
    chunk_blocks: int  # blocks of a rank along the vectors of a row

    @property
    def blocks(self) -> int:
        """Of all local ranks and roles together."""
        return self.grid[0] * self.grid[1] * self.grid[2]


def kernel_names(protocol: Protocol) -> dict[tuple[Phase, str], str]:
    """The kernel of each phase and variant."""
    return {(phase, variant): f"{protocol}_{phase}_{variant}" for phase in Phase for variant in PER_LANE}


def least_blocks(local_ranks: int) -> int:
    """One block of each role for each local rank."""
    return _ROLES * local_ranks


def step(phase: Phase, at: Layout, tokens: int, resident: Mapping[str, int], local_ranks: int = 1) -> Step:
    """The launch for `tokens` tokens of the rank that has most.

    Few tokens take the variant that moves one vector a lane, spread as widely as there is room: over the vectors of a
    row first, which are loaded once, then over tokens, then over peers, which each load a row anew. Tokens for which
    there is no room at once take the variant that moves four vectors a lane.

    Args:
        phase: dispatch or combine.
        at: the layout in use.
        tokens: decides the grid only; a rank may have more or fewer.
        resident: blocks of each kernel that may wait at once on this GPU, by all local ranks together.
        local_ranks: ranks served by the launch; every one gets as many blocks.
    """
    names = kernel_names(at.protocol)
    room = resident[names[phase, "narrow"]] // least_blocks(local_ranks)
    variant = "narrow" if tokens * _chunk_blocks(phase, at, "narrow") <= room else "wide"
    kernel = names[phase, variant]
    room = resident[kernel] // least_blocks(local_ranks)
    chunk_blocks = min(_chunk_blocks(phase, at, variant), room)
    if at.protocol is Protocol.FENCE:  # every sending block raises a flag of its own
        chunk_blocks = min(chunk_blocks, MAX_FLAGS)
        token_blocks = min(max(tokens, 1), room // chunk_blocks, MAX_FLAGS // chunk_blocks)
    else:
        token_blocks = min(max(tokens, 1), room // chunk_blocks)
    peer_blocks = min(at.shape.ep_size, room // (chunk_blocks * token_blocks))
    return Step(
        kernel=kernel, grid=(local_ranks * chunk_blocks, peer_blocks, _ROLES * token_blocks), chunk_blocks=chunk_blocks
    )


def _chunk_blocks(phase: Phase, at: Layout, variant: str) -> int:
    """Blocks that hold all vectors of a row at once. Sentinel's combine also arms the records, which may be longer."""
    records, partials = at.shape.record_vectors, at.shape.partial_vectors
    if phase is Phase.DISPATCH:
        vectors = records
    else:
        vectors = max(records, partials) if at.protocol is Protocol.SENTINEL else partials
    return -(-vectors // (LANES * PER_LANE[variant] * _WARPS))


def resident_blocks(
    blocks_per_sm: int, sm_count: int, *, ranks_per_gpu: int = 1, dependent: bool = True, num_sms: int | None = None
) -> int:
    """Blocks of one kernel that may wait at once.

    Between processes that share a GPU the order of blocks promises nothing, so each gets its part; with dependent
    launch half of it, because the blocks of a next kernel that waits for its turn take room as well. In one process
    they do not count: they are let in once every block of the kernel before has room.

    Args:
        blocks_per_sm: what a multiprocessor holds.
        sm_count: multiprocessors.
        ranks_per_gpu: processes that share the GPU.
        dependent: whether kernels are launched ahead of the end of the one before.
        num_sms: as if the GPU had only so many multiprocessors.
    """
    room = blocks_per_sm * (sm_count if num_sms is None else min(num_sms, sm_count))
    if ranks_per_gpu > 1:
        room //= ranks_per_gpu * (2 if dependent else 1)
    return room
