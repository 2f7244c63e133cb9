"""GEMM1 and SwiGLU for tiles of 128 pairs, in warps that each do one thing. Gluon programs: needs Triton.

Four warps copy: weights by bulk copies, rows each from where it lies. Two groups of four multiply, each 64 of the
tile's pairs with both blocks of weights (`specialised_product_kernels.py`). In `gemm_kernels` all warps go through a
step together, and the tensor cores wait while they scale.

Units of work, the index's schedule and what is written are those of `gate_up_kernel`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from epcross.kernels.experts.gather.gemm_kernels import place_of, unit_of
from epcross.kernels.experts.gather.index_kernel import SPLITS, TILES, WHOLE
from epcross.kernels.experts.gather.quantise_kernels import to_fp8
from epcross.kernels.experts.gather.specialised_product_kernels import (
    BLOCK,
    COPY_REGISTERS,
    HALF,
    REGISTERS,
    WARPS,
    pass_by,
    stages_of,
    two_products,
)


@gluon.jit
def _copy_gate_up(
    w_desc, w_scale_ptr, x_ptr, x_stride, x_scale_ptr, x_scale_stride, index_ptr, num_rows, tile_ptr, max_tiles, tiles,
    whole, splits, wbuf, xbuf, xsbuf, wsbuf, full, empty,
    H: gl.constexpr, I: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,  # noqa: E741
):  # fmt: skip
    rows_of: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, rows_of))
    t, e = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, rows_of)), gl.arange(0, BLOCK, layout=each)
    one = gl.zeros((1,), gl.int32, each)
    columns_of_tile: gl.constexpr = I // BLOCK
    steps: gl.constexpr = H // BLOCK
    passed = 0
    for unit in range(gl.program_id(0), whole + (tiles * columns_of_tile - whole) * splits, gl.num_programs(0)):
        block, _, _, first_round, last_round = unit_of(unit, whole, splits, steps // STAGES)
        _, column, expert, rows, first = place_of(block, tiles, tile_ptr, max_tiles, columns_of_tile, BLOCK)
        pairs_ptr = index_ptr + expert.to(gl.int64) * num_rows
        row = (gl.load(pairs_ptr + gl.minimum(first + t, rows - 1)) >> 1) // K
        row_of_scale = (gl.load(pairs_ptr + gl.minimum(first + e, rows - 1)) >> 1) // K
        x_row = x_ptr + row.to(gl.int64) * x_stride
        xs_ptr = x_scale_ptr + row_of_scale * x_scale_stride
        gs_ptr = w_scale_ptr + (expert * (2 * I // BLOCK) + column) * steps + one
        us_ptr = gs_ptr + (I // BLOCK) * steps
        own, own_scale = (first + t < rows)[:, None], first + e < rows
        w_row = expert * (2 * I) + column * BLOCK
        for number in range(first_round, last_round):
            for stage in gl.static_range(STAGES):
                step = number * STAGES + stage
                # what the groups read of this stage before, they have read
                mbarrier.wait(empty.index(stage), (passed & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * BLOCK * BLOCK)
                k_first = step * BLOCK
                tma.async_copy_global_to_shared(w_desc, [w_row, k_first], full.index(stage), wbuf.index(2 * stage))
                tma.async_copy_global_to_shared(
                    w_desc, [w_row + I, k_first], full.index(stage), wbuf.index(2 * stage + 1)
                )
                async_copy.async_copy_global_to_shared(
                    xbuf.index(stage), x_row[:, None] + (k_first + k)[None, :], mask=own
                )
                async_copy.async_copy_global_to_shared(xsbuf.index(stage), xs_ptr + step, mask=own_scale)
                async_copy.async_copy_global_to_shared(wsbuf.index(2 * stage), gs_ptr + step)
                async_copy.async_copy_global_to_shared(wsbuf.index(2 * stage + 1), us_ptr + step)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            passed += 1


@gluon.jit
def _multiply_gate_up(
    GROUP: gl.constexpr, tile_ptr, max_tiles, tiles, whole, splits, h_desc, h_scale_ptr, part_ptr, arrivals_ptr, put,
    wbuf, xbuf, xsbuf, wsbuf, full, empty,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr, POWER_OF_TWO: gl.constexpr,  # noqa: E741
):  # fmt: skip
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    t = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums))
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, sums))
    columns_of_tile: gl.constexpr = I // BLOCK
    rounds: gl.constexpr = H // BLOCK // STAGES
    zero = gl.zeros((HALF, BLOCK), gl.float32, sums)
    passed = 0
    for unit in range(gl.program_id(0), whole + (tiles * columns_of_tile - whole) * splits, gl.num_programs(0)):
        block, shared, parts, first_round, last_round = unit_of(unit, whole, splits, rounds)
        tile, column, _, rows, first = place_of(block, tiles, tile_ptr, max_tiles, columns_of_tile, BLOCK)
        if first + GROUP * HALF < rows:
            gate, up = two_products(
                zero, zero, zero, passed, first_round, last_round, wbuf, xbuf, xsbuf, wsbuf, full, empty, GROUP,
                STAGES, sums, FENCE=True,
            )  # fmt: skip
            complete = True
            if parts > 1:  # whoever comes last adds all of them, in their order
                size: gl.constexpr = BLOCK * BLOCK
                inner = t[:, None] * BLOCK + n[None, :]
                mine = part_ptr + (unit - whole).to(gl.int64) * (2 * size) + inner
                gl.store(mine, gate)
                gl.store(mine + size, up)
                gl.thread_barrier()  # all of this group has written before one of its threads says so
                before = gl.atomic_add(arrivals_ptr + 2 * shared + GROUP, 1, sem="acq_rel", scope="gpu")
                complete = before == parts - 1
                if complete:
                    gl.store(arrivals_ptr + 2 * shared + GROUP, 0)
                    gate, up = zero, zero
                    for other in range(parts):
                        part = part_ptr + (shared * parts + other).to(gl.int64) * (2 * size) + inner
                        gate += gl.load(part, cache_modifier=".cg")
                        up += gl.load(part + size, cache_modifier=".cg")
            if complete:
                h = gate / (1 + gl.exp(-gate)) * up
                codes, scale = to_fp8(h, HALF, POWER_OF_TWO)
                place = tile * BLOCK + t
                tma.store_wait(0)  # what was put there before has left
                put.store(codes)
                fence_async_shared()
                tma.async_copy_shared_to_global(h_desc, [tile * BLOCK + GROUP * HALF, column * BLOCK], put)
                gl.store(h_scale_ptr + column * (max_tiles * BLOCK) + place, scale, mask=first + t < rows)
        else:
            pass_by(passed, last_round - first_round, full, empty, STAGES)
        passed += last_round - first_round
    tma.store_wait(0)  # memory of the program that it reads must outlast it


@gluon.jit(do_not_specialize=["num_rows", "max_tiles"])
def gate_up_specialised_kernel(
    w_desc,  # as `gate_up_kernel`'s
    w_scale_ptr,
    x_ptr,
    x_delta,
    x_stride,
    x_scale_ptr,
    x_scale_delta,
    x_scale_stride,
    epoch_ptr,
    index_ptr,
    num_rows,
    schedule_ptr,
    tile_ptr,
    max_tiles,
    h_desc,  # out [max_tiles * BLOCK, I], blocks of [HALF, BLOCK]
    h_scale_ptr,
    part_ptr,  # fp32 [split units, 2, BLOCK, BLOCK]
    arrivals_ptr,  # int32 [split units, 2], 0 between runs
    H: gl.constexpr,
    I: gl.constexpr,  # noqa: E741
    K: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    STAGES: gl.constexpr,
    TWO_SETS: gl.constexpr,
    PDL: gl.constexpr,
):
    wbuf, xbuf, xsbuf, wsbuf, full, empty = stages_of(STAGES)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    put = gl.allocate_shared_memory(gl.float8e4nv, [2, HALF, BLOCK], swizzled)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if TWO_SETS:
        parity = gl.load(epoch_ptr) & 1
        x_ptr += parity * x_delta
        x_scale_ptr += parity * x_scale_delta
    tiles, whole, splits = (
        gl.load(schedule_ptr + TILES), gl.load(schedule_ptr + WHOLE), gl.load(schedule_ptr + SPLITS),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_gate_up, (
                0, tile_ptr, max_tiles, tiles, whole, splits, h_desc, h_scale_ptr, part_ptr, arrivals_ptr,
                put.index(0), wbuf, xbuf, xsbuf, wsbuf, full, empty, H, I, STAGES, POWER_OF_TWO,
            )),
            (_multiply_gate_up, (
                1, tile_ptr, max_tiles, tiles, whole, splits, h_desc, h_scale_ptr, part_ptr, arrivals_ptr,
                put.index(1), wbuf, xbuf, xsbuf, wsbuf, full, empty, H, I, STAGES, POWER_OF_TWO,
            )),
            (_copy_gate_up, (
                w_desc, w_scale_ptr, x_ptr, x_stride, x_scale_ptr, x_scale_stride, index_ptr, num_rows, tile_ptr,
                max_tiles, tiles, whole, splits, wbuf, xbuf, xsbuf, wsbuf, full, empty, H, I, K, STAGES,
            )),
        ],
        [WARPS, WARPS],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
