"""fp8 products as Hopper's tensor cores add them, emulated: 32 at a time, cut off `bits` below the largest of them.

How many bits is not documented. DeepSeek-V3's report (section 3.3.2) says about 14 with the leading one, which is 13
here. Numbers are cut off towards zero. A kernel adds every 128 values, times their scales, in fp32.
"""

import torch

from epcross.kernels.experts.formats import ExpertShape
from epcross.kernels.experts.quantise import quantise_fp8_rows
from epcross.kernels.experts.rows import RankMajorRows
from epcross.kernels.experts.weights import WeightCopy

_AT_ONCE = 1 << 24  # products


def added(x: torch.Tensor, w: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [T, N] of codes [T, 128] and [N, 128]."""
    total = torch.zeros(len(x), len(w))
    for step in range(0, 128, 32):
        products = x[:, None, step : step + 32] * w[None, :, step : step + 32]
        largest = torch.maximum(products.abs().amax(-1), total.abs())
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1 - bits)
        whole = torch.trunc(products / unit[..., None]).sum(-1) + torch.trunc(total / unit)
        fraction, exponent = torch.frexp(whole * unit)  # the sum keeps as many bits
        total = torch.ldexp(torch.trunc(fraction * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)
    return total


def product(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bits: int
) -> torch.Tensor:
    """fp32 [T, N] of e4m3 [T, K] with scales [T, K / 128] and e4m3 [N, K] with scales [N / 128, K / 128]."""
    spread = w_scales.repeat_interleave(128, 0)
    rows = max(1, _AT_ONCE // (32 * len(w)))
    parts = []
    for first in range(0, len(x), rows):
        part, scales = x[first : first + rows].float(), x_scales[first : first + rows]
        total = torch.zeros(len(part), len(w))
        for block in range(x.shape[1] // 128):
            columns = slice(128 * block, 128 * block + 128)
            sums = added(part[:, columns], w[:, columns].float(), bits)
            total += sums * (scales[:, block, None] * spread[None, :, block])
        parts.append(total)
    return torch.cat(parts)


def layer(shape: ExpertShape, copy: WeightCopy, rows: RankMajorRows, bits: int) -> torch.Tensor:
    """bf16 [N, hidden]: what a rank's experts make of fp8 rows on such tensor cores; rows without a header."""
    one = rows.sets[0]
    x, scales = one.rows.view(torch.float8_e4m3fn), one.scales.contiguous().view(torch.float32)
    total = torch.zeros(len(x), shape.hidden)
    assert copy.gate_up_scales is not None
    assert copy.down_scales is not None
    for expert in range(shape.num_local_experts):
        row, selection = (one.ids == shape.first_slot + expert).nonzero(as_tuple=True)
        sums = product(x[row], scales[row], copy.gate_up[expert], copy.gate_up_scales[expert], bits)
        gate, up = sums.chunk(2, 1)
        h, h_scales = quantise_fp8_rows(torch.nn.functional.silu(gate) * up)
        made = product(h, h_scales, copy.down[expert], copy.down_scales[expert], bits)
        total.index_add_(0, row, made * one.weights[row, selection, None])
    return total.to(torch.bfloat16)
