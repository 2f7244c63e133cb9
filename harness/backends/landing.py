"""From what a library leaves at the receiver to `DeviceReceived`: layouts differ, and some do not tell whose a row is.

All of it is outside the timed window. N = rows or copies that arrived.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from epcross.harness.backends.base import Float32, Group, Int32
from epcross.harness.backends.device_inputs import DeviceInputs
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.point import Point
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor


def local_ids(point: Point, rank: int, ids: "Tensor") -> "Tensor":
    """Global slot ids with those of other ranks, and whatever is no slot, as -1."""
    first = rank * point.experts_per_rank
    here = (ids >= first) & (ids < first + point.experts_per_rank)
    return ids.where(here, ids.new_full((), -1))


def as_received(
    point: Point,
    rank: int,
    *,
    source: "Tensor",  # [N]
    token: "Tensor",  # [N]
    ids: "Tensor",  # [N, top_k], global; those of other ranks are dropped here
    weights: "Tensor",  # [N, top_k]
    rows: "Tensor",  # [N, ...] of row_bytes each, any type
    scales: "Tensor | None",
) -> DeviceReceived:
    """The canonical form of one rank's rows."""
    import torch

    size = row_size(point.dispatch_format, point.model.hidden)
    ids = local_ids(point, rank, ids)
    return DeviceReceived(
        source=source.int(),
        token=token.int(),
        ids=ids.int(),
        weights=torch.where(ids >= 0, weights, torch.zeros_like(weights)).float(),
        rows=_padded(as_bytes(rows), size.padded_row_bytes),
        scales=_padded(as_bytes(rows[:, :0] if scales is None else scales), size.padded_scale_bytes),
    )


