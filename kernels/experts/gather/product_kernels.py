"""A product of weights and tokens, either as the tall operand. Triton programs: importing this needs Triton.

The tensor cores' product has 64 rows, or a multiple, and any multiple of 8 columns. Weights are the tall operand where
an expert has few tokens. From 64 tokens on they can be (TALL): a thread then holds sums of two tokens and needs two of
their scales for each 128 values. As the wide operand, 64 tokens are 16 to each thread, whose scales take more time to
load than the product itself.
"""

import triton
import triton.language as tl


@triton.jit
def nothing(BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, TALL: tl.constexpr):
    """Sums of BLOCK_N columns for BLOCK_T tokens before the first product."""
    return tl.zeros((BLOCK_T, BLOCK_N) if TALL else (BLOCK_N, BLOCK_T), tl.float32)


@triton.jit
def added(w, x, total, TALL: tl.constexpr):
    """`total` and the product of weights [BLOCK_N, BLOCK_K] and tokens [BLOCK_T, BLOCK_K]."""
    return tl.dot(x, w.T, total) if TALL else tl.dot(w, x.T, total)


@triton.jit
def scaled(w, x, scale, TALL: tl.constexpr):
    """The product of 128 values each, times a scale for each token."""
    return tl.dot(x, w.T) * scale[:, None] if TALL else tl.dot(w, x.T) * scale[None, :]


@triton.jit
def scaled_sum(
    w_desc,
    w_row,
    w_scale_ptr,
    x_row,  # pointers to the tokens' values
    x_scale_row,  # and to their scales
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
    xs, ws = tl.load(x_scale_row + first), tl.load(w_scale_ptr + first)
    for step in tl.range(first, last):
        ahead = tl.minimum(step + 1, last - 1)
        xs_next, ws_next = tl.load(x_scale_row + ahead), tl.load(w_scale_ptr + ahead)
        x = tl.load(x_row[:, None] + (step * BLOCK_K + k)[None, :])
        total += scaled(w_desc.load([w_row, step * BLOCK_K]), x, xs * ws, TALL)
        xs, ws = xs_next, ws_next
    return total
