"""The tapes that rows, scale rows and partials are windows of: long, fixed, seeded runs of values of one kind."""

from enum import StrEnum
from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from epcross.harness.backends.base import Bytes
from epcross.harness.workload import counter
from epcross.kernels.formats import RowFormat

STEP_BYTES = 16
"""Windows start at multiples of this: the alignment of every value and scale."""


class Payload(StrEnum):
    """What rows, scales and weights hold; see `workload`."""

    EXACT = "exact"
    RANDOM = "random"
    ADVERSARIAL = "adversarial"


class TapeKind(StrEnum):
    """What the windows are."""

    ROWS = "rows"
    SCALES = "scales"
    PARTIALS = "partials"  # of ADVERSARIAL; bf16 whatever the format


_KEY = 201
_EXACT_VALUES = np.array([1, 2, 4, -1, -2, -4, 1, -2], np.float32)
_EXACT_SCALES = np.array([0.5, 1, 2, 1, 0.5, 1, 2, 1], np.float32)
_HOSTILE_WORDS = np.array(
    [
        0xFFFFFFFF,  # all ones: two bf16 NaNs, eight fp4 values, an id of -1, a likely sentinel
        0xFFFFFFFE,
        0x7FC07FC0,  # quiet bf16 NaNs
        0x7F817F81,  # signalling bf16 NaNs
        0x7F7F7F7F,  # e4m3 NaNs
        0x80000000,
        0x00000000,
        0xFFC00000,
    ],
    np.uint32,
)
_HOSTILE_PARTIALS = np.array([0xFFFF, 0x7FC0, 0x7F81, 0xFF81, 0x3F80, 0xC000, 0x4080, 0xBF80], np.uint16)


def windows(payload: Payload, row_format: RowFormat, kind: TapeKind, width_bytes: int, place_bits: int) -> Bytes:
    """Every window of a tape, [2**place_bits, width_bytes], read-only: window i starts at byte i * STEP_BYTES.

    The windows overlap in memory; indexing with an array of places copies out whole rows at the speed of memory.
    """
    whole = tape(payload, row_format, kind, width_bytes, place_bits)
    return sliding_window_view(whole, width_bytes)[::STEP_BYTES][: 1 << place_bits]


@lru_cache(maxsize=12)
def tape(payload: Payload, row_format: RowFormat, kind: TapeKind, width_bytes: int, place_bits: int) -> Bytes:
    """The bytes that `windows` shows; shared, not to be written."""
    length = -(-((STEP_BYTES << place_bits) + width_bytes) // 64) * 64
    stream = counter.key(_KEY, *map(_number, (payload, row_format, kind)))
    if kind is TapeKind.PARTIALS:
        made = _partials(stream, length)
    elif payload is Payload.ADVERSARIAL:
        made = _hostile(stream, length)
    elif payload is Payload.EXACT:
        made = _exact(stream, length, row_format, kind)
    else:
        made = _random(stream, length, row_format, kind)
    return made.view(np.uint8)


def _number(word: StrEnum) -> int:
    return int.from_bytes(word.encode(), "little")


def _drawn(stream: int, length: int) -> Bytes:
    return counter.words(stream, 0, -(-length // 8)).astype("<u8").view(np.uint8)


def _exact(stream: int, length: int, row_format: RowFormat, kind: TapeKind) -> NDArray[np.generic]:
    if row_format is RowFormat.NVFP4 and kind is TapeKind.ROWS:
        nibbles = _EXACT_VALUES.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        return nibbles[_drawn(stream, length) & 7] | nibbles[_drawn(stream + 1, length) & 7] << 4
    values = (
        _as(_EXACT_SCALES, _SCALES[row_format]) if kind is TapeKind.SCALES else _as(_EXACT_VALUES, _VALUES[row_format])
    )
    return values[_drawn(stream, length // values.itemsize) & 7]


def _random(stream: int, length: int, row_format: RowFormat, kind: TapeKind) -> NDArray[np.generic]:
    """Random signs (values) and mantissas, exponents of a few octaves around 1."""
    drawn = _drawn(stream, length)
    if kind is TapeKind.SCALES:
        if row_format is RowFormat.FP8:
            words = drawn.view(np.uint32)
            return (124 + (words >> 23 & 3)) << 23 | words & 0x7FFFFF
        if row_format is RowFormat.MXFP8:
            return (124 + (drawn & 3)).astype(np.uint8)
        return ((5 + (drawn >> 3 & 3)) << 3 | drawn & 7).astype(np.uint8)
    if row_format is RowFormat.BF16:
        words = drawn.view(np.uint16)
        return words & 0x8000 | (123 + (words >> 7 & 7)) << 7 | words & 0x7F
    if row_format is RowFormat.NVFP4:
        return drawn
    return (drawn & 0x80 | (4 + (drawn >> 3 & 7)) << 3 | drawn & 7).astype(np.uint8)


def _hostile(stream: int, length: int) -> NDArray[np.generic]:
    """Any bits; a quarter of the 32-bit words are hostile ones, and an eighth of the 64-byte lines all ones."""
    drawn = counter.words(stream, 0, length // 4)
    hostile = _HOSTILE_WORDS[(drawn >> np.uint64(40) & np.uint64(7)).astype(np.int64)]
    words = np.where(drawn >> np.uint64(62) == 0, hostile, drawn.astype(np.uint32)).reshape(-1, 16)
    words[counter.words(stream + 1, 0, len(words)) >> np.uint64(61) == 0] = 0xFFFFFFFF
    return words.reshape(-1)


def _partials(stream: int, length: int) -> NDArray[np.generic]:
    """Of every 64-byte line one in two holds NaN patterns, so that sums without NaN are seen too."""
    drawn = _drawn(stream, length // 2).reshape(-1, 32) & 7
    plain = counter.words(stream + 1, 0, len(drawn)) >> np.uint64(63) == 0
    drawn[plain] |= 4
    return _HOSTILE_PARTIALS[drawn.reshape(-1)]


_VALUES = {
    RowFormat.BF16: np.dtype(ml_dtypes.bfloat16),
    RowFormat.FP8: np.dtype(ml_dtypes.float8_e4m3fn),
    RowFormat.MXFP8: np.dtype(ml_dtypes.float8_e4m3fn),
}
_SCALES = {
    RowFormat.FP8: np.dtype(np.float32),
    RowFormat.MXFP8: np.dtype(ml_dtypes.float8_e8m0fnu),
    RowFormat.NVFP4: np.dtype(ml_dtypes.float8_e4m3fn),
}


def _as(values: NDArray[np.float32], dtype: np.dtype) -> NDArray[np.generic]:
    """The bits of `values` in another type."""
    return values.astype(dtype).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize])
