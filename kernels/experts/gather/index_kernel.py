"""Which rows chose which expert. A Triton program: importing it needs Triton.

A pair is one (row, selection) of this rank. Each block takes some rows, gives every pair a number within its expert
and writes it down; the block that comes last makes the tiles. The order of an expert's pairs differs from run to run,
and so does the tile of each. No result depends on it: every column of a product is computed from its own row alone, and
whether a sum is shared is the same for all tiles of an expert at one column.
"""

import triton
import triton.language as tl

EPOCH_SHIFT = tl.constexpr(21)  # of kernels/onesided/layout.py; a test holds the two together
TILES, SPLITS, SHARED, DROPPED, WHOLE = (tl.constexpr(place) for place in range(5))
"""Places in `schedule`: tiles, programs that share a sum of GEMM1, rows with several pairs, tiles without a place, and
how many sums of GEMM1, the first ones, nobody shares."""
MAX_SPLITS = tl.constexpr(8)  # parts of a sum
FULL_SHARE, PART_SHARE = tl.constexpr(0.6), tl.constexpr(0.02)  # see `_balanced`


@triton.jit
def _balanced(blocks, programs, MAX_SPLITS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Into how many parts to cut each sum so that all are done soonest, in turns of `programs` units.

    A turn that is not full takes less, but not below FULL_SHARE: fewer programs do not draw the memory's bandwidth.
    Of tiles of 128 pairs, which their products bound and not the memory, it takes as long as a full one. Each part
    costs PART_SHARE of a sum for every 16 pairs of a tile, for being stored and read. There is room for twice as many
    parts as programs.
    """
    splits = 1
    least = 1e9
    FLOOR: tl.constexpr = 1.0 if BLOCK_T >= 128 else FULL_SHARE
    for parts in tl.static_range(1, MAX_SPLITS + 1):
        units = blocks * parts
        turns = units // programs
        rest = (units - turns * programs).to(tl.float32) / programs
        cost = (turns + tl.where(rest > 0, tl.maximum(rest, FLOOR), 0.0)) / parts
        if parts > 1:
            cost += PART_SHARE * (BLOCK_T / 16) * units.to(tl.float32) / programs
        better = (cost < least) & ((parts == 1) | (units <= 2 * programs))
        splits = tl.where(better, parts, splits)
        least = tl.where(better, cost, least)
    return splits


@triton.jit
def parts_of(blocks, programs, MAX_SPLITS: tl.constexpr, BALANCE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Into how many parts to cut each of so many of GEMM1's sums, see `Tiles.balance`."""
    splits = 1
    if BALANCE:
        splits = _balanced(blocks, programs, MAX_SPLITS, BLOCK_T)
    else:
        while (splits * 2 <= MAX_SPLITS) & (blocks * splits < programs):
            splits *= 2
    return splits


_VARY = ["num_rows", "tokens_per_source", "first_slot", "max_tiles", "wanted_units"]  # from call to call


@triton.jit(do_not_specialize=_VARY)
def index_kernel(
    ids_ptr,  # int32 [N, K] of landing set 0
    ids_delta,  # elements from there to set 1
    ids_stride,
    headers_ptr,  # int64 [sources, tokens_per_source] of set 0
    headers_delta,
    header_source_stride,
    header_token_stride,
    tokens_per_source,
    epoch_ptr,  # int64 [1]
    limit_ptr,  # int32 [1]: rows from there on are empty
    num_rows,  # N
    first_slot,
    index_ptr,  # out int32 [E, N]: pairs of an expert, (row * K + selection) << 1 | whether the row has others here
    place_ptr,  # out int32 [N, K]: expert * N + number within it, -1 for other ranks' selections
    shared_ptr,  # out int32 [N]: rows with several pairs
    counters_ptr,  # int32 [E + 2], 0 between runs: pairs of each expert, rows with several, blocks that are done
    schedule_ptr,  # out int32 [5]
    expert_rows_ptr,  # out int32 [E]
    expert_tile_ptr,  # out int32 [E]: the first tile of each expert
    tile_ptr,  # out int32 [4, max_tiles]: expert, number of its first pair; the expert's pairs and first tile
    max_tiles,
    wanted_units,  # of GEMM1; below it sums are split
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    BLOCK_T: tl.constexpr,  # pairs of a tile
    COLUMN_BLOCKS: tl.constexpr,  # of GEMM1
    MAX_SPLITS: tl.constexpr,
    BALANCE: tl.constexpr,  # 1: choose splits by how full the last turn of the programs is; 2: split that turn alone
    TWO_SETS: tl.constexpr,
    HAS_HEADERS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel before has ended
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    selection = tl.arange(0, K_PAD)
    here = row < num_rows
    if TWO_SETS:
        parity = tl.load(epoch_ptr) & 1
        ids_ptr += parity * ids_delta
        headers_ptr += parity * headers_delta
    if HAS_HEADERS:
        source = row // tokens_per_source
        offset = source * header_source_stride + (row - source * tokens_per_source) * header_token_stride
        header = tl.load(headers_ptr + offset, mask=here, other=0)
        epoch = tl.load(epoch_ptr)
        here = here & (((header ^ (epoch << EPOCH_SHIFT)) >> EPOCH_SHIFT) == 0) & ((header & 1) == 1)
    if HAS_LIMIT:
        here = here & (row < tl.load(limit_ptr))
    known = (row < num_rows)[:, None] & (selection < K)[None, :]
    # also of rows that are not here, so that ids need not wait for headers; what such rows have is not used
    slot = tl.load(ids_ptr + row.to(tl.int64)[:, None] * ids_stride + selection[None, :], mask=known, other=-1)
    expert = slot - first_slot
    local = here[:, None] & known & (slot >= first_slot) & (expert < E)
    pair = row[:, None] * K + selection[None, :]
    number = tl.atomic_add(counters_ptr + expert, 1, mask=local, sem="relaxed")
    several = tl.sum(local.to(tl.int32), 1) > 1
    at = tl.atomic_add(counters_ptr + E + tl.zeros_like(row), 1, mask=several, sem="relaxed")
    tl.store(index_ptr + expert.to(tl.int64) * num_rows + number, pair * 2 + several[:, None], mask=local)
    place = tl.where(local, expert * num_rows + number, -1)
    tl.store(place_ptr + pair, place, mask=known)
    tl.store(shared_ptr + at, row, mask=several)

    tl.debug_barrier()  # all of this block is written before it counts as done
    done = tl.atomic_add(counters_ptr + E + 1, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        each = tl.arange(0, E_PAD)
        rows = tl.load(counters_ptr + each, mask=each < E, other=0, cache_modifier=".cg")
        shared = tl.load(counters_ptr + E, cache_modifier=".cg")
        tiles = (rows + BLOCK_T - 1) // BLOCK_T
        first = tl.cumsum(tiles, 0) - tiles
        total = tl.sum(tiles, 0)
        for number_of_tile in range(tl.max(tiles, 0)):
            tile = first + number_of_tile
            kept = (number_of_tile < tiles) & (tile < max_tiles)
            tl.store(tile_ptr + tile, each, mask=kept)
            tl.store(tile_ptr + max_tiles + tile, tl.zeros_like(each) + number_of_tile * BLOCK_T, mask=kept)
            tl.store(tile_ptr + 2 * max_tiles + tile, rows, mask=kept)
            tl.store(tile_ptr + 3 * max_tiles + tile, first, mask=kept)
        tl.store(expert_rows_ptr + each, rows, mask=each < E)
        tl.store(expert_tile_ptr + each, first, mask=each < E)
        total_kept = tl.minimum(total, max_tiles)
        blocks, whole = total_kept * COLUMN_BLOCKS, 0
        if BALANCE == 2:
            whole = blocks // wanted_units * wanted_units
            # not between two tiles of an expert at one column: which of them a pair is in would decide its sum
            kept_tiles = tl.minimum(tiles, total_kept - first)  # of each expert; below 1 if none has a place
            there = (first <= whole // COLUMN_BLOCKS) & (whole // COLUMN_BLOCKS < first + kept_tiles)
            begin = tl.sum(tl.where(there, first, 0), 0) * COLUMN_BLOCKS
            alike = tl.maximum(tl.sum(tl.where(there, kept_tiles, 0), 0), 1)
            whole = begin + (whole - begin) // alike * alike
        splits = parts_of(blocks - whole, wanted_units, MAX_SPLITS, BALANCE, BLOCK_T)
        tl.store(schedule_ptr + TILES, total_kept)
        tl.store(schedule_ptr + SPLITS, splits)
        tl.store(schedule_ptr + SHARED, shared)
        tl.store(schedule_ptr + DROPPED, total - total_kept)
        tl.store(schedule_ptr + WHOLE, whole)
        tl.debug_barrier()  # they are read before they are zero for the next run
        tl.store(counters_ptr + each, tl.zeros_like(each), mask=each < E + 2)
        if E + 2 > E_PAD:
            last = E_PAD + tl.arange(0, 2)
            tl.store(counters_ptr + last, tl.zeros_like(last), mask=last < E + 2)
