"""What a library's grouped GEMM needs around it: rows brought to their experts, and sums brought back.

Triton programs: importing this needs Triton. A pair is one (row, selection) of this rank. Its place in the library's
buffers is expert * room + its number within the expert (masked), or counts on from the expert's first tile (contiguous:
tiles are as long as the library's alignment, so that each is one expert's).

Rows that have pairs are listed, in no order, and each has its places and weights beside it, in the order of its
selections. What follows strides over that list, or over the pairs that were counted, so that it takes as long as what
came, whatever there is room for. The order of an expert's pairs differs from run to run, and no result depends on it:
every row of a product is computed by itself.

Counters must be zero when `place_kernel` starts. Those after it see to that, each where nobody reads them any more:
`swiglu_kernel` takes the number of rows that are listed, `return_kernel` clears the experts' counts.
"""

import triton
import triton.language as tl

from epcross.kernels.experts.gather.index_kernel import EPOCH_SHIFT


@triton.jit
def first_places(counts, each, room, BLOCK_T: tl.constexpr, MASKED: tl.constexpr):
    """int32 [E_PAD]: where each expert's pairs begin."""
    if MASKED:
        return each * room
    else:
        tiles = (counts + BLOCK_T - 1) // BLOCK_T
        return (tl.cumsum(tiles, 0) - tiles) * BLOCK_T


@triton.jit
def value_at(values, mine):
    """The value of the one place where `mine` is true; 0 if there is none."""
    return tl.sum(tl.where(mine, values, 0), 0)


