"""The kernel of `quantise_rows`. Needs Triton, which torch for CUDA brings."""

import triton
import triton.language as tl


@triton.jit
def quantise_kernel(
    hidden,  # noqa: ANN001
    rows,  # noqa: ANN001
    scales,  # noqa: ANN001
    hidden_stride,  # noqa: ANN001
    rows_stride,  # noqa: ANN001
    scales_stride,  # noqa: ANN001
    blocks: tl.constexpr,
    width: tl.constexpr,
    largest_value: tl.constexpr,
    taken: tl.constexpr,
):  # noqa: ANN201
    """`taken` scale blocks of one row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * taken + tl.arange(0, taken)
    there = block < blocks
    place = block[:, None] * width + tl.arange(0, width)[None, :]
    x = tl.load(hidden + row * hidden_stride + place, mask=there[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.where(largest > 0, tl.div_rn(largest, largest_value + tl.zeros_like(largest)), 1.0)
    scaled = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    scaled = tl.minimum(tl.maximum(scaled, -largest_value), largest_value)
    tl.store(rows + row * rows_stride + place, scaled.to(tl.float8e4nv), mask=there[:, None])
    tl.store(scales + row * scales_stride + block, scale, mask=there)
