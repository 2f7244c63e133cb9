"""Weights brought to the L2 before a product may begin. Triton programs: importing this needs Triton.

A kernel that is brought up while the one before it ends waits for that; what it asks the L2 for meanwhile costs nothing
but the memory's time. Nothing is written, and every address is one of the weights, whichever are needed.
"""

import triton
import triton.language as tl

from epcross.kernels.experts.gather.index_kernel import MAX_SPLITS, TILES, parts_of


@triton.jit
def _fetch(w_ptr, row, first_byte, ROW_BYTES: tl.constexpr, BYTES: tl.constexpr):
    """So many bytes of each row, by one bulk copy for each."""
    address = w_ptr.to(tl.int64) + row.to(tl.int64) * ROW_BYTES + first_byte
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, tl.zeros_like(row) + BYTES],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def first_of_gate_up(
    E: tl.constexpr,
    STEPS: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BALANCE: tl.constexpr,
):
    """A program's first unit, if every expert has one tile: which are hit, the index does not tell yet.

    Whether there is such a unit, the rows of its weights, gate before up, and its first step.
    """
    columns: tl.constexpr = I // BLOCK_N
    programs = tl.num_programs(0)
    unit, parts = tl.program_id(0), 1
    if (BALANCE < 2) | (E * columns < programs):  # else the first turn's sums are whole
        parts = parts_of(E * columns, programs, MAX_SPLITS, BALANCE, BLOCK_T)
    block = unit // parts
    expert = block // columns
    inner = tl.arange(0, 2 * BLOCK_N)
    row = expert * (2 * I) + (block - expert * columns) * BLOCK_N + inner // BLOCK_N * I + inner % BLOCK_N
    return unit < E * columns * parts, row, STEPS * (unit - block * parts) // parts


@triton.jit
def fetch_of_gate_up(
    w_ptr,
    E: tl.constexpr,
    STEPS: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROW_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BALANCE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The weights of that unit. Those of an expert that is not hit are fetched in vain."""
    there, row, step = first_of_gate_up(E, STEPS, I, BLOCK_N, BLOCK_T, BALANCE)
    if there:
        _fetch(w_ptr, row, step * (ROW_BYTES // STEPS), ROW_BYTES, BYTES)


@triton.jit
def fetch_of_down(
    w_ptr,
    schedule_ptr,
    tile_ptr,
    H: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a unit
    BYTES: tl.constexpr,
):
    """The first unit's weights. GEMM1 has not ended, but what made the tiles has; they are read past the L1, which so
    keeps nothing of them."""
    unit = tl.program_id(0)
    columns: tl.constexpr = H // WIDTH
    if unit < tl.load(schedule_ptr + TILES, cache_modifier=".cg") * columns:
        expert = tl.load(tile_ptr + unit // columns, cache_modifier=".cg")
        _fetch(w_ptr, expert * H + (unit % columns) * WIDTH + tl.arange(0, WIDTH), 0, ROW_BYTES, BYTES)
