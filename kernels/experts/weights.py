"""Expert weights, made and quantised once per format: the same values on any machine and for every implementation.

Value v of expert (global slot) s is a pure function of (seed, s, matrix, index): SplitMix64 gives 16 uniform bits, and
a factor that differs from block to block of 128 x 128 spreads the scales, so that a wrong or stale scale shows. Only
integer arithmetic and single correctly rounded fp32 operations are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.experts.formats import FP4_BLOCK, FP8_BLOCK, ExpertShape, WeightFormat
from epcross.kernels.experts.quantise import fp4_values, quantise_fp4, quantise_fp8_blocks

if TYPE_CHECKING:
    import torch

_GAMMA = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_CHUNK_VALUES = 1 << 26  # generated at once; 64-bit words of a quarter of that, and a few temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCopy:
    """One copy of a rank's weights, as quantised. K is the summed dimension: hidden for gate_up, intermediate for down.

    bf16: bf16 [E, rows, K], no scales. fp8: e4m3 [E, rows, K], scales fp32 [E, rows / 128, K / 128].
    fp4: uint8 [E, rows, K / 2], the first of two values in the low bits; scales uint8 (e8m0) [E, rows, K / 32].
    """

    gate_up: "torch.Tensor"  # rows = 2 * intermediate: all of the gate, then all of up
    down: "torch.Tensor"  # rows = hidden
    gate_up_scales: "torch.Tensor | None" = None
    down_scales: "torch.Tensor | None" = None

    def tensors(self) -> "tuple[torch.Tensor, ...]":
        """All that are there."""
        every = (self.gate_up, self.down, self.gate_up_scales, self.down_scales)
        return tuple(t for t in every if t is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of a rank, in copies with the same bits at different addresses."""

    weight_format: WeightFormat
    copies: tuple[WeightCopy, ...]

    def copy(self, number: int) -> WeightCopy:
        """One of the copies, `number` taken modulo how many there are."""
        return self.copies[number % len(self.copies)]


