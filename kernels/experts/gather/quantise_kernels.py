"""fp8 with a scale per 128, on the device. Triton programs: importing this needs Triton.

The same numbers as `quantise.quantise_fp8_rows`: quotients are correctly rounded, not approximated.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
SCALE_BLOCK = tl.constexpr(128)


@triton.jit
def to_fp8(values, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """e4m3 [ROWS, 128] and fp32 scales [ROWS] of fp32 [ROWS, 128]."""
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > 0, tl.math.div_rn(largest, E4M3_MAX), 1.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)  # up to the next one
    codes = tl.math.div_rn(values, tl.broadcast_to(scale[:, None], (ROWS, 128)))
    return tl.clamp(codes, -E4M3_MAX, E4M3_MAX).to(tl.float8e4nv), scale


@triton.jit
def quantise_kernel(
    x_ptr,  # bf16 [T, H]
    x_stride,
    rows_ptr,  # out e4m3 [T, H]
    rows_stride,
    scales_ptr,  # out fp32 [T, H / 128]
    scales_stride,
    H: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 128 values, for each program
    POWER_OF_TWO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * SCALE_BLOCK + tl.arange(0, 128)[None, :]
    values = tl.load(x_ptr + row * x_stride + column, mask=column < H, other=0.0).to(tl.float32)
    codes, scale = to_fp8(values, BLOCKS, POWER_OF_TWO)
    tl.store(rows_ptr + row * rows_stride + column, codes, mask=column < H)
    tl.store(scales_ptr + row * scales_stride + block, scale, mask=block < H // SCALE_BLOCK)
