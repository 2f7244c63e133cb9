"""fp8 products as Hopper's tensor cores add them, emulated: 32 at a time, cut off `bits` below the largest of them.

How many bits is not documented. DeepSeek-V3's report (section 3.3.2) says about 14 with the leading one, which is 13
here. Numbers are cut off towards zero. A kernel adds every 128 values, times their scales, in fp32.
"""

import torch

from epcross.kernels.experts.formats import Arithmetic, ExpertShape
from epcross.kernels.experts.quantise import E4M3_MAX
from epcross.kernels.experts.rows import RankMajorRows
from epcross.kernels.experts.weights import WeightCopy
from epcross.kernels.formats import RowFormat

_FP8 = Arithmetic(intermediate=RowFormat.FP8)
_AT_ONCE = 1 << 24  # products


def added(x: torch.Tensor, w: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [T, N] of codes [T, K] and [N, K]."""
    total = torch.zeros(len(x), len(w))
    for step in range(0, x.shape[1], 32):
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
    """fp32 [T, N] of e4m3 [T, K] with scales [T, K / 128], or more, and e4m3 [N, K] with scales [N / 128, K / 128]."""
    spread, width = w_scales.repeat_interleave(128, 0), x.shape[1] // x_scales.shape[1]
    rows = max(1, _AT_ONCE // (32 * len(w)))
    parts = []
    for first in range(0, len(x), rows):
        part, scales = x[first : first + rows].float(), x_scales[first : first + rows]
        total = torch.zeros(len(part), len(w))
        for block in range(x_scales.shape[1]):
            columns = slice(width * block, width * block + width)
            sums = added(part[:, columns], w[:, columns].float(), bits)
            total += sums * (scales[:, block, None] * spread[None, :, width * block // 128])
        parts.append(total)
    return torch.cat(parts)


def recast(values: torch.Tensor, scale_block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [T, K] of fp32, and fp32 scales [T, K / scale_block]: as kernels do with the intermediate."""
    parts = values.unflatten(1, (-1, scale_block))
    scales = parts.abs().amax(-1) / torch.tensor(E4M3_MAX)
    codes = (parts / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.flatten(1).to(torch.float8_e4m3fn), scales


def layer(
    shape: ExpertShape, copy: WeightCopy, rows: RankMajorRows, bits: int, arithmetic: Arithmetic = _FP8
) -> torch.Tensor:
    """bf16 [N, hidden]: what a rank's experts make of fp8 rows on such tensor cores; rows without a header."""
    one = rows.sets[0]
    x, scales = one.rows.view(torch.float8_e4m3fn), one.scales.contiguous().view(torch.float32)
    total = torch.zeros(len(x), shape.hidden)
    assert copy.gate_up_scales is not None
    assert copy.down_scales is not None
    for expert in range(shape.num_local_experts):
        row, selection = (one.ids == shape.first_slot + expert).nonzero(as_tuple=True)
        sums = product(x[row], scales[row], copy.gate_up[expert], copy.gate_up_scales[expert], bits)
        if arithmetic.gate_up_rounded:
            sums = sums.to(torch.bfloat16).float()
        gate, up = sums.chunk(2, 1)
        weight = one.weights[row, selection, None]
        inner, outer = (weight, 1.0) if arithmetic.weight_first else (1.0, weight)
        h, h_scales = recast(torch.nn.functional.silu(gate) * up * inner, arithmetic.scale_block)
        made = product(h, h_scales, copy.down[expert], copy.down_scales[expert], bits)
        if arithmetic.output_rounded:
            made = made.to(torch.bfloat16).float()
        total.index_add_(0, row, made * outer)
    return total.to(torch.bfloat16)
