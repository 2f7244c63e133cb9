"""Stand-ins for libraries of grouped products, on the CPU: the calls of DeepGEMM and FlashInfer, in fp32.

They check what the real ones insist on.
"""

from types import SimpleNamespace

import torch

from epcross.kernels.experts.formats import WeightFormat
from epcross.kernels.experts.weights import decoded

ALIGNMENT = 128
BLOCK_M = 128
"""Rows of a tile of the masked product: it loads and stores whole ones, over the next group's rows if they do not end
on a tile. The library chooses 64 or 128."""


def deep_gemm() -> SimpleNamespace:
    """What `import deep_gemm` gives."""
    return SimpleNamespace(
        __version__="2.5.0.fake",
        get_mk_alignment_for_contiguous_layout=lambda: ALIGNMENT,
        m_grouped_fp8_gemm_nt_masked=_masked,
        m_grouped_fp8_fp4_gemm_nt_masked=_masked,
        m_grouped_bf16_gemm_nt_masked=_masked,
        m_grouped_fp8_gemm_nt_contiguous=_contiguous,
        m_grouped_fp8_fp4_gemm_nt_contiguous=_contiguous,
        m_grouped_bf16_gemm_nt_contiguous=_contiguous,
    )


def _masked(a, b, d, masked_m, expected_m, recipe_a=None, recipe_b=None) -> None:
    x, w = _left(a), _right(b)
    assert x.dim() == w.dim() == d.dim() == 3
    assert masked_m.dtype == torch.int32
    assert masked_m.is_contiguous()
    assert expected_m > 0
    groups, room, columns = d.shape
    flat, rows = d.view(-1, columns), x.flatten(0, 1)
    for group in reversed(range(groups)):  # programs end in any order, and this one hides nothing
        for first in range(0, int(masked_m[group]), BLOCK_M):
            begin = group * room + first
            block = slice(begin, min(begin + BLOCK_M, len(flat)))  # the copy engine stops at the end of the tensor only
            product = (rows[block] @ w[group].T).to(torch.bfloat16)
            beyond = torch.arange(begin, begin + len(product)) >= group * room + int(masked_m[group])
            product[beyond] = float("nan")  # whatever lay there was multiplied
            flat[block] = product


def _contiguous(a, b, d, m_indices, recipe_a=None, recipe_b=None) -> None:
    x, w = _left(a), _right(b)
    assert x.dim() == d.dim() == 2
    assert m_indices.shape == (len(x),)
    assert len(x) % ALIGNMENT == 0
    for first in range(0, len(x), ALIGNMENT):
        part = slice(first, first + ALIGNMENT)
        (group,) = m_indices[part].unique().tolist()  # a block is one expert's
        if group >= 0:
            d[part] = (x[part] @ w[group].T).to(torch.bfloat16)


def _left(a) -> torch.Tensor:
    if isinstance(a, torch.Tensor):
        assert a.dtype == torch.bfloat16
        assert a.is_contiguous()
        return a.float()
    values, scales = a
    assert values.dtype == torch.float8_e4m3fn
    assert values.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == (*values.shape[:-1], values.shape[-1] // 128)
    assert scales.stride(-2) == 1, "scales lie by columns, or the library copies them"
    assert scales.stride(-1) % 4 == 0, "and columns begin at 16 bytes"
    return values.float() * scales.repeat_interleave(128, -1)


def _right(b) -> torch.Tensor:
    if isinstance(b, torch.Tensor):
        return b.float()
    values, scales = b
    if values.dtype == torch.int8:
        power = (scales.log2() + 127).round().to(torch.uint8)
        return decoded(WeightFormat.FP4, values.view(torch.uint8), power, torch.float32)
    assert scales.shape == tuple(-(-size // 128) for size in values.shape[-2:]) or scales.dim() == 3
    return decoded(WeightFormat.FP8, values, scales, torch.float32)


def flashinfer_moe() -> SimpleNamespace:
    """What `import flashinfer.fused_moe` gives, of what is called."""
    return SimpleNamespace(
        cutlass_fused_moe=_fused_moe,
        interleave_moe_weights_for_sm90_mixed_gemm=lambda weight, kind: weight.flip(-1),
        interleave_moe_scales_for_sm90_mixed_gemm=lambda scales: scales.flip(-1),
    )


def _fused_moe(
    x, ids, weights, fc1, fc2, output_dtype, *, quant_scales, output, ep_size, ep_rank, use_w4_group_scaling=False,
    use_fused_finalize=None, tune_max_num_tokens=8192,
) -> None:  # fmt: skip
    assert x.is_contiguous()
    assert ids.dtype == torch.int32
    assert output_dtype == output.dtype == torch.bfloat16
    assert ids.max() < len(fc1) * ep_size
    if use_w4_group_scaling:
        fc1, fc2 = (
            decoded(WeightFormat.FP4, w.flip(-1), s.view(torch.uint8).flip(-1), torch.float32)
            for w, s in zip((fc1, fc2), quant_scales, strict=True)
        )
    total = torch.zeros(output.shape)
    for expert in range(len(fc1)):
        row, selection = (ids == expert + ep_rank * len(fc1)).nonzero(as_tuple=True)
        up, gate = (x[row].float() @ fc1[expert].float().T).chunk(2, -1)  # up comes first
        h = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        y = (h.float() @ fc2[expert].float().T).to(torch.bfloat16)
        total.index_add_(0, row, y.float() * weights[row, selection, None])
    output.copy_(total.to(torch.bfloat16))
