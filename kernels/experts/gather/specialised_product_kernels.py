"""Two sums of 64 pairs by 128 columns at once, by four warps that only multiply. Gluon programs: needs Triton.

Of a program's twelve warps four copy and twice four, a group each, multiply, each for half of the tile's pairs
(`specialised_kernels.py`). What a group is given stands in the stages of shared memory: `full` of a stage says that its
copies have come, `empty` that both groups have read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HALF, BLOCK, WARPS = gl.constexpr(64), gl.constexpr(128), gl.constexpr(4)
"""Pairs of a group; pairs of a tile, columns of a block and values of a step; warps of a group, and of those that
copy."""
REGISTERS, COPY_REGISTERS = gl.constexpr(224), gl.constexpr(56)  # of a thread: together those of a multiprocessor


@gluon.jit
def stages_of(STAGES: gl.constexpr):
    """Shared memory of the stages, and their barriers: two blocks of weights, a tile's values, its scales, a scale of
    each block, `full`, `empty`."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK, BLOCK], swizzled)
    xbuf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], swizzled)
    xsbuf = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], flat)
    wsbuf = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + WARPS * 32)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()  # bulk copies arrive at these barriers by another way than they were written
    return wbuf, xbuf, xsbuf, wsbuf, full, empty


@gluon.jit
def scaled_into(total, product, scale):
    """`total` and the scaled product, before any product that is begun after it: there are no registers for two."""
    scale, product = gl.broadcast(gl.expand_dims(scale, 1), product)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, scale, total], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def product_of(x, w, zero):
    """Of 64 rows of x and the 128 of a block of weights, over 128 values."""
    made = warpgroup_mma(x, w.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[made])


@gluon.jit
def two_products(
    one, two, zero, round_of_stages, first_round, last_round, wbuf, xbuf, xsbuf, wsbuf, full, empty,
    GROUP: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Both sums of a group over some rounds, of all stages each. While it scales a product, the tensor cores work for
    the other group.

    Scales come through the stages, too: a thread that loads them by itself waits for them, or its fence does.
    """
    along: gl.constexpr = gl.SliceLayout(1, SUMS)
    stage = 0
    for _ in range(first_round * STAGES, last_round * STAGES):
        mbarrier.wait(full.index(stage), round_of_stages & 1)
        if FENCE:
            fence_async_shared()  # rows were written by threads; tensor cores read by another way
        x = xbuf.index(stage).slice(GROUP * HALF, HALF)
        xs = xsbuf.index(stage).slice(GROUP * HALF, HALF).load(along)
        s1, xs = gl.broadcast(wsbuf.index(2 * stage).load(along), xs)
        s2, xs = gl.broadcast(wsbuf.index(2 * stage + 1).load(along), xs)
        one = scaled_into(one, product_of(x, wbuf.index(2 * stage), zero), xs * s1)
        product = product_of(x, wbuf.index(2 * stage + 1), zero)
        mbarrier.arrive(empty.index(stage))
        two = scaled_into(two, product, xs * s2)
        stage += 1
        if stage == STAGES:
            stage = 0
            round_of_stages += 1
    return one, two


@gluon.jit
def pass_by(round_of_stages, rounds, full, empty, STAGES: gl.constexpr):
    """As `two_products`, of a half of a tile without a pair."""
    stage = 0
    for _ in range(rounds * STAGES):
        mbarrier.wait(full.index(stage), round_of_stages & 1)
        mbarrier.arrive(empty.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            round_of_stages += 1
