"""What the bytes of a row mean: encode and decode each `RowFormat`, for experts, checks and the oracle.

Layout, little-endian as on every supported host: value i of a row at its natural place; of two 4-bit values in a byte
the first is in the low bits; scale j covers values [j * block, (j + 1) * block), a last block may be partial. Decoding
is by look-up and one fp32 multiplication by the scale; encoding rounds to nearest, ties to even.

Source: OCP 8-bit Floating Point (OFP8) 1.0 for e4m3, OCP Microscaling Formats (MX) 1.0 for e2m1, e8m0 and mxfp8 scales.
"""

from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from epcross.kernels.formats import RowFormat, RowSize, row_size

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
BF16Bits = NDArray[np.uint16]

SCALE_BLOCK = {RowFormat.FP8: 128, RowFormat.MXFP8: 32, RowFormat.NVFP4: 16}
"""Values that share a scale; a format without scales is absent."""

_E4M3_MAX, _E4M3_EXPONENT_MAX, _E2M1_MAX = 448.0, 8, 6.0
_SCALE_DTYPE = {
    RowFormat.FP8: np.dtype(np.float32),
    RowFormat.MXFP8: np.dtype(ml_dtypes.float8_e8m0fnu),
    RowFormat.NVFP4: np.dtype(ml_dtypes.float8_e4m3fn),
}


def bf16_to_float(bits: BF16Bits) -> Float32:
    """The values of bf16 bits, exactly."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


@np.errstate(invalid="ignore", over="ignore")  # signalling NaNs and overflow to infinity are values like others
def float_to_bf16(values: Float32) -> BF16Bits:
    """bf16 bits of fp32 values, rounded to nearest even; NaN stays NaN."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def decode(row_format: RowFormat, rows: Bytes, scales: Bytes, hidden: int) -> Float32:
    """Values [n, hidden] of rows [n, padded_row_bytes] and scale rows [n, padded_scale_bytes].

    Raises:
        ValueError: `rows` or `scales` are not of the padded size.
    """
    size = row_size(row_format, hidden)
    _check_widths(rows, scales, size)
    rows = np.ascontiguousarray(rows)
    if row_format is RowFormat.BF16:
        return bf16_to_float(rows[:, : size.row_bytes].view(np.uint16))
    pairs = _byte_pairs(row_format)
    values = pairs.take(rows.view(np.uint16)).view(np.float32)[:, :hidden]
    return _scaled(values, decode_scales(row_format, scales, hidden), SCALE_BLOCK[row_format])


def decode_scales(row_format: RowFormat, scales: Bytes, hidden: int) -> Float32:
    """Scales [n, blocks] of scale rows, as fp32; every e8m0 and e4m3 value is one exactly."""
    size = row_size(row_format, hidden)
    used = np.ascontiguousarray(scales[:, : size.scale_bytes])
    return used.view(_SCALE_DTYPE[row_format]).astype(np.float32)


def encode(row_format: RowFormat, values: Float32) -> tuple[Bytes, Bytes]:
    """Rows [n, padded_row_bytes] and scale rows [n, padded_scale_bytes] of finite values [n, hidden].

    A scale maps its block's largest magnitude to the largest value of the format: in fp32 for fp8, in e4m3 for nvfp4
    (no second, per-tensor scale), and for mxfp8 to its power of two as the MX standard says, with saturation. A block
    of zeros has scale 1.
    """
    count, hidden = values.shape
    size = row_size(row_format, hidden)
    rows = np.zeros((count, size.padded_row_bytes), np.uint8)
    scales = np.zeros((count, size.padded_scale_bytes), np.uint8)
    if row_format is RowFormat.BF16:
        rows[:, : size.row_bytes] = float_to_bf16(np.ascontiguousarray(values)).view(np.uint8)
        return rows, scales
    block = SCALE_BLOCK[row_format]
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, hidden, block), axis=1)
    if row_format is RowFormat.FP8:
        scale = largest / np.float32(_E4M3_MAX)
    elif row_format is RowFormat.MXFP8:
        exponent = np.frexp(largest)[1] - 1 - _E4M3_EXPONENT_MAX
        scale = np.ldexp(np.float32(1), np.clip(exponent, -127, 127)).astype(np.float32)
    else:
        scale = np.clip(largest / np.float32(_E2M1_MAX), 2.0**-9, _E4M3_MAX)
    scale = np.where(largest > 0, scale, 1).astype(_SCALE_DTYPE[row_format])
    scales[:, : size.scale_bytes] = scale.view(np.uint8).reshape(count, size.scale_bytes)
    scaled = values / np.repeat(scale.astype(np.float32), block, axis=1)[:, :hidden]
    if row_format is RowFormat.NVFP4:
        nibbles = np.clip(scaled, -_E2M1_MAX, _E2M1_MAX).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        rows[:, : size.row_bytes] = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    else:
        rows[:, : size.row_bytes] = (
            np.clip(scaled, -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        )
    return rows, scales


def _scaled(values: Float32, scales: Float32, block: int) -> Float32:
    """Each value times the scale of its block."""
    count, hidden = values.shape
    if hidden % block:
        return values * np.repeat(scales, block, axis=1)[:, :hidden]
    return (values.reshape(count, -1, block) * scales[:, :, None]).reshape(count, hidden)


@lru_cache(maxsize=2)
def _byte_pairs(row_format: RowFormat) -> NDArray[np.void]:
    """The values of two neighbouring bytes, by those bytes: looking up pairs halves the cost of looking up."""
    byte = np.arange(256, dtype=np.uint8)
    if row_format is RowFormat.NVFP4:
        nibbles = np.stack([byte & 15, byte >> 4], axis=1)
        single = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        single = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    per_byte = single.shape[1]
    table = np.empty((256, 256, 2 * per_byte), np.float32)
    table[:, :, :per_byte] = single[None, :, :]  # the low byte comes first
    table[:, :, per_byte:] = single[:, None, :]
    return table.reshape(-1).view({2: np.uint64, 4: np.complex128}[2 * per_byte])


def _check_widths(rows: Bytes, scales: Bytes, size: RowSize) -> None:
    if rows.shape[1:] != (size.padded_row_bytes,) or scales.shape != (len(rows), size.padded_scale_bytes):
        raise ValueError(
            f"rows {rows.shape} and scales {scales.shape} are not padded rows of {size.padded_row_bytes} and"
            f" {size.padded_scale_bytes} bytes"
        )
