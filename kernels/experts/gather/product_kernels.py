"""A product of weights and tokens, either as the tall operand. Triton programs: importing this needs Triton.

The tensor cores' product has 64 rows, or a multiple, and any multiple of 8 columns. Weights are the tall operand where
an expert has few tokens. From 64 tokens on they can be (TALL): a thread then holds sums of two tokens and needs two of
their scales for each 128 values. As the wide operand, 64 tokens are 16 to each thread, whose scales take more time to
load than the product itself.
"""

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no assembly


@triton.jit
def nothing(BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, TALL: tl.constexpr):
    """Sums of BLOCK_N columns for BLOCK_T tokens before the first product."""
    return tl.zeros((BLOCK_T, BLOCK_N) if TALL else (BLOCK_N, BLOCK_T), tl.float32)


@triton.jit
def added(w, x, total, TALL: tl.constexpr):
    """`total` and the product of weights [BLOCK_N, BLOCK_K] and tokens [BLOCK_T, BLOCK_K]."""
    return tl.dot(x, w.T, total) if TALL else tl.dot(w, x.T, total)


@triton.jit
def along(scale, TALL: tl.constexpr):
    """A value for each token, along the tokens of a product."""
    return scale[:, None] if TALL else scale[None, :]


@triton.jit
def plain(w, x, TALL: tl.constexpr):
    """The product alone."""
    return tl.dot(x, w.T) if TALL else tl.dot(w, x.T)


@triton.jit
def scaled(w, x, scale, TALL: tl.constexpr):
    """The product of 128 values each, times a scale for each token."""
    return plain(w, x, TALL) * along(scale, TALL)


@triton.jit
def added_at_once(product, scale, total, TALL: tl.constexpr):
    """`total` and the scaled product, before any product that is begun after it: else the compiler adds it later, and
    tensor cores wait for the registers."""
    each = tl.broadcast_to(along(scale, TALL), product.shape)
    if COMPILED:
        return tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, each, total], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        return total + product * each


@triton.jit
def scaled_sum(
    w_desc,
    w_row,
    w_scale_ptr,
    x_row,  # pointers to the tokens' values
    x_scale_ptr,
    x_scale_row,  # from there to the tokens' scales, in 32 bits: pointers would take too many registers
    first,  # steps of 128 values
    last,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
):
    """One of GEMM1's two sums, by itself."""
    total = nothing(BLOCK_N, BLOCK_T, TALL)
    k = tl.arange(0, BLOCK_K)
    xs, ws = tl.load(x_scale_ptr + x_scale_row + first), tl.load(w_scale_ptr + first)
    for step in tl.range(first, last):
        ahead = tl.minimum(step + 1, last - 1)
        xs_next, ws_next = tl.load(x_scale_ptr + x_scale_row + ahead), tl.load(w_scale_ptr + ahead)
        x = tl.load(x_row[:, None] + (step * BLOCK_K + k)[None, :])
        total += scaled(w_desc.load([w_row, step * BLOCK_K]), x, xs * ws, TALL)
        xs, ws = xs_next, ws_next
    return total


@triton.jit
def scaled_sums(
    w_desc,
    gate_row,
    up_row,
    gate_scale_ptr,
    up_scale_ptr,
    x_row,
    x_scale_ptr,
    x_scale_row,
    first,
    last,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    LATE: tl.constexpr,
):
    """Both of them together. With LATE a product of `up` is scaled a step later, once that step's of `gate` is there:
    tensor cores work on it meanwhile, where else they wait until it is scaled."""
    gate, up = nothing(BLOCK_N, BLOCK_T, TALL), nothing(BLOCK_N, BLOCK_T, TALL)
    k = tl.arange(0, BLOCK_K)
    xs = tl.load(x_scale_ptr + x_scale_row + first)
    gs, us = tl.load(gate_scale_ptr + first), tl.load(up_scale_ptr + first)
    late, late_scale = nothing(BLOCK_N, BLOCK_T, TALL), xs * 0
    for step in tl.range(first, last):
        ahead = tl.minimum(step + 1, last - 1)
        xs_next, gs_next, us_next = (
            tl.load(x_scale_ptr + x_scale_row + ahead),
            tl.load(gate_scale_ptr + ahead),
            tl.load(up_scale_ptr + ahead),
        )
        x = tl.load(x_row[:, None] + (step * BLOCK_K + k)[None, :])
        if LATE:
            product = plain(w_desc.load([gate_row, step * BLOCK_K]), x, TALL)
            up = added_at_once(late, late_scale, up, TALL)
            late = plain(w_desc.load([up_row, step * BLOCK_K]), x, TALL)
            late_scale = xs * us
            gate += product * along(xs * gs, TALL)
        else:
            gate += scaled(w_desc.load([gate_row, step * BLOCK_K]), x, xs * gs, TALL)
            up += scaled(w_desc.load([up_row, step * BLOCK_K]), x, xs * us, TALL)
        xs, gs, us = xs_next, gs_next, us_next
    if LATE:
        up += late * along(late_scale, TALL)
    return gate, up
