"""What a library's grouped GEMM needs around it: rows brought to their experts, SwiGLU between, sums brought back.

Triton programs: importing this needs Triton. They follow what `index_kernel` wrote. A pair's place in the library's
buffers is expert * capacity + its number within the expert (masked), or counts on from the expert's first tile
(contiguous: tiles are as long as the library's alignment, so that each is one expert's). Each program serves one
expert, and takes turns with the others that do.
"""

import triton
import triton.language as tl

from epcross.kernels.experts.gather.index_kernel import TILES
from epcross.kernels.experts.gather.quantise_kernels import SCALE_BLOCK, to_fp8


@triton.jit
def _first_place(expert, expert_tile_ptr, capacity, BLOCK_T: tl.constexpr, MASKED: tl.constexpr):
    """Where an expert's pairs begin."""
    if MASKED:
        return expert.to(tl.int64) * capacity
    else:
        return tl.load(expert_tile_ptr + expert).to(tl.int64) * BLOCK_T


_VARY = ["num_rows", "max_tiles", "capacity", "places"]  # from call to call


@triton.jit(do_not_specialize=_VARY)
def bring_kernel(
    x_ptr,  # [N, H] of landing set 0
    x_delta,
    x_stride,
    x_scale_ptr,  # fp32 [N, H / 128]
    x_scale_delta,
    x_scale_stride,
    epoch_ptr,
    index_ptr,
    num_rows,
    schedule_ptr,
    expert_rows_ptr,
    expert_tile_ptr,
    tile_ptr,
    max_tiles,
    to_ptr,  # out [places, H]
    to_scale_ptr,  # out fp32, a column of places for each 128 values
    to_scale_expert,  # elements between experts' scales (masked)
    to_scale_column,  # elements between columns of scales
    group_ptr,  # out int32 [places] (contiguous): expert of each place, -1 behind the last tile
    capacity,  # places of an expert (masked)
    places,  # that there are
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
    TWO_SETS: tl.constexpr,
):
    if TWO_SETS:
        parity = tl.load(epoch_ptr) & 1
        x_ptr += parity * x_delta
        x_scale_ptr += parity * x_scale_delta
    column = tl.arange(0, H_PAD)
    block = tl.arange(0, SCALES_PAD)
    expert = tl.program_id(0) % E
    first = _first_place(expert, expert_tile_ptr, capacity, BLOCK_T, MASKED)
    for number in range(tl.program_id(0) // E, tl.load(expert_rows_ptr + expert), tl.num_programs(0) // E):
        place = first + number
        if place < places:
            pair = tl.load(index_ptr + expert.to(tl.int64) * num_rows + number)
            row = ((pair >> 1) // K).to(tl.int64)
            values = tl.load(x_ptr + row * x_stride + column, mask=column < H)
            tl.store(to_ptr + place * H + column, values, mask=column < H)
            if FP8:
                scales = tl.load(x_scale_ptr + row * x_scale_stride + block, mask=block < H // SCALE_BLOCK)
                at = to_scale_ptr + block * to_scale_column
                if MASKED:
                    at += expert.to(tl.int64) * to_scale_expert + number
                else:
                    at += place
                tl.store(at, scales, mask=block < H // SCALE_BLOCK)
    if not MASKED:
        tiles = tl.load(schedule_ptr + TILES)
        inner = tl.arange(0, BLOCK_T)
        for tile in range(tl.program_id(0), max_tiles, tl.num_programs(0)):
            group = tl.load(tile_ptr + tile, mask=tile < tiles, other=-1)
            tl.store(group_ptr + tile * BLOCK_T + inner, tl.zeros_like(inner) + group)


@triton.jit(do_not_specialize=["capacity", "places"])
def swiglu_kernel(
    gate_up_ptr,  # bf16 [places, 2I]
    expert_rows_ptr,
    expert_tile_ptr,
    h_ptr,  # out [places, I]
    h_scale_ptr,
    h_scale_expert,
    h_scale_column,
    capacity,
    places,
    I: tl.constexpr,  # noqa: E741
    BLOCKS_PAD: tl.constexpr,  # of 128 columns, a power of two
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MASKED: tl.constexpr,
):
    block = tl.arange(0, BLOCKS_PAD)
    column = block[:, None] * SCALE_BLOCK + tl.arange(0, 128)[None, :]
    inside = column < I
    expert = tl.program_id(0) % E
    first = _first_place(expert, expert_tile_ptr, capacity, BLOCK_T, MASKED)
    for number in range(tl.program_id(0) // E, tl.load(expert_rows_ptr + expert), tl.num_programs(0) // E):
        place = first + number
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


@triton.jit(do_not_specialize=["num_rows", "capacity", "places"])
def return_kernel(
    y_ptr,  # bf16 [places, H]
    place_ptr,  # int32 [N, K]: expert * N + number, or -1
    weight_ptr,  # fp32 [N, K] of landing set 0
    weight_delta,
    weight_stride,
    epoch_ptr,
    expert_tile_ptr,
    num_rows,
    places,  # that there are
    out_ptr,
    out_stride,
    capacity,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    TWO_SETS: tl.constexpr,
):
    if TWO_SETS:
        weight_ptr += (tl.load(epoch_ptr) & 1) * weight_delta
    chunks: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    for unit in range(tl.program_id(0), num_rows * chunks, tl.num_programs(0)):
        row = tl.cast(unit // chunks, tl.int64)
        column = (unit % chunks) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N,), tl.float32)
        found = 0
        for selection in tl.static_range(K):
            where = tl.load(place_ptr + row * K + selection)
            if where >= 0:
                expert = where // num_rows
                number = where - expert * num_rows
                place = _first_place(expert, expert_tile_ptr, capacity, BLOCK_T, MASKED) + number
                end = tl.where(place < places, H, 0)
                y = tl.load(y_ptr + place * H + column, mask=column < end, other=0.0).to(tl.float32)
                total += y * tl.load(weight_ptr + row * weight_stride + selection)
                found += 1
        if found > 0:
            tl.store(out_ptr + row * out_stride + column, total.to(tl.bfloat16), mask=column < H)
