"""The re-quantised intermediate of an expert, and how it moves if the sums that it is made of lose bits.

Re-quantising is a step function: a value that is off by a little stays, or lands on the next step. `Intermediate` says
how far each element may land at the farthest, and what the square of its move is expected to be.

`farthest` takes gate and up off by `lost` times the size of their sums, each way, and the ends between which the
block's scale then lies. `moved` takes them off by a normal error with a standard deviation of `usual` times the size,
and leaves open where between two steps the value lies: if it is off by delta and steps are q apart, it crosses one with
chance |delta| / q and then moves by q, so that its square is expected to be

    q * sqrt(2 / pi) * sigma + sigma_own**2

sigma_own is of d silu(gate) / d gate * up * sigma_gate and of silu(gate) * sigma_up, and sigma of it and of what the
block's scale adds, which is off by as large a share as the element that sets it. Independent normal errors add by their
squares. If gate and up are rounded to bf16 first, they are off rarely and by whole steps, as far on average, but hardly
ever at once: then sizes add.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.experts.formats import Arithmetic
from epcross.kernels.experts.quantise import E4M3_MAX
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_MEAN_SIZE = math.sqrt(2 / math.pi)  # of a normal error, in standard deviations
_E4M3_BITS, _E4M3_LEAST = 3, 2.0**-6  # of the fraction; the least number with all of them
_BF16_BITS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate:
    """Of n rows, all float64 [n, intermediate]."""

    value: "torch.Tensor"
    farthest: "torch.Tensor"  # how far it may be from `value`
    moved: "torch.Tensor"  # expected square of how far it is
    step: "torch.Tensor"  # of the format, where it lies


def intermediate(
    gate_up: "torch.Tensor", size: "torch.Tensor", weight: "torch.Tensor | float", arithmetic: Arithmetic, *,
    lost: float, usual: float,
) -> Intermediate:  # fmt: skip
    """Of exact sums.

    Args:
        gate_up: float64 [n, 2 * intermediate].
        size: likewise, of what was added.
        weight: what the intermediate is multiplied by before it is quantised.
        arithmetic: where it is rounded, and to what.
        lost: share of the size that a sum may be off by.
        usual: one standard deviation of what it is off by.
    """
    import torch

    gate, up = gate_up.chunk(2, 1)
    by_gate, by_up = size.chunk(2, 1)
    middle = _activated(gate, up, weight, arithmetic)
    value = requantised(middle, arithmetic)
    low, high = middle, middle
    for gate_sign in (-lost, lost):
        for up_sign in (-lost, lost):
            corner = _activated(gate + gate_sign * by_gate, up + up_sign * by_up, weight, arithmetic)
            low, high = torch.minimum(low, corner), torch.maximum(high, corner)
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    add = torch.add if arithmetic.gate_up_rounded else torch.hypot
    own = add((slope * up * by_gate).abs(), (sigmoid * gate * by_up).abs()) * (usual * weight)
    if arithmetic.intermediate is RowFormat.BF16:
        ends = [requantised(end, arithmetic) for end in (low, high)]
        step, sigma = _step(middle, _BF16_BITS), own
    else:
        low, high, parts, noise = (_blocks(each, arithmetic) for each in (low, high, middle, own))
        most = torch.maximum(low.abs(), high.abs())
        least = torch.where(low * high > 0, torch.minimum(low.abs(), high.abs()), 0.0)
        scales = [_scales(each.amax(-1, keepdim=True), arithmetic) for each in (least, most)]
        ends = [_coded(end, scale).flatten(1) for end in (low, high) for scale in scales]
        largest, place = parts.abs().max(-1, keepdim=True)
        scale = _scales(largest, arithmetic)
        step = (_step((parts / scale).abs().clamp(min=_E4M3_LEAST), _E4M3_BITS) * scale).flatten(1)
        by_scale = noise.gather(-1, place) * (parts / largest.clamp(min=torch.finfo(largest.dtype).tiny)).abs()
        sigma = own if arithmetic.power_of_two_scales else add(noise, by_scale).flatten(1)
    farthest = torch.zeros_like(value)
    for end in ends:
        farthest = torch.maximum(farthest, (end - value).abs())
    moved = _MEAN_SIZE * step * sigma + own.square()
    return Intermediate(value=value, farthest=farthest, moved=moved, step=step)


def plain_intermediate(
    gate_up: "torch.Tensor", weight: "torch.Tensor | float", arithmetic: Arithmetic
) -> "torch.Tensor":
    """float64 [n, intermediate] of sums [n, 2 * intermediate] as they are."""
    gate, up = gate_up.double().chunk(2, 1)
    return requantised(_activated(gate, up, weight, arithmetic), arithmetic)


def requantised(values: "torch.Tensor", arithmetic: Arithmetic) -> "torch.Tensor":
    """float64 [n, columns] to the format of the intermediate and back."""
    import torch

    if arithmetic.intermediate is RowFormat.BF16:
        return values.to(torch.bfloat16).double()
    parts = _blocks(values, arithmetic)
    return _coded(parts, _scales(parts.abs().amax(-1, keepdim=True), arithmetic)).flatten(1)


def _activated(
    gate: "torch.Tensor", up: "torch.Tensor", weight: "torch.Tensor | float", arithmetic: Arithmetic
) -> "torch.Tensor":
    import torch

    if arithmetic.gate_up_rounded:
        gate, up = (side.to(torch.bfloat16).double() for side in (gate, up))
    return torch.nn.functional.silu(gate) * up * weight


def _step(values: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Between neighbours of floating-point numbers with `bits` of fraction."""
    import torch

    return torch.ldexp(torch.ones_like(values), torch.frexp(values)[1] - 1 - bits)


def _blocks(values: "torch.Tensor", arithmetic: Arithmetic) -> "torch.Tensor":
    """[n, blocks, values that share a scale]."""
    return values.unflatten(1, (-1, arithmetic.scale_block))


def _scales(largest: "torch.Tensor", arithmetic: Arithmetic) -> "torch.Tensor":
    """float64 scales of blocks by their largest magnitudes."""
    import torch

    largest = largest.float()
    scale = (largest / torch.full_like(largest, E4M3_MAX)).double()
    if arithmetic.power_of_two_scales:
        scale = torch.exp2(torch.log2(scale).ceil())
    return torch.where(largest > 0, scale, 1.0)


def _coded(parts: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """To e4m3 and back."""
    import torch

    return (parts / scale).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).double() * scale