def copies_needed(bytes_read: int, l2_bytes: int) -> int:
    """How many copies to rotate so that none is still in the cache when its turn comes again: a chain that reads
    `bytes_read` of weights a layer passes twice the L2 before it returns to a copy."""
    return max(1, -(-2 * l2_bytes // max(1, bytes_read)))


def make_weights(shape: ExpertShape, *, seed: int, device: "torch.device | str", copies: int = 1) -> ExpertWeights:
    """Generate and quantise the weights of `shape` on `device`.

    Args:
        shape: sizes, first slot and format.
        seed: of the model; ranks pass the same.
        device: where they are made and stay.
        copies: how many, see `copies_needed`.
    """
    gate_up = _matrices(shape, seed, 0, device)
    down = _matrices(shape, seed, 1, device)
    first = WeightCopy(gate_up=gate_up[0], gate_up_scales=gate_up[1], down=down[0], down_scales=down[1])

    def again(tensor: "torch.Tensor | None") -> "torch.Tensor | None":
        return None if tensor is None else tensor.clone()

    rest = [
        WeightCopy(
            gate_up=first.gate_up.clone(),
            down=first.down.clone(),
            gate_up_scales=again(first.gate_up_scales),
            down_scales=again(first.down_scales),
        )
        for _ in range(copies - 1)
    ]
    return ExpertWeights(weight_format=shape.weight_format, copies=(first, *rest))


def decoded(
    weight_format: WeightFormat, values: "torch.Tensor", scales: "torch.Tensor | None", dtype: "torch.dtype"
) -> "torch.Tensor":
    """Quantised matrices [..., rows, K] of any one expert or of several, as `dtype` (exact in fp32 and float64)."""
    import torch

    if weight_format is WeightFormat.BF16 or scales is None:
        return values.to(dtype)
    if weight_format is WeightFormat.FP8:
        spread = scales.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
        rows, columns = values.shape[-2:]
        return values.to(dtype) * spread[..., :rows, :columns].to(dtype)
    power = torch.exp2(scales.to(torch.float64) - 127).to(dtype)
    return fp4_values(values, dtype) * power.repeat_interleave(FP4_BLOCK, -1)


def matrix(
    shape: ExpertShape, seed: int, which: int, slot: int, device: "torch.device | str"
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """gate_up (`which` 0) or down (1) of any slot, quantised, and its scales: what `make_weights` stores."""
    import torch

    sizes = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    rows, columns = sizes[which]
    step = max(FP8_BLOCK, _CHUNK_VALUES // columns // FP8_BLOCK * FP8_BLOCK)
    parts = [
        _quantised(shape, _values(seed, slot, which, first, min(rows, first + step), columns, device))
        for first in range(0, rows, step)
    ]
    values = torch.cat([part for part, _ in parts])
    scales = [scale for _, scale in parts if scale is not None]
    return values, torch.cat(scales) if scales else None


def _matrices(
    shape: ExpertShape, seed: int, which: int, device: "torch.device | str"
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """One of the two matrices of every expert of the rank."""
    import torch

    stored: list[torch.Tensor] = []
    for expert in range(shape.num_local_experts):
        made = [part for part in matrix(shape, seed, which, shape.first_slot + expert, device) if part is not None]
        if not stored:  # all at once, since the largest sets would not fit twice
            stored = [
                torch.empty((shape.num_local_experts, *part.shape), dtype=part.dtype, device=device) for part in made
            ]
        for whole, part in zip(stored, made, strict=True):
            whole[expert] = part
    return stored[0], stored[1] if len(stored) > 1 else None


def _quantised(shape: ExpertShape, made: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor | None]":
    import torch

    if shape.weight_format is WeightFormat.BF16:
        return made.to(torch.bfloat16), None
    if shape.weight_format is WeightFormat.FP8:
        return quantise_fp8_blocks(made, power_of_two=shape.power_of_two_scales)
    return quantise_fp4(made)


def _values(
    seed: int, slot: int, which: int, first: int, last: int, columns: int, device: "torch.device | str"
) -> "torch.Tensor":
    """fp32 [last - first, columns]: rows of a matrix before quantisation, of variance about 1 / columns."""
    import torch

    key = _key(seed, slot, which)
    begin, count = first * columns, (last - first) * columns
    word = torch.arange(begin // 4, -(-(begin + count) // 4), dtype=torch.int64, device=device)
    bits = _mixed(word * _GAMMA + key)
    halves = torch.stack([_shifted(bits, 16 * lane) & 0xFFFF for lane in range(4)], -1).reshape(-1)
    uniform = (halves[begin % 4 : begin % 4 + count].to(torch.float32) - 32767.5) * (1 / 32768)
    uniform = uniform.reshape(last - first, columns)
    block_row = torch.arange(first, last, dtype=torch.int64, device=device) // FP8_BLOCK
    blocks = -(-columns // FP8_BLOCK)
    place = block_row[:, None] * blocks + torch.arange(blocks, dtype=torch.int64, device=device)
    factor = _shifted(_mixed(place * _GAMMA + ~key), 48).to(torch.float32) * (1.5 / 65536) + 0.5
    amplitude = torch.tensor((3 / columns) ** 0.5 / 1.32, dtype=torch.float32, device=device)
    return uniform * (factor * amplitude).repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def _key(*parts: int) -> int:
    """A signed 64-bit key of several integers; their order matters."""
    state = len(parts)
    for part in parts:
        state = (state ^ (part & (2**64 - 1))) + (_GAMMA & (2**64 - 1)) & (2**64 - 1)
        state = (state ^ (state >> 30)) * (_MULTIPLIERS[0] & (2**64 - 1)) & (2**64 - 1)
        state = (state ^ (state >> 27)) * (_MULTIPLIERS[1] & (2**64 - 1)) & (2**64 - 1)
        state ^= state >> 31
    return state - (1 << 64) if state >> 63 else state


def _mixed(words: "torch.Tensor") -> "torch.Tensor":
    """The finaliser of SplitMix64 on signed 64-bit words, whose products wrap."""
    words = (words ^ _shifted(words, 30)) * _MULTIPLIERS[0]
    words = (words ^ _shifted(words, 27)) * _MULTIPLIERS[1]
    return words ^ _shifted(words, 31)


def _shifted(words: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Shifted right, zeros coming in."""
    return words >> bits & ((1 << (64 - bits)) - 1) if bits else words


def read_bytes(shape: ExpertShape, rows_per_expert: Sequence[int]) -> int:
    """Weight bytes that a layer must read: every expert that has a row, once."""
    return shape.bytes_per_expert * sum(count > 0 for count in rows_per_expert)
