"""Hidden states to fp8 rows in one kernel: what a layer does first, inside its window."""

from typing import TYPE_CHECKING

from epcross.kernels.experts.formats import FP8_BLOCK
from epcross.kernels.experts.quantise import quantise_fp8_rows

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS = 16


def quantise_rows(x: "Tensor", rows: "Tensor", scales: "Tensor") -> None:
    """bf16 [T, H] to e4m3 [T, H] and fp32 [T, H / 128], in place of what these hold; last dimensions dense."""
    if not x.is_cuda:
        codes, made = quantise_fp8_rows(x)
        rows.copy_(codes)
        scales.copy_(made)
        return
    from epcross.kernels.experts.gather.index import on
    from epcross.kernels.experts.gather.quantise_kernels import quantise_kernel

    tokens, hidden = x.shape
    if tokens:
        on(quantise_kernel, tokens, -(-hidden // (FP8_BLOCK * _BLOCKS)))(
            x, x.stride(0), rows, rows.stride(0), scales, scales.stride(0), H=hidden, BLOCKS=_BLOCKS,
            POWER_OF_TWO=False,
        )  # fmt: skip
