"""Quantisation in torch operations, on any device: what the experts' kernels must reproduce, and what a layer may use.

fp8 is e4m3 with fp32 scales: a scale maps the largest magnitude it covers to 448, `scale = largest / 448` in fp32, and
a value becomes the e4m3 nearest to `value / scale`, ties to even. A block of zeros has scale 1. Libraries that quantise
rows themselves do so by other operations (`RowScaling`), which the oracle must follow. fp4 is e2m1 with e8m0
scales as the OCP Microscaling standard (MX) 1.0 says, with saturation.
"""

from typing import TYPE_CHECKING

from epcross.kernels.experts.formats import FP4_BLOCK, FP8_BLOCK, RowScaling

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0
_LEAST = {RowScaling.RECIPROCAL: 1e-10, RowScaling.FACTOR: 1e-4}
"""What the largest magnitude of a block is taken to be at least: in the staging of DeepGEMM's MegaMoE (its
impls/sm90_mega_moe_pre_dispatch.cuh), and in DeepEP's low-latency dispatch (kFP8Margin of its kernels/utils.cuh)."""
_BLOCKS = 16  # of 128 values, for each program
_E2M1_EXPONENT_MAX = 2
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours 0, 0.5, 1, 1.5, 2, 3, 4, 6
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantise_fp8_rows(
    values: "torch.Tensor", *, power_of_two: bool = False, scaling: RowScaling = RowScaling.QUOTIENT
) -> "tuple[torch.Tensor, torch.Tensor]":
    """e4m3 [..., K] and fp32 scales [..., K / 128] of values [..., K], K a multiple of 128.

    Args:
        values: bf16 or fp32.
        power_of_two: see `ExpertShape.power_of_two_scales`.
        scaling: by which operations, each rounded to fp32.
    """
    import torch

    parts = values.float().unflatten(-1, (-1, FP8_BLOCK))
    largest = parts.abs().amax(-1)
    if scaling in _LEAST:
        largest = largest.clamp(min=_LEAST[scaling])
    scales = _scales(largest, power_of_two, scaling)
    if scaling is RowScaling.QUOTIENT:
        scaled = parts / scales[..., None]
    elif scaling is RowScaling.FACTOR and not power_of_two:
        scaled = parts * (torch.full_like(largest, E4M3_MAX) / largest)[..., None]
    else:
        scaled = parts * (torch.ones_like(scales) / scales)[..., None]
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).flatten(-2).to(torch.float8_e4m3fn), scales


def quantise_fp8_blocks(values: "torch.Tensor", *, power_of_two: bool = False) -> "tuple[torch.Tensor, torch.Tensor]":
    """e4m3 [rows, K] and fp32 scales [rows / 128, K / 128] of fp32 [rows, K], both multiples of 128."""
    import torch

    rows, columns = values.shape
    parts = values.reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scales = _scales(parts.abs().amax((1, 3)), power_of_two)
    scaled = (parts / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.reshape(rows, columns).to(torch.float8_e4m3fn), scales


def quantise_fp4(values: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """uint8 [rows, K / 2], first value in the low bits, and e8m0 bytes [rows, K / 32] of fp32 [rows, K]."""
    import torch

    rows, columns = values.shape
    parts = values.reshape(rows, columns // FP4_BLOCK, FP4_BLOCK)
    exponent = torch.frexp(parts.abs().amax(-1))[1] - 1 - _E2M1_EXPONENT_MAX
    exponent = exponent.clamp(-126, 127)
    scaled = torch.ldexp(parts, -exponent[..., None])
    magnitude = scaled.abs()
    code = torch.zeros(parts.shape, dtype=torch.uint8, device=values.device)
    for number, bound in enumerate(_E2M1_BOUNDS):
        code += (magnitude >= bound if number % 2 else magnitude > bound).to(torch.uint8)  # a tie goes to the even code
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    code = code.reshape(rows, columns)
    return code[:, 0::2] | code[:, 1::2] << 4, (exponent + 127).to(torch.uint8)


def fp4_values(packed: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """[..., K] values of e2m1 pairs [..., K / 2], without scales."""
    import torch

    table = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], dtype=dtype, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return table[codes.long()]


def quantise_rows(
    x: "torch.Tensor", rows: "torch.Tensor", scales: "torch.Tensor", *, power_of_two: bool = False
) -> None:
    """Enqueue the quantisation of hidden states to fp8, in place of what `rows` and `scales` hold: one kernel on CUDA.

    Args:
        x: bf16 [T, H], last dimension dense.
        rows: e4m3 [T, H], last dimension dense.
        scales: fp32 [T, H / 128], last dimension dense.
        power_of_two: see `ExpertShape.power_of_two_scales`.
    """
    if not x.is_cuda:
        codes, made = quantise_fp8_rows(x, power_of_two=power_of_two)
        rows.copy_(codes)
        scales.copy_(made)
        return
    from epcross.kernels.experts.gather.index import on
    from epcross.kernels.experts.gather.quantise_kernels import quantise_kernel

    tokens, hidden = x.shape
    if tokens:
        on(quantise_kernel, tokens, -(-hidden // (FP8_BLOCK * _BLOCKS)))(
            x, x.stride(0), rows, rows.stride(0), scales, scales.stride(0), H=hidden, BLOCKS=_BLOCKS,
            POWER_OF_TWO=power_of_two, num_warps=4,
        )  # fmt: skip


def _scales(largest: "torch.Tensor", power_of_two: bool, scaling: RowScaling = RowScaling.QUOTIENT) -> "torch.Tensor":
    """fp32: what maps `largest` to the largest e4m3, or the power of two that is not below it."""
    import torch

    # by a tensor: torch divides by a Python number on CUDA through its reciprocal, which rounds twice
    most = torch.full_like(largest, E4M3_MAX)
    scale = largest * (torch.ones_like(most) / most) if scaling is RowScaling.FACTOR else largest / most
    scale = torch.where(largest > 0, scale, torch.ones_like(largest))
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    return scale