def as_bytes(tensor: "Tensor") -> "Tensor":
    """uint8 [N, bytes]."""
    import torch

    tensor = tensor.contiguous()
    if not tensor.numel():
        return torch.zeros(len(tensor), 0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(torch.uint8).reshape(len(tensor), -1)


def _padded(tensor: "Tensor", width: int) -> "Tensor":
    import torch

    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Copies of rows, one for each selection, folded into one row for each (source, token)."""

    source: "Tensor"  # [M]
    token: "Tensor"  # [M]
    representative: "Tensor"  # [M], which copy stands for the row
    row_of: "Tensor"  # [N], which row a copy belongs to


def fold(source: "Tensor", token: "Tensor", slot: "Tensor", contents: "Tensor", stride: int) -> Folded:
    """Fold N copies by (source, token). Nothing wrong is folded away: a copy that differs from the others stands for
    its row, and a second copy of the same (source, token, slot) becomes a row of its own.

    Args:
        slot: the slot each copy was sent for.
        contents: bytes [N, width] that copies of a row must agree in.
        stride: more than any token index.
    """
    import torch

    triple = (slot.long() * (1 << 20) + source.long()) * stride + token.long()
    order = torch.argsort(triple, stable=True)
    again = torch.zeros_like(triple)
    again[order[1:]] = (triple[order[1:]] == triple[order[:-1]]).long()
    key = (again * (1 << 20) + source.long()) * stride + token.long()
    unique, row_of = torch.unique(key, return_inverse=True)
    representative = torch.zeros_like(unique)
    representative[row_of.flip(0)] = torch.arange(len(key), device=key.device).flip(0)
    differs = (contents != contents[representative][row_of]).any(dim=1)
    representative[row_of[differs]] = differs.nonzero()[:, 0]
    return Folded(
        source=source[representative], token=token[representative], representative=representative, row_of=row_of
    )


def gather_routing(group: Group, inputs: DeviceInputs) -> list[tuple[Int32, Float32]]:
    """Ids and weights of every rank's tokens, for libraries that deliver neither. Collective."""
    ids = inputs.ids.int().cpu().numpy()
    weights = inputs.weights.cpu().numpy()
    top_k = ids.shape[1]
    gathered = group.all_gather(ids.tobytes() + weights.tobytes())
    split = [(data[: len(data) // 2], data[len(data) // 2 :]) for data in gathered]
    return [
        (np.frombuffer(a, np.int32).reshape(-1, top_k), np.frombuffer(b, np.float32).reshape(-1, top_k))
        for a, b in split
    ]


def identify(
    point: Point,
    rank: int,
    group: Group,
    inputs: DeviceInputs,
    *,
    source: "Tensor | None",  # [N], or None where the library does not tell
    ids: "Tensor",  # [N, top_k] global
    weights: "Tensor",  # [N, top_k]
    rows: "Tensor",  # [N, ...]
    scales: "Tensor | None",
    ordered: bool = True,
) -> "tuple[Tensor, Tensor]":
    """Source and token [N] of rows that arrive without them, by their contents: bytes, and this rank's ids and weights.

    A row that is nobody's gets the place of one that is missing, so that a check says what is wrong with it; one too
    many gets token -1. Rows that agree in everything are interchangeable. Collective.

    Args:
        ordered: whether ids keep the order that the token has them in; else only which ones they are counts.
    """
    import torch

    routed_here = [local_ids(point, r, inputs.ids) for r in range(point.ep_size)]
    mine = torch.stack(
        [_mixed(own, inputs.weights, inputs.rows, inputs.scales, ordered=ordered) for own in routed_here]
    )
    sent = [
        np.frombuffer(data, np.int64).reshape(point.ep_size, -1)[rank]
        for data in group.all_gather(mine.cpu().numpy().tobytes())  # [ep_size, T]
    ]
    routed = [
        np.frombuffer(data, np.bool_).reshape(point.ep_size, -1)[rank]
        for data in group.all_gather(
            torch.stack([(own >= 0).any(dim=1) for own in routed_here]).cpu().numpy().tobytes()
        )
    ]
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for s in range(point.ep_size):
        for t in np.flatnonzero(routed[s])[::-1].tolist():
            wanted[s if source is not None else -1, int(sent[s][t])].append((s, t))
    keys = _mixed(local_ids(point, rank, ids), weights, rows, scales, ordered=ordered).cpu().tolist()
    froms = [-1] * len(keys) if source is None else source.cpu().tolist()
    found = [left.pop() if (left := wanted.get((s, key))) else None for s, key in zip(froms, keys, strict=True)]
    spare: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (s, _), left in wanted.items():
        spare[s] += left
    places = [place or (spare[s].pop() if spare[s] else (max(s, 0), -1)) for place, s in zip(found, froms, strict=True)]
    made = torch.tensor(places, dtype=torch.int32, device=rows.device).reshape(-1, 2)
    return made[:, 0], made[:, 1]


def as_identified(
    point: Point,
    rank: int,
    group: Group,
    inputs: DeviceInputs,
    *,
    source: "Tensor | None",  # [N], or None where the library does not tell
    ids: "Tensor",  # [N, top_k] global
    weights: "Tensor",  # [N, top_k]
    rows: "Tensor",  # [N, ...]
    scales: "Tensor | None",
    ordered: bool = True,
) -> DeviceReceived:
    """`as_received` for rows whose source and token `identify` has to find. Collective."""
    source, token = identify(
        point, rank, group, inputs, source=source, ids=ids, weights=weights, rows=rows, scales=scales, ordered=ordered
    )
    if not ordered:
        ids, weights = in_own_order(point, rank, group, inputs, source=source, token=token, ids=ids, weights=weights)
    return as_received(point, rank, source=source, token=token, ids=ids, weights=weights, rows=rows, scales=scales)


def in_own_order(
    point: Point,
    rank: int,
    group: Group,
    inputs: DeviceInputs,
    *,
    source: "Tensor",  # [N]
    token: "Tensor",  # [N], -1 where it is nobody's
    ids: "Tensor",  # [N, top_k] global
    weights: "Tensor",  # [N, top_k]
) -> "tuple[Tensor, Tensor]":
    """Ids and weights put where the token itself has them, for libraries that deliver them sorted. Collective.

    Nothing wrong is mended: a row with an id that its token did not choose, or without one that it did, stays as it is.
    """
    import torch

    chosen = np.full((point.ep_size, max(1, *point.tokens) + 1, point.model.top_k), -1, np.int32)
    for r, (of_rank, _) in enumerate(gather_routing(group, inputs)):
        chosen[r, : len(of_rank)] = of_rank  # the last row stays -1: the token that is nobody's
    at = torch.from_numpy(chosen).to(ids.device)[source.long(), token.long()]
    own, given = local_ids(point, rank, at), local_ids(point, rank, ids)
    same = (own[:, :, None] == given[:, None, :]) & (own >= 0)[:, :, None]
    whole = (same.sum(dim=(1, 2)) == (own >= 0).sum(dim=1)) & (same.sum(dim=(1, 2)) == (given >= 0).sum(dim=1))
    moved = torch.where(own >= 0, weights.gather(1, same.int().argmax(dim=2)), torch.zeros_like(weights))
    return torch.where(whole[:, None], own.to(ids.dtype), ids), torch.where(whole[:, None], moved, weights)


def _mixed(own: "Tensor", weights: "Tensor", rows: "Tensor", scales: "Tensor | None", *, ordered: bool) -> "Tensor":
    """A 64-bit hash of each row as a rank must receive it: every word mixed with its place, and added up.

    `own` are the ids of that rank, -1 elsewhere; what the weights beside a -1 are does not matter.
    """
    import torch

    own = own.int()
    kept = torch.where(own >= 0, weights, torch.zeros_like(weights)).float()
    if not ordered:
        own, order = own.sort(dim=1)
        kept = kept.gather(1, order)
    parts = [as_bytes(rows), as_bytes(own), as_bytes(kept)]
    if scales is not None and scales.numel():
        parts.append(as_bytes(scales))
    data = torch.cat(parts, dim=1)
    if not len(data):
        return torch.zeros(0, dtype=torch.int64, device=data.device)
    words = _padded(data, -(-data.shape[1] // 8) * 8).contiguous().view(torch.int64)
    place = torch.arange(1, words.shape[1] + 1, device=words.device)
    words = words + place * -7046029254386353131  # splitmix64, whose constants are odd 64-bit numbers
    words = (words ^ (words >> 30)) * -4658895280553007687
    words = (words ^ (words >> 27)) * -7723592293110705685
    return (words ^ (words >> 31)).sum(dim=1)
