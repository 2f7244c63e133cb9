"""GEMM2 for tiles of 128 pairs and 256 columns, in warps that each do one thing. Gluon programs: needs Triton.

As `specialised_kernels.py`; all operands come by bulk copies, and the first weights while GEMM1 ends. What pairs add to
rows that have others here leaves by bulk copies, too.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from epcross.kernels.experts.gather.gemm_kernels import place_of
from epcross.kernels.experts.gather.index_kernel import TILES
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
def _copy_down(
    w_desc, w_scale_ptr, h_desc, h_scale_ptr, tile_ptr, max_tiles, tiles, wbuf, hbuf, hsbuf, wsbuf, full, empty,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,  # noqa: E741
):  # fmt: skip
    each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    e, one = gl.arange(0, BLOCK, layout=each), gl.zeros((1,), gl.int32, each)
    columns_of_tile: gl.constexpr = H // (2 * BLOCK)
    steps: gl.constexpr = I // BLOCK
    if PDL:  # the first weights, while GEMM1 ends: what made the tiles has ended; they are read past the L1
        block = gl.program_id(0)
        if block < tiles * columns_of_tile:
            _, column, expert, _, _ = place_of(block, tiles, tile_ptr, max_tiles, columns_of_tile, BLOCK, ".cg")
            w_row = expert * H + column * (2 * BLOCK)
            for stage in gl.static_range(STAGES):
                mbarrier.expect(full.index(stage), 3 * BLOCK * BLOCK)
                k = stage * BLOCK
                tma.async_copy_global_to_shared(w_desc, [w_row, k], full.index(stage), wbuf.index(2 * stage))
                tma.async_copy_global_to_shared(
                    w_desc, [w_row + BLOCK, k], full.index(stage), wbuf.index(2 * stage + 1)
                )
        tl.extra.cuda.gdc_wait()
    passed = 0
    for block in range(gl.program_id(0), tiles * columns_of_tile, gl.num_programs(0)):
        tile, column, expert, _, _ = place_of(block, tiles, tile_ptr, max_tiles, columns_of_tile, BLOCK)
        w_row = expert * H + column * (2 * BLOCK)
        hs_ptr = h_scale_ptr + tile * BLOCK + e
        s1_ptr = w_scale_ptr + (expert * (H // BLOCK) + column * 2) * steps + one
        for number in range(steps // STAGES):
            for stage in gl.static_range(STAGES):
                step = number * STAGES + stage
                k = step * BLOCK
                if not PDL or passed > 0:
                    mbarrier.wait(empty.index(stage), (passed & 1) ^ 1)
                    mbarrier.expect(full.index(stage), 3 * BLOCK * BLOCK)
                    tma.async_copy_global_to_shared(w_desc, [w_row, k], full.index(stage), wbuf.index(2 * stage))
                    tma.async_copy_global_to_shared(
                        w_desc, [w_row + BLOCK, k], full.index(stage), wbuf.index(2 * stage + 1)
                    )
                tma.async_copy_global_to_shared(h_desc, [tile * BLOCK, k], full.index(stage), hbuf.index(stage))
                async_copy.async_copy_global_to_shared(hsbuf.index(stage), hs_ptr + step * (max_tiles * BLOCK))
                async_copy.async_copy_global_to_shared(wsbuf.index(2 * stage), s1_ptr + step)
                async_copy.async_copy_global_to_shared(wsbuf.index(2 * stage + 1), s1_ptr + (steps + step))
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            passed += 1


@gluon.jit
def _put(y, weight, out_row, part_desc, part_row, column, n, alone, any_alone, any_shared, put):
    """Columns of the output: a row's only pair goes to where `out_row` points, another to its place among the parts,
    where whatever lies at the places of other pairs is read by nobody."""
    wide, y = gl.broadcast(gl.expand_dims(weight, 1), y)
    y = (y * wide).to(gl.bfloat16)
    if any_alone:
        gl.store(out_row[:, None] + (column + n)[None, :], y, mask=alone[:, None])
    if any_shared:
        tma.store_wait(0)  # what was put there before has left
        put.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(part_desc, [part_row, column], put)


@gluon.jit
def _multiply_down(
    GROUP: gl.constexpr, weight_ptr, weight_stride, index_ptr, num_rows, tile_ptr, max_tiles, tiles, out_ptr,
    out_stride, part_desc, put, wbuf, hbuf, hsbuf, wsbuf, full, empty,
    H: gl.constexpr, I: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,  # noqa: E741
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    t = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums))
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, sums))
    columns_of_tile: gl.constexpr = H // (2 * BLOCK)
    rounds: gl.constexpr = I // BLOCK // STAGES
    zero = gl.zeros((HALF, BLOCK), gl.float32, sums)
    passed = 0
    for block in range(gl.program_id(0), tiles * columns_of_tile, gl.num_programs(0)):
        tile, column, expert, rows, first = place_of(block, tiles, tile_ptr, max_tiles, columns_of_tile, BLOCK)
        if first + GROUP * HALF < rows:
            one, two = two_products(
                zero, zero, zero, passed, 0, rounds, wbuf, hbuf, hsbuf, wsbuf, full, empty, GROUP, STAGES, sums,
                FENCE=False,
            )  # fmt: skip
            own = first + t < rows
            pair = gl.load(index_ptr + expert.to(gl.int64) * num_rows + gl.minimum(first + t, rows - 1))
            row = ((pair >> 1) // K).to(gl.int64)
            weight = gl.load(weight_ptr + row * weight_stride + (pair >> 1) % K)
            out_row, part_row = out_ptr + row * out_stride, tile * BLOCK + GROUP * HALF
            alone, shared = own & ((pair & 1) == 0), own & ((pair & 1) == 1)
            any_alone, any_shared = gl.max(alone.to(gl.int32), 0) > 0, gl.max(shared.to(gl.int32), 0) > 0
            at = column * (2 * BLOCK)
            _put(one, weight, out_row, part_desc, part_row, at, n, alone, any_alone, any_shared, put)
            _put(two, weight, out_row, part_desc, part_row, at + BLOCK, n, alone, any_alone, any_shared, put)
        else:
            pass_by(passed, rounds, full, empty, STAGES)
        passed += rounds
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "max_tiles"])
def down_specialised_kernel(
    w_desc,  # as `down_kernel`'s
    w_scale_ptr,
    h_desc,
    h_scale_ptr,
    weight_ptr,
    weight_delta,
    weight_stride,
    epoch_ptr,
    index_ptr,
    num_rows,
    schedule_ptr,
    tile_ptr,
    max_tiles,
    out_ptr,
    out_stride,
    part_desc,  # out bf16 [max_tiles * BLOCK, H], blocks of [HALF, BLOCK]: of pairs whose row has others here
    H: gl.constexpr,
    I: gl.constexpr,  # noqa: E741
    K: gl.constexpr,
    STAGES: gl.constexpr,
    TWO_SETS: gl.constexpr,
    PDL: gl.constexpr,
):
    wbuf, hbuf, hsbuf, wsbuf, full, empty = stages_of(STAGES)
    plain: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    put = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BLOCK], plain)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if TWO_SETS:
        weight_ptr += (gl.load(epoch_ptr, cache_modifier=".cg") & 1) * weight_delta
    tiles = gl.load(schedule_ptr + TILES, cache_modifier=".cg")
    gl.warp_specialize(
        [
            (_multiply_down, (
                0, weight_ptr, weight_stride, index_ptr, num_rows, tile_ptr, max_tiles, tiles, out_ptr, out_stride,
                part_desc, put.index(0), wbuf, hbuf, hsbuf, wsbuf, full, empty, H, I, K, STAGES, PDL,
            )),
            (_multiply_down, (
                1, weight_ptr, weight_stride, index_ptr, num_rows, tile_ptr, max_tiles, tiles, out_ptr, out_stride,
                part_desc, put.index(1), wbuf, hbuf, hsbuf, wsbuf, full, empty, H, I, K, STAGES, PDL,
            )),
            (_copy_down, (
                w_desc, w_scale_ptr, h_desc, h_scale_ptr, tile_ptr, max_tiles, tiles, wbuf, hbuf, hsbuf, wsbuf, full,
                empty, H, I, STAGES, PDL,
            )),
        ],
        [WARPS, WARPS],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
