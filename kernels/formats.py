"""Row formats: how many bytes a token's activation takes on its way, and what they mean.

The transport treats a row and its scale row as opaque bytes; only the experts (and the checks) look inside.
"""

from dataclasses import dataclass
from enum import StrEnum

ROW_ALIGN_BYTES = 16
"""Rows and scale rows are padded to this many bytes: one vector store of a GPU thread."""


class RowFormat(StrEnum):
    """How a token's activation travels."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3 values, one fp32 scale per 128
    MXFP8 = "mxfp8"  # e4m3 values, one e8m0 scale per 32 (OCP MX v1.0)
    NVFP4 = "nvfp4"  # e2m1 values, one e4m3 scale per 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """Bytes of one row and its scale row, without and with padding to `ROW_ALIGN_BYTES`."""

    row_bytes: int
    scale_bytes: int
    padded_row_bytes: int
    padded_scale_bytes: int

    @property
    def padded_bytes(self) -> int:
        """What one token occupies in a landing buffer, row and scale row together."""
        return self.padded_row_bytes + self.padded_scale_bytes


_VALUE_BITS = {RowFormat.BF16: 16, RowFormat.FP8: 8, RowFormat.MXFP8: 8, RowFormat.NVFP4: 4}
_SCALE_BLOCK = {RowFormat.BF16: 0, RowFormat.FP8: 128, RowFormat.MXFP8: 32, RowFormat.NVFP4: 16}
_SCALE_BYTES = {RowFormat.BF16: 0, RowFormat.FP8: 4, RowFormat.MXFP8: 1, RowFormat.NVFP4: 1}


def padded(size_bytes: int) -> int:
    """`size_bytes` rounded up to a multiple of `ROW_ALIGN_BYTES`."""
    return -(-size_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def row_size(row_format: RowFormat, hidden: int) -> RowSize:
    """Sizes of a row of `hidden` values; a last, partial scale block has a scale of its own.

    Raises:
        ValueError: `hidden` is below 1, or odd for a 4-bit format.
    """
    if hidden < 1 or (hidden * _VALUE_BITS[row_format]) % 8:
        raise ValueError(f"hidden={hidden} cannot be a {row_format} row: it must be positive and fill whole bytes")
    row = hidden * _VALUE_BITS[row_format] // 8
    block = _SCALE_BLOCK[row_format]
    scale = -(-hidden // block) * _SCALE_BYTES[row_format] if block else 0
    return RowSize(row_bytes=row, scale_bytes=scale, padded_row_bytes=padded(row), padded_scale_bytes=padded(scale))
