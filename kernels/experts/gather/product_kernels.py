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
def tokens_at(x, x_row, column, BLOCK_K: tl.constexpr, BULK: tl.constexpr):
    """A step's values of the tokens: by a bulk copy from row `x_row` of a descriptor, or each token's from where `x`
    points."""
    if BULK:
        return x.load([x_row, column])
    else:
        return tl.load(x[:, None] + (column + tl.arange(0, BLOCK_K))[None, :])


@triton.jit
def scaled_sum(
    w_desc,
    w_row,
    w_scale_ptr,
    x,  # the tokens' values, see `tokens_at`
    x_row,
    x_scale_ptr,
    x_scale_row,  # from there to the tokens' scales, in 32 bits: pointers would take too many registers
    x_scale_step,  # from a step's scales to the next one's
    first,  # steps of 128 values
    last,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    BULK: tl.constexpr,
):
    """One sum by itself."""
    total = nothing(BLOCK_N, BLOCK_T, TALL)
    xs, ws = tl.load(x_scale_ptr + x_scale_row + first * x_scale_step), tl.load(w_scale_ptr + first)
    for step in tl.range(first, last):
        ahead = tl.minimum(step + 1, last - 1)
        xs_next, ws_next = tl.load(x_scale_ptr + x_scale_row + ahead * x_scale_step), tl.load(w_scale_ptr + ahead)
        values = tokens_at(x, x_row, step * BLOCK_K, BLOCK_K, BULK)
        total += scaled(w_desc.load([w_row, step * BLOCK_K]), values, xs * ws, TALL)
        xs, ws = xs_next, ws_next
    return total


@triton.jit
def scaled_sums(
    w_desc,
    one_row,
    two_row,
    one_scale_ptr,
    two_scale_ptr,
    x,
    x_row,
    x_scale_ptr,
    x_scale_row,
    x_scale_step,
    first,
    last,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    BULK: tl.constexpr,
    LATE: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Two sums of the same tokens together: gate and up, or neighbouring columns of GEMM2. With LATE a product of the
    second is scaled a step later, once that step's of the first is there: tensor cores work on it meanwhile, where else
    they wait until it is scaled. With ALONE a product is scaled before the next begins: there are registers of one,
    where the compiler would begin the second while it still scales the first."""
    one, two = nothing(BLOCK_N, BLOCK_T, TALL), nothing(BLOCK_N, BLOCK_T, TALL)
    xs = tl.load(x_scale_ptr + x_scale_row + first * x_scale_step)
    s1, s2 = tl.load(one_scale_ptr + first), tl.load(two_scale_ptr + first)
    late, late_scale = nothing(BLOCK_N, BLOCK_T, TALL), xs * 0
    for step in tl.range(first, last):
        ahead = tl.minimum(step + 1, last - 1)
        xs_next, s1_next, s2_next = (
            tl.load(x_scale_ptr + x_scale_row + ahead * x_scale_step),
            tl.load(one_scale_ptr + ahead),
            tl.load(two_scale_ptr + ahead),
        )
        values = tokens_at(x, x_row, step * BLOCK_K, BLOCK_K, BULK)
        if LATE:
            product = plain(w_desc.load([one_row, step * BLOCK_K]), values, TALL)
            two = added_at_once(late, late_scale, two, TALL)
            late = plain(w_desc.load([two_row, step * BLOCK_K]), values, TALL)
            late_scale = xs * s2
            one += product * along(xs * s1, TALL)
        elif ALONE:
            one = added_at_once(plain(w_desc.load([one_row, step * BLOCK_K]), values, TALL), xs * s1, one, TALL)
            two = added_at_once(plain(w_desc.load([two_row, step * BLOCK_K]), values, TALL), xs * s2, two, TALL)
        else:
            one += scaled(w_desc.load([one_row, step * BLOCK_K]), values, xs * s1, TALL)
            two += scaled(w_desc.load([two_row, step * BLOCK_K]), values, xs * s2, TALL)
        xs, s1, s2 = xs_next, s1_next, s2_next
    if LATE:
        two += late * along(late_scale, TALL)
    return one, two
