"""Which kernel serves a call, in how many pieces and with how many blocks: pure functions of the shapes and the GPU.

A warp takes one *item* at a time: a chunk of one token's record (dispatch) or partial (combine). Kernels loop over
items, so any grid is right; how many blocks may wait at once is bounded by what the GPU holds (`resident_blocks`): two
ranks whose waiting blocks keep out the blocks that would send to each other would wait forever.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from epcross.kernels.onesided.layout import LANES, Layout, Protocol

BLOCK_THREADS = 256
"""`kBlockThreads` of csrc/kernels.cu."""

_WARPS = BLOCK_THREADS // LANES
_FEW = (1, 3, 7)  # peers that a kernel for few ranks looks at in one turn
_PER_LANE = {"wide": 4}  # vectors of a lane; 1 in every other variant

WIDE_FROM_TURNS = 2.0
"""A warp that would take more turns than this moves four vectors a lane instead of one."""


class Phase(StrEnum):
    """The two calls of a round."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One launch."""

    kernel: str
    chunks: int  # items of one token
    blocks: int  # of all local ranks together


def kernel_names(protocol: Protocol, ep_size: int) -> dict[Phase, tuple[str, str]]:
    """The kernel for small steps and the one for large steps of each phase."""
    return {phase: (f"{protocol}_{phase}_{_variant(protocol, ep_size)}", f"{protocol}_{phase}_wide") for phase in Phase}


def step(phase: Phase, at: Layout, tokens: int, resident: Mapping[str, int], local_ranks: int = 1) -> Step:
    """The launch for `tokens` tokens of the rank that has most.

    Args:
        phase: dispatch or combine.
        at: the layout in use.
        tokens: decides the grid only; a rank may have more or fewer.
        resident: blocks of each kernel that may wait at once on this GPU, by all local ranks together.
        local_ranks: ranks served by the launch; every one gets as many blocks.
    """
    small, wide = kernel_names(at.protocol, at.shape.ep_size)[phase]
    turns = tokens * chunks_of(phase, at, small) / (resident[small] // local_ranks * _WARPS)
    kernel = wide if turns > WIDE_FROM_TURNS else small
    chunks = chunks_of(phase, at, kernel)
    blocks = min(max(1, -(-tokens * chunks // _WARPS)), resident[kernel] // local_ranks)
    return Step(kernel=kernel, chunks=chunks, blocks=blocks * local_ranks)


def chunks_of(phase: Phase, at: Layout, kernel: str) -> int:
    """Chunks of one token. Sentinel's combine also arms the records, which may be longer than the partials."""
    records, partials = at.shape.record_vectors, at.shape.partial_vectors
    if phase is Phase.DISPATCH:
        vectors = records
    else:
        vectors = max(records, partials) if at.protocol is Protocol.SENTINEL else partials
    return -(-vectors // (LANES * _PER_LANE.get(kernel.rpartition("_")[2], 1)))


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
        num_sms: at most so many multiprocessors are touched.
    """
    room = blocks_per_sm * sm_count
    if ranks_per_gpu > 1:
        room //= ranks_per_gpu * (2 if dependent else 1)
    return room if num_sms is None else min(room, num_sms)


def _variant(protocol: Protocol, ep_size: int) -> str:
    if protocol is Protocol.FENCE:
        return "one"
    few = next((count for count in _FEW if ep_size - 1 <= count), None)
    return "many" if few is None else f"few{few}"