@triton.jit(do_not_specialize=["num_rows", "tokens_per_source", "first_slot", "room"])
def place_kernel(
    ids_ptr,  # int32 [N, K] of landing set 0
    ids_delta,  # elements from there to set 1
    ids_stride,
    weight_ptr,  # fp32 [N, K]
    weight_delta,
    weight_stride,
    x_ptr,  # [N, WORDS]
    x_delta,
    x_stride,
    x_scale_ptr,  # fp32 [N, SCALES]
    x_scale_delta,
    x_scale_stride,
    headers_ptr,  # int64 [sources, tokens_per_source] of set 0
    headers_delta,
    header_source_stride,
    header_token_stride,
    tokens_per_source,
    epoch_ptr,  # int64 [1]
    limit_ptr,  # int32 [1]: rows from there on are empty
    num_rows,  # N
    first_slot,
    counters_ptr,  # int32 [E + 1], 0 before: pairs of each expert, rows with any
    listed_ptr,  # out int32 [N, 2]: rows with pairs, and how many each has
    place_ptr,  # out int32 [N, K]: expert * room + number of each pair of a listed row, -1 behind the last
    pair_weight_ptr,  # out fp32 [N, K], likewise
    room,  # places of an expert
    to_ptr,  # out [E, room, WORDS], if rows are to be copied
    to_scale_ptr,  # out fp32, a column of places for each 128 values
    to_scale_expert,  # elements between experts' scales
    to_scale_column,  # elements between columns of scales
    WORDS: tl.constexpr,  # of 4 bytes, of a row
    WORDS_PAD: tl.constexpr,
    SCALES: tl.constexpr,  # of a row, 0 without
    SCALES_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    COPY: tl.constexpr,
    TWO_SETS: tl.constexpr,
    HAS_HEADERS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):
    # rows of a program lie apart: of a source that sent few, not all rows are one program's
    row = tl.program_id(0) + tl.arange(0, ROWS) * tl.num_programs(0)
    selection = tl.arange(0, K_PAD)
    here = row < num_rows
    if TWO_SETS:
        parity = tl.load(epoch_ptr) & 1
        ids_ptr += parity * ids_delta
        weight_ptr += parity * weight_delta
        headers_ptr += parity * headers_delta
        x_ptr += parity * x_delta
        x_scale_ptr += parity * x_scale_delta
    if HAS_HEADERS:
        source = row // tokens_per_source
        offset = source * header_source_stride + (row - source * tokens_per_source) * header_token_stride
        header = tl.load(headers_ptr + offset, mask=here, other=0)
        epoch = tl.load(epoch_ptr)
        here = here & (((header ^ (epoch << EPOCH_SHIFT)) >> EPOCH_SHIFT) == 0) & ((header & 1) == 1)
    if HAS_LIMIT:
        here = here & (row < tl.load(limit_ptr))
    wanted = here[:, None] & (selection < K)[None, :]
    row_wide = row.to(tl.int64)
    slot = tl.load(ids_ptr + row_wide[:, None] * ids_stride + selection[None, :], mask=wanted, other=-1)
    expert = slot - first_slot
    local = wanted & (slot >= first_slot) & (expert < E)
    pairs = tl.sum(local.to(tl.int32), 1)
    here = pairs > 0
    weight = tl.load(weight_ptr + row_wide[:, None] * weight_stride + selection[None, :], mask=local, other=0.0)
    turn = tl.cumsum(here.to(tl.int32), 0)  # 1 for the first row that is here
    came = tl.sum(here.to(tl.int32), 0)
    column = tl.arange(0, WORDS_PAD)
    block = tl.arange(0, SCALES_PAD)
    values, scales = tl.zeros_like(column), tl.zeros((SCALES_PAD,), tl.float32)
    if COPY:  # on its way while the pairs are counted
        copied = value_at(row_wide, here & (turn == 1))
        values = tl.load(x_ptr + copied * x_stride + column, mask=(column < WORDS) & (came > 0), other=0)
        if SCALES > 0:
            scales = tl.load(x_scale_ptr + copied * x_scale_stride + block, mask=(block < SCALES) & (came > 0), other=0)

    number = tl.atomic_add(counters_ptr + expert, 1, mask=local, sem="relaxed")
    at = tl.atomic_add(counters_ptr + E + tl.zeros_like(row), 1, mask=here, sem="relaxed")
    before = tl.cumsum(local.to(tl.int32), 1) - local.to(tl.int32)
    order = tl.where(local, before, pairs[:, None] + selection[None, :] - before)  # its own first, then the others
    entry = at.to(tl.int64)[:, None] * K + order
    listed = here[:, None] & (selection < K)[None, :]
    tl.store(place_ptr + entry, tl.where(local, expert * room + number, -1), mask=listed)
    tl.store(pair_weight_ptr + entry, weight, mask=listed)
    tl.store(listed_ptr + at.to(tl.int64) * 2, row, mask=here)
    tl.store(listed_ptr + at.to(tl.int64) * 2 + 1, pairs, mask=here)

    if COPY:
        tl.debug_barrier()  # places are written before they are read
        for done in range(came):
            mine = here & (turn == done + 1)
            more = done + 1 < came
            copied = value_at(row_wide, here & (turn == done + 2))
            next_values = tl.load(x_ptr + copied * x_stride + column, mask=(column < WORDS) & more, other=0)
            next_scales = scales
            if SCALES > 0:
                next_scales = tl.load(
                    x_scale_ptr + copied * x_scale_stride + block, mask=(block < SCALES) & more, other=0
                )
            first = value_at(at, mine).to(tl.int64) * K
            for pair in range(value_at(pairs, mine)):
                place = tl.load(place_ptr + first + pair)
                tl.store(to_ptr + place.to(tl.int64) * WORDS + column, values, mask=column < WORDS)
                if SCALES > 0:
                    of = place // room
                    scale_at = of.to(tl.int64) * to_scale_expert + (place - of * room)
                    tl.store(to_scale_ptr + scale_at + block * to_scale_column, scales, mask=block < SCALES)
            values, scales = next_values, next_scales


