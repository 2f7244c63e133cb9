"""Which kernel serves a call, and with what grid: pure functions of the shapes and the GPU.

A grid is (local rank and vectors of a row, peers, role and tokens); csrc/place.cuh divides the work by it, and any grid
is right. Blocks wait for peers, so there are never more than the GPU holds at once (`resident_blocks`): two ranks whose
waiting blocks keep out the blocks that would send to each other would wait forever.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from epcross.kernels.onesided.layout import LANES, MAX_FLAGS, VECTOR_BYTES, Layout, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a variant's blocks are."""

    per_lane: int  # vectors that a lane moves at a time
    threads: int = 128  # at most what csrc/kernels.cu bounds the kernel to
    per_sm: int | None = None  # most that a multiprocessor is given; None: what it holds

    @property
    def warps(self) -> int:
        """Of 32 lanes."""
        return self.threads // LANES


ROW = "row"
"""The variant of Fence's dispatch whose blocks hold a whole row, up to 14 KB, and its tail, one on each multiprocessor.
Longer rows take `wide`: most warps of a second block would have nothing to do."""

BLOCKS = {
    "narrow": Block(per_lane=1),
    "mid": Block(per_lane=2),
    "wide": Block(per_lane=4),
    ROW: Block(per_lane=4, threads=256, per_sm=1),
}
"""Of each variant."""

ROW_RANKS = 1
"""Most ranks of a GPU that take `row`; others take `wide`: one block on each multiprocessor is too few for many."""

VARIANTS: dict[Protocol, tuple[tuple[int | None, str, str], ...]] = {
    Protocol.SENTINEL: (
        (64, "narrow", "narrow"),
        (320, "mid", "narrow"),
        (2000, "wide", "mid"),
        (None, "wide", "wide"),
    ),
    Protocol.FENCE: (
        (64, "narrow", "narrow"),
        (320, "mid", "narrow"),
        (10000, "wide", "mid"),
        (30000, ROW, "mid"),
        (None, ROW, "wide"),
    ),
}
"""Variant of dispatch and of combine, up to so many warps of 32 vectors: measured on H200s, see kernels/README.md. Few
warps that move more each beat many: a kernel ends when the stores of every multiprocessor are acknowledged."""


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
    return {
        (phase, variant): f"{protocol}_{phase}_{variant}"
        for phase in Phase
        for variant in BLOCKS
        if variant != ROW or (protocol, phase) == (Protocol.FENCE, Phase.DISPATCH)
    }


def usable(variant: str, ranks: int) -> bool:
    """Whether so many ranks of a GPU may take it."""
    return variant != ROW or ranks <= ROW_RANKS


def least_blocks(local_ranks: int) -> int:
    """Two layers (csrc/place.cuh, Roles) of one block for each local rank."""
    return 2 * local_ranks


def step(phase: Phase, at: Layout, tokens: int, resident: Mapping[str, int], local_ranks: int = 1) -> Step:
    """The launch for `tokens` tokens of the rank that has most.

    Room goes to the vectors of a row first, then to tokens, then to peers: blocks for different peers each load a row
    anew.

    Args:
        phase: dispatch or combine.
        at: the layout in use.
        tokens: decides the grid only; a rank may have more or fewer.
        resident: blocks of each kernel that may wait at once on this GPU, by all local ranks together. `wide` stands
            in for `row` where it has none, or a row is too long for one block.
        local_ranks: ranks served by the launch; every one gets as many blocks.
    """
    kernels = kernel_names(at.protocol)
    variant = _variant(phase, at, tokens, local_ranks)
    if variant == ROW and (kernels[phase, ROW] not in resident or _chunks(phase, at, ROW) > BLOCKS[ROW].warps):
        variant = "wide"
    kernel = kernels[phase, variant]
    room = resident[kernel] // local_ranks
    wanted, peers = max(tokens, 1), max(at.shape.ep_size - 1, 1)
    sentinel = at.protocol is Protocol.SENTINEL
    chunk_blocks = min(-(-_chunks(phase, at, variant) // BLOCKS[variant].warps), room // 2)
    if sentinel:
        token_blocks = min(wanted, room // (2 * chunk_blocks))
    else:
        chunk_blocks = min(chunk_blocks, MAX_FLAGS)  # every sending block raises a flag of its own
        token_blocks = min(wanted, room // chunk_blocks - 1, MAX_FLAGS // chunk_blocks)
    depth = 2 * token_blocks if sentinel else token_blocks + 1
    peer_blocks = min(peers, room // (chunk_blocks * depth))
    return Step(kernel=kernel, grid=(local_ranks * chunk_blocks, peer_blocks, depth), chunk_blocks=chunk_blocks)


def _variant(phase: Phase, at: Layout, tokens: int, local_ranks: int) -> str:
    warps = tokens * local_ranks * -(-at.shape.partial_vectors // LANES)
    row = next(row for row in VARIANTS[at.protocol] if row[0] is None or warps <= row[0])
    return row[1] if phase is Phase.DISPATCH else row[2]


def _chunks(phase: Phase, at: Layout, variant: str) -> int:
    """Warps that hold all vectors of a row at once. In dispatch none holds vectors of the row and of its tail both;
    Sentinel's combine also arms the records, which may be longer."""
    shape, width = at.shape, LANES * BLOCKS[variant].per_lane
    if phase is Phase.DISPATCH:
        row = shape.row_bytes // VECTOR_BYTES
        return -(-row // width) + -(-(shape.record_vectors - row) // width)
    vectors = (
        max(shape.record_vectors, shape.partial_vectors) if at.protocol is Protocol.SENTINEL else shape.partial_vectors
    )
    return -(-vectors // width)


def resident_blocks(
    blocks_per_sm: int,
    sm_count: int,
    *,
    ranks_per_gpu: int = 1,
    dependent: bool = True,
    num_sms: int | None = None,
    most_per_sm: int | None = None,
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
        most_per_sm: for each multiprocessor of the GPU, however many there is room for.
    """
    room = blocks_per_sm * (sm_count if num_sms is None else min(num_sms, sm_count))
    if ranks_per_gpu > 1:
        room //= ranks_per_gpu * (2 if dependent else 1)
    return room if most_per_sm is None else min(room, most_per_sm * sm_count)
