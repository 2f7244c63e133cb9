"""What a layer's experts had to do, for its rows: how many were chosen, by how many tokens, how much they weigh."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from epcross.harness.backends.base import Int32
from epcross.harness.backends.layer import expert_shape
from epcross.harness.point import Point


def expert_fields(point: Point, sets: Sequence[Sequence[Int32]], *, rank: int | None = None) -> dict[str, Any]:
    """Record fields from the slot ids [T, top_k] of every rank, set after set.

    Weight bytes are those of the experts that some token chose, once each: what a layer reads at least, on the rank
    that reads most. `rank`: whose experts alone are at work; None: those of all ranks.
    """
    counts = np.stack([_selections(point, ids) for ids in sets])  # [sets, slots]
    if rank is not None:
        counts = counts[:, rank * point.experts_per_rank : (rank + 1) * point.experts_per_rank]
    hit = (counts > 0).reshape(len(counts), -1, point.experts_per_rank).sum(axis=2)  # [sets, ranks]
    return {
        "expert_weight_bytes": round(float(hit.max(axis=1).mean()) * expert_shape(point, 0).bytes_per_expert),
        "experts_hit": float(hit.mean()),
        "tokens_per_expert_min": int(counts.min()),
        "tokens_per_expert_mean": float(counts.mean()),
        "tokens_per_expert_max": int(counts.max()),
    }


def _selections(point: Point, ids: Sequence[Int32]) -> np.ndarray:
    every = np.concatenate([one.reshape(-1) for one in ids])
    return np.bincount(every[every >= 0], minlength=point.placement.num_slots)
