"""The two grouped GEMMs and what finishes them. Triton programs: importing this needs Triton.

Weights are the tall operand and tokens the wide one, where a decode step has few tokens for each expert: a product of
BLOCK_N rows of weights and BLOCK_T tokens wastes no tensor core on absent tokens, and reads weights once, by bulk
copies that the compiler keeps several stages deep. With TALL, for tiles of 64 tokens and more, it is the other way
round (product_kernels.py). Programs are persistent and take units of work in the order in which neighbours share
weights in the L2.

fp8: a product over 128 values is accumulated from 0 by the tensor cores, then scaled and added in fp32, because their
accumulator keeps fewer bits than fp32 has (DeepSeek-V3 report, section 3.3.2). Scales are fetched one step ahead.
"""

import triton
import triton.language as tl

from epcross.kernels.experts.gather.fetch_kernels import fetch_of_down, fetch_of_gate_up
from epcross.kernels.experts.gather.index_kernel import SHARED, SPLITS, TILES, WHOLE
from epcross.kernels.experts.gather.product_kernels import added, nothing, scaled_sum, scaled_sums
from epcross.kernels.experts.gather.quantise_kernels import SCALE_BLOCK, to_fp8

ANY_CACHE = tl.constexpr("")


@triton.jit
def _pairs_from(first, expert, rows, index_ptr, num_rows, BLOCK_T: tl.constexpr):
    """Pairs of an expert from its `first` on, as the index has them; which of BLOCK_T places have their own."""
    number = first + tl.arange(0, BLOCK_T)
    # empty places repeat the last pair: what they load is valid, and what they make is not stored
    pair = tl.load(index_ptr + expert.to(tl.int64) * num_rows + tl.minimum(number, rows - 1))
    return pair, number < rows


