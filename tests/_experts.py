"""Rows as an exchange leaves them, for the tests of experts: rank-major in records of one or two landing sets."""

import numpy as np
import torch

from epcross.kernels.experts.formats import ExpertShape, WeightFormat
from epcross.kernels.experts.quantise import quantise_fp8_rows
from epcross.kernels.experts.rows import ExpertMajorRows, RankMajorRows, RowSet
from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided.layout import EPOCH_SHIFT


def shape_of(row_format: RowFormat, weight_format: WeightFormat, **other) -> ExpertShape:
    sizes = {
        "num_local_experts": 4,
        "first_slot": 8,
        "top_k": 4,
        "hidden": 256,
        "intermediate": 128,
        "capacity_rows": 24,
    }
    return ExpertShape(row_format=row_format, weight_format=weight_format, **{**sizes, **other})


def hidden_states(count: int, hidden: int, generator: torch.Generator, device="cpu") -> torch.Tensor:
    """bf16 [count, hidden] whose size differs from 128 values to 128 values, so that scales do."""
    values = torch.randn((count, hidden), generator=generator, device=device)
    size = torch.rand((count, -(-hidden // 128)), generator=generator, device=device) * 1.5 + 0.5
    return (values * size.repeat_interleave(128, 1)[:, :hidden]).to(torch.bfloat16)


def encoded(row_format: RowFormat, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and scales as bytes."""
    if row_format is RowFormat.BF16:
        return values.contiguous().view(torch.uint8), torch.empty(
            (len(values), 0), dtype=torch.uint8, device=values.device
        )
    rows, scales = quantise_fp8_rows(values)
    return rows.view(torch.uint8), scales.contiguous().view(torch.uint8)


def random_ids(count: int, top_k: int, slots: int, generator: torch.Generator, device="cpu") -> torch.Tensor:
    """Distinct slots of each token."""
    return torch.rand((count, slots), generator=generator, device=device).argsort(1)[:, :top_k].to(torch.int32)


def rank_major(
    shape: ExpertShape,
    *,
    seed: int = 0,
    sources: int = 2,
    sets: int = 1,
    epoch: int = 7,
    slots: int = 16,
    share: float = 0.8,
    headers: bool = True,
    device="cpu",
) -> RankMajorRows:
    """Records with garbage wherever nothing came; of two sets the one that is not of the epoch holds rows as well."""
    generator = torch.Generator(device).manual_seed(seed)
    count = shape.capacity_rows
    made = []
    for number in range(sets):
        values = hidden_states(count, shape.hidden, generator, device)
        row, scale = encoded(shape.row_format, values)
        ids = random_ids(count, shape.top_k, slots, generator, device)
        weights = torch.rand((count, shape.top_k), generator=generator, device=device)
        here = torch.rand((count,), generator=generator, device=device) < share
        parts = [row, scale, ids.view(torch.uint8), weights.view(torch.uint8)]
        width = sum(part.shape[1] for part in parts)
        record = torch.randint(0, 256, (count, -(-width // 128) * 128), dtype=torch.uint8, device=device)
        views, at = [], 0
        for part in parts:
            views.append(record[:, at : at + part.shape[1]])
            views[-1][:] = part
            at += part.shape[1]
        rows, scales, ids_view, weights_view = views
        ids_view, weights_view = ids_view.view(torch.int32), weights_view.view(torch.float32)
        header = None
        if headers:
            of_set = epoch - (epoch & 1) + number if sets == 2 else epoch
            rows[~here] = 255  # NaN in every format
            ids_view[~here] = shape.first_slot
            weights_view[~here] = float("nan")
            word = (of_set << EPOCH_SHIFT) | (count // sources << 1) | here.long()
            header = word.view(sources, -1).T.contiguous().T  # [sources, tokens] over memory [tokens, sources]
        else:
            ids_view[~here] = -1
        made.append(RowSet(rows=rows, scales=scales, ids=ids_view, weights=weights_view, headers=header))
    out = torch.full((count, shape.hidden + 8), float("nan"), dtype=torch.bfloat16, device=device)[:, : shape.hidden]
    word = torch.tensor([epoch], dtype=torch.int64, device=device) if headers else None
    return RankMajorRows(sets=tuple(made), out=out, epoch=word)


def expert_major(shape: ExpertShape, *, seed: int = 0, device="cpu") -> ExpertMajorRows:
    """Rows of each expert, garbage behind its count; one expert has none, one is full."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, capacity = shape.num_local_experts, shape.capacity_rows
    row, scale = encoded(shape.row_format, hidden_states(experts * capacity, shape.hidden, generator, device))
    counts = torch.randint(1, capacity + 1, (experts,), generator=generator, device=device, dtype=torch.int32)
    counts[0], counts[-1] = 0, capacity
    rows = row.view(experts, capacity, -1).clone()
    rows[torch.arange(capacity, device=device)[None, :] >= counts[:, None]] = 255
    scales = (
        scale.view(torch.float32).view(experts, capacity, -1) if scale.shape[1] else scale.view(experts, capacity, 0)
    )
    out = torch.full((experts, capacity, shape.hidden), float("nan"), dtype=torch.bfloat16, device=device)
    return ExpertMajorRows(rows=rows, scales=scales, counts=counts, out=out)


def untouched(out: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether no other place of `out` than these was written: it was NaN before."""
    rest = np.setdiff1d(np.arange(out.flatten(0, -2).shape[0]), place.cpu().numpy())
    return bool(out.flatten(0, -2)[torch.from_numpy(rest).to(out.device)].isnan().all())
