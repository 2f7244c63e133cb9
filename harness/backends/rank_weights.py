"""The weights of ranks, made once for all points that a process serves with the same experts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from epcross.harness.backends.base import Int32
from epcross.harness.backends.layer import WEIGHT_SEED, expert_shape
from epcross.harness.point import Point
from epcross.kernels.experts.formats import ExpertShape
from epcross.kernels.experts.oracle import made_experts, stored_experts
from epcross.kernels.experts.weights import ExpertWeights, copies_needed, make_weights

if TYPE_CHECKING:
    from torch import Tensor

CHECK_SHARE = 4
"""All ranks' weights are held for checks if they take at most this part of the device; else each is made when asked."""


LARGEST_CACHE_BYTES = 126 << 20
"""Second-level cache of a B200; an H200 has 50 MiB."""


@dataclass(slots=True)
class _Held:
    """Those of one shape and format; another one's take their room."""

    of: tuple[ExpertShape, str] | None = None
    ranks: dict[int, ExpertWeights] = field(default_factory=dict)


_held = _Held()


def rank_weights(point: Point, rank: int, device: str, fewest: int = 0) -> ExpertWeights:
    """The weights of `rank` at a layer's point, in as many copies as keep a chain from finding them in the cache.

    Args:
        point: of a layer.
        rank: whose experts.
        device: as torch names it.
        fewest: experts that a set reads at least (`shared_out`, `of_rank`); 0: one copy will do.
    """
    _keep_family(point, device)
    shape = expert_shape(point, rank)
    copies = copies_needed(fewest * shape.bytes_per_expert, cache_bytes(device)) if fewest else 1
    held = _held.ranks.get(rank)
    if held is None or len(held.copies) < copies:
        held = _held.ranks[rank] = make_weights(shape, seed=WEIGHT_SEED, device=device, copies=copies)
    return replace(held, copies=held.copies[:copies])


def shared_out(point: Point, ids: Sequence[Int32]) -> int:
    """Experts of a rank that a set reads at least, as one rank knows from the ids of its own tokens in each set: those
    that they choose, shared out over the ranks."""
    chosen = min(len(np.unique(one[one >= 0])) for one in ids)
    return min(max(1, chosen // point.ep_size), point.experts_per_rank)


def of_rank(point: Point, rank: int, ids: Sequence[Int32]) -> int:
    """Experts of `rank` that a set reads at least, from the ids of all ranks' tokens in each set."""
    first = rank * point.experts_per_rank
    local = [one[(one >= first) & (one < first + point.experts_per_rank)] for one in ids]
    return max(1, min(len(np.unique(one)) for one in local))


def bytes_of_copies(point: Point) -> int:
    """Memory for a rank's weights, as a plan estimates it: the copies of an average set on the GPU with the largest
    cache, and as much again for the layout of a library."""
    slots, top_k, tokens = point.placement.num_slots, point.model.top_k, min(point.tokens)
    chosen = int(slots * (1 - (1 - min(1.0, top_k / slots)) ** tokens))
    fewest = min(max(1, chosen // point.ep_size), point.experts_per_rank)
    one = expert_shape(point, 0).bytes_per_expert
    return 2 * copies_needed(fewest * one, LARGEST_CACHE_BYTES) * point.experts_per_rank * one


def check_expert(point: Point, slot: int, device: str) -> "tuple[Tensor, Tensor]":
    """Both matrices of any slot, as an oracle takes them. Its rank's weights are kept if all ranks' fit beside what is
    measured; else this expert alone is made."""
    _keep_family(point, device)
    rank = slot // point.experts_per_rank
    shape = expert_shape(point, rank)
    group_bytes = point.placement.num_slots * shape.bytes_per_expert
    if rank in _held.ranks or group_bytes * CHECK_SHARE <= _memory_bytes(device):
        return stored_experts(shape, rank_weights(point, rank, device).copy(0))(slot)
    return made_experts(shape, WEIGHT_SEED, device)(slot)


def release_weights() -> None:
    """Let go of all that are held."""
    _held.of, _held.ranks = None, {}


def cache_bytes(device: str) -> int:
    """The second-level cache of a CUDA device; 0 of any other."""
    import torch

    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.startswith("cuda") else 0


def _keep_family(point: Point, device: str) -> None:
    shape = replace(expert_shape(point, 0), top_k=1, expected_rows_per_expert=0)
    if _held.of != (shape, device):
        release_weights()
        _held.of = (shape, device)


def _memory_bytes(device: str) -> int:
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return 1 << 40  # of a CPU: tests, whose weights are small