@triton.jit
def place_of(
    block, tiles, tile_ptr, max_tiles, COLUMNS: tl.constexpr, BLOCK_T: tl.constexpr, CACHE: tl.constexpr = ANY_CACHE
):  # fmt: skip
    """Of GEMM1's sums, in their order: expert, column, tile. Which tile and column one is of, its expert, the rows of
    that, and the first pair of the tile. Tiles of an expert at one column are neighbours: they read the same weights at
    the same time. CACHE is ".cg", past the L1, for whoever asks before the kernel before has ended."""
    at = tile_ptr + block // COLUMNS  # any tile of its expert
    expert = tl.load(at, cache_modifier=CACHE)
    rows, first = tl.load(at + 2 * max_tiles, cache_modifier=CACHE), tl.load(at + 3 * max_tiles, cache_modifier=CACHE)
    alike = tl.minimum((rows + BLOCK_T - 1) // BLOCK_T, tiles - first)  # fewer where tiles found no place
    rest = block - first * COLUMNS
    column = rest // alike
    number = rest - column * alike
    return first + number, column, expert, rows, number * BLOCK_T


@triton.jit
def unit_of(unit, whole, splits, STEPS: tl.constexpr):
    """Which of GEMM1's sums a unit of work belongs to, which of those that are shared that is, how many parts it has,
    and the unit's own steps of it, of so many."""
    parts = tl.where(unit < whole, 1, splits)
    shared = tl.maximum(unit - whole, 0) // splits
    block = tl.where(unit < whole, unit, whole + shared)
    split = tl.where(unit < whole, 0, unit - whole - shared * splits)
    return block, shared, parts, STEPS * split // parts, STEPS * (split + 1) // parts


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def gate_up_kernel(
    w_desc,  # [E * 2I, H], blocks of [BLOCK_N, BLOCK_K]
    w_ptr,  # the same, byte by byte
    w_scale_ptr,  # fp32 [E, 2I / 128, H / 128]
    x_ptr,  # [N, H] of landing set 0
    x_delta,  # elements from there to set 1
    x_stride,
    x_scale_ptr,  # fp32 [N, H / 128]
    x_scale_delta,
    x_scale_stride,
    epoch_ptr,
    index_ptr,
    num_rows,
    schedule_ptr,
    tile_ptr,
    max_tiles,
    h_ptr,  # out [max_tiles * BLOCK_T, I]: the intermediate, as quantised
    h_scale_ptr,  # out fp32 [I / 128, max_tiles * BLOCK_T]
    part_ptr,  # fp32 [split units, 2, BLOCK_N, BLOCK_T], or with TALL [.., BLOCK_T, BLOCK_N]
    arrivals_ptr,  # int32 [split units], 0 between runs
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of the intermediate
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    IN_TURN: tl.constexpr,  # the whole sum of gate, then that of up: a stage has one block of weights, not two
    LATE: tl.constexpr,  # up is scaled a step later
    ALONE: tl.constexpr,  # a product is scaled before the next one begins
    AHEAD: tl.constexpr,  # bytes of each row of the first unit's weights to bring to the L2 while the index is made
    BALANCE: tl.constexpr,  # as the index's
    E: tl.constexpr,
    TWO_SETS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        if AHEAD > 0:
            fetch_of_gate_up(w_ptr, E, H // BLOCK_K, I, H * (1 if FP8 else 2), BLOCK_N, BLOCK_T, BALANCE, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if TWO_SETS:
        parity = tl.load(epoch_ptr) & 1
        x_ptr += parity * x_delta
        x_scale_ptr += parity * x_scale_delta
    tiles = tl.load(schedule_ptr + TILES)
    splits = tl.load(schedule_ptr + SPLITS)
    whole = tl.load(schedule_ptr + WHOLE)
    columns_of_tile: tl.constexpr = I // BLOCK_N
    steps: tl.constexpr = H // BLOCK_K
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    for unit in range(tl.program_id(0), whole + (tiles * columns_of_tile - whole) * splits, tl.num_programs(0)):
        block, shared, parts, first, last = unit_of(unit, whole, splits, steps)
        tile, column_block, expert, rows, first_pair = place_of(
            block, tiles, tile_ptr, max_tiles, columns_of_tile, BLOCK_T
        )
        column = column_block * BLOCK_N
        pair, own = _pairs_from(first_pair, expert, rows, index_ptr, num_rows, BLOCK_T)
        row = ((pair >> 1) // K).to(tl.int64)
        x_row = x_ptr + row * x_stride
        gate_row = expert * (2 * I) + column
        gate, up = nothing(BLOCK_N, BLOCK_T, TALL), nothing(BLOCK_N, BLOCK_T, TALL)
        if FP8:
            xs_row = ((pair >> 1) // K) * x_scale_stride
            gs_ptr = w_scale_ptr + (gate_row // SCALE_BLOCK) * (H // SCALE_BLOCK)
            us_ptr = gs_ptr + (I // SCALE_BLOCK) * (H // SCALE_BLOCK)
            if IN_TURN:
                gate = scaled_sum(
                    w_desc, gate_row, gs_ptr, x_row, 0, x_scale_ptr, xs_row, 1, first, last,
                    BLOCK_N, BLOCK_T, BLOCK_K, TALL, BULK=False,
                )  # fmt: skip
                up = scaled_sum(
                    w_desc, gate_row + I, us_ptr, x_row, 0, x_scale_ptr, xs_row, 1, first, last,
                    BLOCK_N, BLOCK_T, BLOCK_K, TALL, BULK=False,
                )  # fmt: skip
            else:
                gate, up = scaled_sums(
                    w_desc, gate_row, gate_row + I, gs_ptr, us_ptr, x_row, 0, x_scale_ptr, xs_row, 1, first, last,
                    BLOCK_N, BLOCK_T, BLOCK_K, TALL, False, LATE, ALONE,
                )  # fmt: skip
        else:
            for step in tl.range(first, last):
                x = tl.load(x_row[:, None] + (step * BLOCK_K + k)[None, :])
                gate = added(w_desc.load([gate_row, step * BLOCK_K]), x, gate, TALL)
                up = added(w_desc.load([gate_row + I, step * BLOCK_K]), x, up, TALL)
        complete = True
        if parts > 1:  # whoever comes last adds all of them, in their order
            size: tl.constexpr = BLOCK_N * BLOCK_T
            inner = t[:, None] * BLOCK_N + n[None, :] if TALL else n[:, None] * BLOCK_T + t[None, :]
            mine = part_ptr + tl.cast(unit - whole, tl.int64) * (2 * size) + inner
            tl.store(mine, gate)
            tl.store(mine + size, up)
            tl.debug_barrier()
            complete = tl.atomic_add(arrivals_ptr + shared, 1, sem="acq_rel", scope="gpu") == parts - 1
            if complete:
                tl.store(arrivals_ptr + shared, 0)
                gate, up = nothing(BLOCK_N, BLOCK_T, TALL), nothing(BLOCK_N, BLOCK_T, TALL)
                for other in range(parts):
                    part = part_ptr + tl.cast(shared * parts + other, tl.int64) * (2 * size) + inner
                    gate += tl.load(part, cache_modifier=".cg")
                    up += tl.load(part + size, cache_modifier=".cg")
        if complete:
            h = gate / (1 + tl.exp(-gate)) * up
            if not TALL:
                h = h.T
            place = tile * BLOCK_T + t
            at = h_ptr + place.to(tl.int64)[:, None] * I + (column + n)[None, :]
            if FP8:
                codes, scale = to_fp8(h, BLOCK_T, POWER_OF_TWO)
                tl.store(at, codes, mask=own[:, None])
                tl.store(h_scale_ptr + (column // SCALE_BLOCK) * (max_tiles * BLOCK_T) + place, scale, mask=own)
            else:
                tl.store(at, h.to(tl.bfloat16), mask=own[:, None])


@triton.jit
def _store(y, weight, out_row, part_row, column, alone, shared, TALL: tl.constexpr, SKIP: tl.constexpr):
    """Columns of the output: a row's only pair goes to where `out_row` points, another to where `part_row` does. With
    SKIP neither is made ready where no pair of the tile goes there: of many tokens, few rows have one pair."""
    y = y * weight[:, None] if TALL else (y * weight[None, :]).T
    if not SKIP or tl.max(alone.to(tl.int32), 0) > 0:
        tl.store(out_row[:, None] + column[None, :], y.to(tl.bfloat16), mask=alone[:, None])
    if not SKIP or tl.max(shared.to(tl.int32), 0) > 0:
        at = part_row[:, None] + column[None, :]
        tl.store(at, y.to(at.dtype.element_ty), mask=shared[:, None])


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def down_kernel(
    w_desc,  # [E * H, I], blocks of [BLOCK_N, BLOCK_K]
    w_ptr,  # the same, byte by byte
    w_scale_ptr,  # fp32 [E, H / 128, I / 128]
    h_desc,  # [max_tiles * BLOCK_T, I], blocks of [BLOCK_T, BLOCK_K]
    h_scale_ptr,  # fp32 [I / 128, max_tiles * BLOCK_T]
    weight_ptr,  # fp32 [N, K] of landing set 0
    weight_delta,
    weight_stride,
    epoch_ptr,
    index_ptr,
    num_rows,
    schedule_ptr,
    expert_rows_ptr,
    tile_ptr,
    max_tiles,
    out_ptr,  # out bf16 [N, H]
    out_stride,
    part_ptr,  # out fp32 or bf16 [max_tiles * BLOCK_T, H]: of pairs whose row has others here
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    PAIR: tl.constexpr,  # a unit has two blocks of BLOCK_N columns, not one
    PREFETCH: tl.constexpr,  # bytes of each row of the first unit's weights to bring to the L2 while GEMM1 ends
    TWO_SETS: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N * (2 if PAIR else 1)
    if PDL:
        if PREFETCH > 0:
            fetch_of_down(w_ptr, schedule_ptr, tile_ptr, H, I * (1 if FP8 else 2), WIDTH, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if TWO_SETS:
        weight_ptr += (tl.load(epoch_ptr) & 1) * weight_delta
    tiles = tl.load(schedule_ptr + TILES)
    columns_of_tile: tl.constexpr = H // WIDTH
    steps: tl.constexpr = I // BLOCK_K
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    for unit in range(tl.program_id(0), tiles * columns_of_tile, tl.num_programs(0)):
        tile = unit // columns_of_tile
        column = (unit - tile * columns_of_tile) * WIDTH
        expert = tl.load(tile_ptr + tile)
        first_pair, rows = tl.load(tile_ptr + max_tiles + tile), tl.load(expert_rows_ptr + expert)
        pair, own = _pairs_from(first_pair, expert, rows, index_ptr, num_rows, BLOCK_T)
        w_row, h_row = expert * H + column, tile * BLOCK_T
        place = h_row + t
        y, y2 = nothing(BLOCK_N, BLOCK_T, TALL), nothing(BLOCK_N, BLOCK_T, TALL)
        if FP8:
            places = max_tiles * BLOCK_T
            ws_ptr = w_scale_ptr + (w_row // SCALE_BLOCK) * (I // SCALE_BLOCK)
            if PAIR:
                ws2_ptr = w_scale_ptr + ((w_row + BLOCK_N) // SCALE_BLOCK) * (I // SCALE_BLOCK)
                y, y2 = scaled_sums(
                    w_desc, w_row, w_row + BLOCK_N, ws_ptr, ws2_ptr, h_desc, h_row, h_scale_ptr, place, places, 0,
                    steps, BLOCK_N, BLOCK_T, BLOCK_K, TALL, True, LATE=False, ALONE=True,
                )  # fmt: skip
            else:
                y = scaled_sum(
                    w_desc, w_row, ws_ptr, h_desc, h_row, h_scale_ptr, place, places, 0, steps,
                    BLOCK_N, BLOCK_T, BLOCK_K, TALL, BULK=True,
                )  # fmt: skip
        else:
            for step in tl.range(0, steps):
                h = h_desc.load([h_row, step * BLOCK_K])
                y = added(w_desc.load([w_row, step * BLOCK_K]), h, y, TALL)
                if PAIR:
                    y2 = added(w_desc.load([w_row + BLOCK_N, step * BLOCK_K]), h, y2, TALL)
        row = ((pair >> 1) // K).to(tl.int64)
        weight = tl.load(weight_ptr + row * weight_stride + (pair >> 1) % K)
        shared = (pair & 1) == 1
        out_row, part_row = out_ptr + row * out_stride, part_ptr + place.to(tl.int64) * H
        _store(y, weight, out_row, part_row, column + n, own & (shared == 0), own & shared, TALL, PAIR)
        if PAIR:
            _store(y2, weight, out_row, part_row, column + BLOCK_N + n, own & (shared == 0), own & shared, TALL, PAIR)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def finish_kernel(
    shared_ptr,  # int32: rows with several pairs
    place_ptr,  # int32 [N, K]
    expert_tile_ptr,
    schedule_ptr,
    num_rows,
    part_ptr,
    out_ptr,
    out_stride,
    max_tiles,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    chunks: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    for unit in range(tl.program_id(0), tl.load(schedule_ptr + SHARED) * chunks, tl.num_programs(0)):
        row = tl.load(shared_ptr + unit // chunks).to(tl.int64)
        column = (unit % chunks) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for selection in tl.static_range(K):
            place = tl.load(place_ptr + row * K + selection)
            expert = tl.maximum(place, 0) // num_rows
            pair = tl.load(expert_tile_ptr + expert) * BLOCK_T + place - expert * num_rows
            end = tl.where((place >= 0) & (pair < max_tiles * BLOCK_T), H, 0)
            part = tl.load(part_ptr + pair.to(tl.int64) * H + column, mask=column < end, other=0.0)
            total += part.to(tl.float32)
        tl.store(out_ptr + row * out_stride + column, total.to(tl.bfloat16), mask=column < H)
