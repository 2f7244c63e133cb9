"""Fused layers as documented, for one rank: `deep_gemm`'s on compute capability 9, and `flashinfer.megamoe`.

Each decodes the weights it is given in the layout that the library documents, so that a wrong order shows.
"""

from typing import Any

import torch
from tests.fakes.world import install, module

from epcross.kernels.experts.formats import Arithmetic
from epcross.kernels.experts.intermediate import requantised
from epcross.kernels.experts.quantise import fp4_values
from epcross.kernels.formats import RowFormat

_PER_64 = Arithmetic(intermediate=RowFormat.FP8, scale_block=64, weight_first=True, output_rounded=True)
_POWERS = Arithmetic(intermediate=RowFormat.FP8, power_of_two_scales=True, weight_first=True, output_rounded=True)


def _layer(x: Any, x_sf: Any, ids: Any, weights: Any, experts: Any, arithmetic: Arithmetic) -> Any:
    """fp32 products over fp8 rows, weights first, outputs of selections added in fp32."""
    values = (x.float().unflatten(1, (x_sf.shape[1], -1)) * x_sf[..., None]).flatten(1)
    total = torch.zeros(len(x), values.shape[1])
    for expert, (gate_up, down) in enumerate(experts):
        row, selection = (ids == expert).nonzero(as_tuple=True)
        gate, up = (values[row] @ gate_up.T).chunk(2, 1)
        middle = torch.nn.functional.silu(gate.double()) * up.double() * weights[row, selection, None].double()
        made = (requantised(middle, arithmetic).float() @ down.T).to(torch.bfloat16)
        total.index_add_(0, row, made.float())
    return total.to(torch.bfloat16)


class Buffer:
    """Inputs of a step, in symmetric memory."""

    def __init__(self, group: Any, experts: int, tokens: int, top_k: int, hidden: int, intermediate: int, **more: Any):
        self.group, self.experts, self.more = group, experts, more
        self.buffer = torch.zeros(64, dtype=torch.int8)
        self.x = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn)
        self.x_sf = torch.zeros(tokens, hidden // 128)
        self.topk_idx = torch.full((tokens, top_k), -1)
        self.topk_weights = torch.zeros(tokens, top_k)

    def stage(self, x: Any, x_sf: Any, ids: Any, weights: Any) -> None:
        assert ids.dtype is torch.int64
        for held, given in ((self.x, x), (self.x_sf, x_sf), (self.topk_idx, ids), (self.topk_weights, weights)):
            held[: len(given)].copy_(given)

    def destroy(self) -> None:
        self.buffer = torch.zeros(0)


def staging_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and fp32 scales of bf16 [T, hidden], as staging for compute capability 9 casts: by one over the scale."""
    parts = x.float().unflatten(1, (-1, 128))
    scales = parts.abs().amax(-1).clamp(min=1e-10) / torch.tensor(448.0)
    return (parts * (1 / scales)[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def install_deep_gemm(monkeypatch: Any, fault: str = "") -> None:
    def pre_dispatch(x, ids, weights, buf_x, buf_sf, buf_ids, buf_weights, num_tokens, group_size=128):
        assert x.dtype is torch.bfloat16
        assert ids.dtype is torch.int32
        assert group_size == 128
        buf_x[:num_tokens], buf_sf[:num_tokens] = staging_cast(x)
        buf_ids[:num_tokens], buf_weights[:num_tokens] = ids.long(), weights
        buf_ids[num_tokens:] = -1

    def transform(first, second):
        values, scales = first
        gate, up = values.chunk(2, 1)
        parts = [side.unflatten(1, (-1, 8)) for side in (gate, up)]
        return (torch.stack([p.view(torch.uint8) for p in parts], 2).flatten(1, 3).view(values.dtype), scales), second

    def fp8_mega_moe(y, first, second, buffer):
        experts = []
        (values_of, scales_of), (downs, down_scales_of) = first, second
        for values, scales, down, down_scales in zip(values_of, scales_of, downs, down_scales_of, strict=True):
            halves = values.view(torch.uint8).unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(1, 2)
            gate_up = halves.flatten(0, 1).view(values.dtype)
            experts.append((_blocks(gate_up, scales), _blocks(down, down_scales)))
        tokens = len(y)
        ids = buffer.topk_idx[:tokens]
        if fault == "dropped":
            ids = torch.where(ids == 1, -1, ids)
        y.copy_(_layer(buffer.x[:tokens], buffer.x_sf[:tokens], ids, buffer.topk_weights[:tokens], experts, _PER_64))

    def buffer(group, experts, tokens, top_k, hidden, intermediate):
        return Buffer(group, experts, -(-tokens // 384) * 384, top_k, hidden, intermediate)

    install(
        monkeypatch,
        module(
            "deep_gemm",
            get_symm_buffer_for_mega_moe=buffer,
            mega_moe_pre_dispatch_sm90=pre_dispatch,
            transform_weights_for_mega_moe_sm90=transform,
            fp8_mega_moe=fp8_mega_moe,
        ),
    )


def install_flashinfer_mega(monkeypatch: Any, fault: str = "") -> None:
    def transform(first, second):
        for packed, scales in (first, second):
            assert packed.dtype is scales.dtype is torch.uint8
            assert int(scales.min()) >= 122
            assert int(scales.max()) <= 133
        return first, second

    def mxfp4_mega_moe(y, first, second, buffer, num_tokens, l1_global_scales, l2_global_scales):
        (codes, scales), (downs, down_scales) = first, second
        experts = [
            (_marlin(p, s) * g, _marlin(q, t) * h)
            for p, s, q, t, g, h in zip(
                codes, scales, downs, down_scales, l1_global_scales, l2_global_scales, strict=True
            )
        ]
        if fault == "factors":
            experts = [(gate_up * 2, down) for gate_up, down in experts]
        held = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        x, x_sf, ids, weights = (tensor[:num_tokens] for tensor in held)
        y.copy_(_layer(x, x_sf, ids, weights, experts, _POWERS))

    install(
        monkeypatch,
        module(
            "flashinfer.megamoe",
            MegaMoESymmBuffer=Buffer,
            transform_mxfp4_weights_for_mega_moe=transform,
            mxfp4_mega_moe=mxfp4_mega_moe,
        ),
    )


def _blocks(values: Any, scales: Any) -> Any:
    return values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def _marlin(packed: Any, scales: Any) -> Any:
    """Values of codes in Marlin's order: byte b of four holds value b in its high bits and value b + 4 in its low."""
    four = packed.unflatten(-1, (-1, 4))
    codes = torch.cat([four >> 4, four & 15], dim=-1).flatten(-2)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return fp4_values(pairs, torch.float32) * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
