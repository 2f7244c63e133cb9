"""Rows as they were when they were kept: the same values in the same strides, in memory of their own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from epcross.kernels.experts.rows import ExpertMajorRows, ExpertRows, RowSet

if TYPE_CHECKING:
    from torch import Tensor


def kept(rows: ExpertRows) -> ExpertRows:
    """A copy on which experts do the same work at the same cost; `out` is its own, all NaN. Waits for the device.

    Of a protocol that alternates between two sets the one in use is kept, under both numbers.
    """
    out = _like(rows.out)
    out.fill_(float("nan"))
    if isinstance(rows, ExpertMajorRows):
        return replace(rows, rows=_copy(rows.rows), scales=_copy(rows.scales), counts=rows.counts.clone(), out=out)
    one = _kept_set(rows.sets[rows.set_index()])
    return replace(
        rows,
        sets=tuple(one for _ in rows.sets),
        out=out,
        epoch=None if rows.epoch is None else rows.epoch.clone(),
        count=None if rows.count is None else rows.count.clone(),
    )


def keep_again(own: ExpertRows, rows: ExpertRows) -> ExpertRows:
    """As `kept`, in the memory of `own`, which was kept before: a graph that was captured goes on reading that. In new
    memory only where the rows have another form. Waits for the device."""
    if isinstance(own, ExpertMajorRows) or isinstance(rows, ExpertMajorRows):
        held, now = list(_tensors(own)), list(_tensors(rows))
    else:
        held, now = list(_tensors(own, 0)), list(_tensors(rows, rows.set_index()))
    if type(own) is not type(rows) or list(map(_form, held)) != list(map(_form, now)):
        return kept(rows)
    for into, tensor in zip(held, now, strict=True):
        into.copy_(tensor)
    own.out.fill_(float("nan"))
    return own


def put_back(own: ExpertRows, rows: ExpertRows) -> None:
    """What experts wrote for kept rows, as if they had written it for the rows themselves. Enqueued.

    Places of no row become NaN, which no combine may read.
    """
    rows.out.copy_(own.out)


def _kept_set(one: RowSet) -> RowSet:
    return RowSet(
        rows=_copy(one.rows),
        scales=_copy(one.scales),
        ids=_copy(one.ids),
        weights=_copy(one.weights),
        headers=None if one.headers is None else _copy(one.headers),
    )


def _tensors(rows: ExpertRows, number: int = 0) -> "Iterator[Tensor]":
    """All that experts read of rows, of the set of that number."""
    if isinstance(rows, ExpertMajorRows):
        yield from (rows.rows, rows.scales, rows.counts)
        return
    one = rows.sets[number]
    every = (one.rows, one.scales, one.ids, one.weights, one.headers, rows.epoch, rows.count)
    yield from (tensor for tensor in every if tensor is not None)


def _form(tensor: "Tensor") -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _copy(tensor: "Tensor") -> "Tensor":
    return _like(tensor).copy_(tensor)


def _like(tensor: "Tensor") -> "Tensor":
    import torch

    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
