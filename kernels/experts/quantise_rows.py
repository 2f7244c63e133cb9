"""Hidden states to the rows of a dispatch, in one kernel: what a layer does first, inside its window.

The arithmetic is that of `quantise.quantise_fp8_rows`, bit for bit: division rounded to nearest, ties to even.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from epcross.kernels.experts.formats import FP8_BLOCK
from epcross.kernels.experts.quantise import E4M3_MAX, quantise_fp8_rows

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS_PER_PROGRAM = 8
"""Scale blocks of one program: a row of 7168 values is seven programs, so that one token already keeps several SMs."""


def quantise_rows(hidden: "Tensor", rows: "Tensor", scales: "Tensor") -> None:
    """fp8 rows and scales of `hidden`, enqueued on the current stream; by torch operations where there is no Triton.

    Args:
        hidden: bf16 [T, H], H a multiple of 128, last dimension dense.
        rows: uint8 [T, at least H], last dimension dense; what lies beyond H is left alone.
        scales: uint8 [T, at least 4 * H / 128], likewise.

    Raises:
        ValueError: a shape or type is another.
    """
    import torch

    tokens, width = hidden.shape
    blocks = width // FP8_BLOCK
    given = hidden.dtype, rows.dtype, scales.dtype
    if given != (torch.bfloat16, torch.uint8, torch.uint8) or width % FP8_BLOCK:
        raise ValueError(f"hidden states must be bf16 and a multiple of {FP8_BLOCK}, not {tuple(hidden.shape)} {given}")
    if rows.shape[1] < width or scales.shape[1] < 4 * blocks or not len(rows) == len(scales) == tokens:
        raise ValueError(f"rows {tuple(rows.shape)} or scales {tuple(scales.shape)} have no room for {(tokens, width)}")
    if not tokens:
        return
    values, factors = rows[:, :width], scales[:, : 4 * blocks]
    if hidden.is_cuda and (kernel := _kernel()) is not None:
        values, factors = values.view(torch.float8_e4m3fn), factors.view(torch.float32)
        kernel[(tokens, -(-blocks // BLOCKS_PER_PROGRAM))](
            hidden, values, factors, hidden.stride(0), values.stride(0), factors.stride(0),
            blocks=blocks, width=FP8_BLOCK, largest_value=E4M3_MAX, taken=BLOCKS_PER_PROGRAM,
        )  # fmt: skip
        return
    quantised, found = quantise_fp8_rows(hidden)
    values.copy_(quantised.view(torch.uint8))
    factors.copy_(found.view(torch.uint8))


@cache
def _kernel() -> Any:
    """The Triton kernel; None where Triton is absent."""
    try:
        from epcross.kernels.experts.quantise_triton import quantise_kernel
    except ImportError:
        return None
    return quantise_kernel