@triton.jit(do_not_specialize=["num_rows", "max_tiles", "places"])
def bring_kernel(
    x_ptr,  # as `place_kernel` has them
    x_delta,
    x_stride,
    x_scale_ptr,
    x_scale_delta,
    x_scale_stride,
    epoch_ptr,
    counters_ptr,
    listed_ptr,
    pair_ptr,  # int32 [N, K]: expert * N + number of each pair of a listed row, -1 behind the last
    place_ptr,  # out int32 [N, K]: its place, -1 if there is none
    num_rows,  # N
    to_ptr,  # out [places, WORDS]
    to_scale_ptr,  # out fp32, a column of places for each 128 values
    to_scale_column,  # elements between columns of scales
    group_ptr,  # out int32 [places]: expert of each place, -1 behind the last tile
    max_tiles,
    places,  # that there are
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TWO_SETS: tl.constexpr,
):
    if TWO_SETS:
        parity = tl.load(epoch_ptr) & 1
        x_ptr += parity * x_delta
        x_scale_ptr += parity * x_scale_delta
    each = tl.arange(0, E_PAD)
    counts = tl.load(counters_ptr + each, mask=each < E, other=0)
    firsts = first_places(counts, each, 0, BLOCK_T, False)
    column = tl.arange(0, WORDS_PAD)
    block = tl.arange(0, SCALES_PAD)
    selection = tl.arange(0, K_PAD)
    for entry in range(tl.program_id(0), tl.load(counters_ptr + E), tl.num_programs(0)):
        row = tl.load(listed_ptr + 2 * entry).to(tl.int64)
        pairs = tl.load(listed_ptr + 2 * entry + 1)
        first = tl.cast(entry, tl.int64) * K
        values = tl.load(x_ptr + row * x_stride + column, mask=column < WORDS, other=0)
        scales = tl.zeros((SCALES_PAD,), tl.float32)
        if SCALES > 0:
            scales = tl.load(x_scale_ptr + row * x_scale_stride + block, mask=block < SCALES, other=0)
        tl.store(
            place_ptr + first + selection, tl.zeros_like(selection) - 1, mask=(selection >= pairs) & (selection < K)
        )
        for pair in range(pairs):
            where = tl.load(pair_ptr + first + pair)
            expert = where // num_rows
            place = value_at(firsts, each == expert) + where - expert * num_rows
            there = place < places
            tl.store(place_ptr + first + pair, tl.where(there, place, -1))
            tl.store(to_ptr + place.to(tl.int64) * WORDS + column, values, mask=(column < WORDS) & there)
            if SCALES > 0:
                at = to_scale_ptr + place + block.to(tl.int64) * to_scale_column
                tl.store(at, scales, mask=(block < SCALES) & there)
    ends = firsts // BLOCK_T + (counts + BLOCK_T - 1) // BLOCK_T
    tiles = tl.max(ends, 0)
    inner = tl.arange(0, BLOCK_T)
    for tile in range(tl.program_id(0), max_tiles, tl.num_programs(0)):
        group = tl.where(tile < tiles, tl.sum((ends <= tile).to(tl.int32), 0), -1)
        tl.store(group_ptr + tile * BLOCK_T + inner, tl.zeros_like(inner) + group)


@triton.jit
def return_kernel(
    y_ptr,  # bf16 [places, H]
    counters_ptr,  # int32 [E]; 0 afterwards
    count_ptr,  # int32 [1]: rows that are listed
    listed_ptr,  # int32 [N, 2]
    place_ptr,  # int32 [N, K]: -1 for no place, and behind the last pair
    pair_weight_ptr,  # fp32 [N, K]
    out_ptr,  # bf16 [N, H]
    out_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    each = tl.arange(0, E_PAD)
    if tl.program_id(0) == 0:
        tl.store(counters_ptr + each, tl.zeros_like(each), mask=each < E)
    chunks: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    for unit in range(tl.program_id(0), tl.load(count_ptr) * chunks, tl.num_programs(0)):
        entry = tl.cast(unit // chunks, tl.int64)
        column = (unit % chunks) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.load(listed_ptr + 2 * entry).to(tl.int64)
        pairs = tl.load(listed_ptr + 2 * entry + 1)
        total = tl.zeros((BLOCK_N,), tl.float32)
        total = _add_two(total, 0, y_ptr, place_ptr, pair_weight_ptr, entry, column, H, K)
        for first in range(2, pairs, 2):
            total = _add_two(total, first, y_ptr, place_ptr, pair_weight_ptr, entry, column, H, K)
        tl.store(out_ptr + row * out_stride + column, total.to(tl.bfloat16), mask=column < H)


@triton.jit
def _add_two(total, first, y_ptr, place_ptr, pair_weight_ptr, entry, column, H: tl.constexpr, K: tl.constexpr):
    """The pairs `first` and `first` + 1 of a row, added in this order; both are on their way at once."""
    second = first + 1 < K
    place_0 = tl.load(place_ptr + entry * K + first).to(tl.int64)
    place_1 = tl.load(place_ptr + entry * K + first + 1, mask=second, other=-1).to(tl.int64)
    weight_0 = tl.load(pair_weight_ptr + entry * K + first)
    weight_1 = tl.load(pair_weight_ptr + entry * K + first + 1, mask=second, other=0.0)
    y_0 = tl.load(y_ptr + place_0 * H + column, mask=(column < H) & (place_0 >= 0), other=0.0)
    y_1 = tl.load(y_ptr + place_1 * H + column, mask=(column < H) & (place_1 >= 0), other=0.0)
    total += y_0.to(tl.float32) * weight_0
    return total + y_1.to(tl.float32) * weight_1
