"""SwiGLU between two grouped GEMMs of a library, and what GEMM2 reads of it: importing this needs Triton.

It strides over the pairs that were counted, in the order of experts, so that the work is as even as it can be however
uneven their numbers are.
"""

import triton
import triton.language as tl

from epcross.kernels.experts.gather.permute_kernels import first_places, value_at
from epcross.kernels.experts.gather.quantise_kernels import SCALE_BLOCK, to_fp8


@triton.jit(do_not_specialize=["room", "places"])
def swiglu_kernel(
    gate_up_ptr,  # bf16 [places, 2I]
    expert_rows_ptr,  # int32 [E]: pairs of each expert
    listed_count_ptr,  # int32 [1]: rows that are listed; 0 afterwards
    taken_count_ptr,  # out int32 [1]: what it was
    h_ptr,  # out [places, I]
    h_scale_ptr,
    h_scale_expert,
    h_scale_column,
    room,
    places,
    I: tl.constexpr,  # noqa: E741
    BLOCKS_PAD: tl.constexpr,  # of 128 columns, a power of two
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MASKED: tl.constexpr,
    LISTED: tl.constexpr,  # whether rows are
):
    if LISTED and tl.program_id(0) == 0:
        listed = tl.load(listed_count_ptr)
        tl.debug_barrier()  # it is read before it is zero
        tl.store(taken_count_ptr, listed)
        tl.store(listed_count_ptr, 0)
    block = tl.arange(0, BLOCKS_PAD)
    column = block[:, None] * SCALE_BLOCK + tl.arange(0, 128)[None, :]
    inside = column < I
    each = tl.arange(0, E_PAD)
    counts = tl.load(expert_rows_ptr + each, mask=each < E, other=0)
    ends = tl.cumsum(counts, 0)
    firsts = first_places(counts, each, room, BLOCK_T, MASKED)
    for unit in range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0)):
        expert = tl.sum((ends <= unit).to(tl.int32), 0)
        mine = each == expert
        number = unit - value_at(ends - counts, mine)
        place = (value_at(firsts, mine) + number).to(tl.int64)
        if place < places:
            gate = tl.load(gate_up_ptr + place * (2 * I) + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + place * (2 * I) + I + column, mask=inside, other=0.0).to(tl.float32)
            h = gate / (1 + tl.exp(-gate)) * up
            at = h_ptr + place * I + column
            if FP8:
                codes, scale = to_fp8(h, BLOCKS_PAD, POWER_OF_TWO)
                tl.store(at, codes, mask=inside)
                scale_at = h_scale_ptr + block * h_scale_column
                if MASKED:
                    scale_at += expert.to(tl.int64) * h_scale_expert + number
                else:
                    scale_at += place
                tl.store(scale_at, scale, mask=block < I // SCALE_BLOCK)
            else:
                tl.store(at, h.to(tl.bfloat16), mask=inside)
