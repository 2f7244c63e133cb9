"""Where the rows of a rank lie, read in place. Plain views: making one copies nothing and waits for nothing.

What an implementation must write is `out`, at the places of rows that are there and chose an expert of this rank. What
becomes of other places is its own affair: nobody reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.experts.formats import Layout
from epcross.kernels.onesided.layout import EPOCH_SHIFT

if TYPE_CHECKING:
    import torch

    from epcross.kernels.onesided.views import Dispatched


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """One landing set of N places. Rows may lie apart (any stride of the first dimension); the last is dense."""

    rows: "torch.Tensor"  # uint8 [N, row_bytes]
    scales: "torch.Tensor"  # uint8 [N, scale_bytes], of no size for bf16
    ids: "torch.Tensor"  # int32 [N, top_k]: global slots; those of other ranks, and -1, count for nothing
    weights: "torch.Tensor"  # fp32 [N, top_k]
    headers: "torch.Tensor | None" = None  # int64 [S, N / S], any strides: Landing.headers, by source and token


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMajorRows:
    """Rows of all sources, one place for each (source, token); `out` is the combine buffer, at the same places.

    Which places are taken is said by `headers` of the set and `epoch`, by `count`, or else by ids that are -1.
    """

    sets: tuple[RowSet, ...]  # one, or two that a protocol alternates between
    out: "torch.Tensor"  # bf16 [N, hidden]: the weighted sum over this rank's selections of a row, rounded once
    epoch: "torch.Tensor | None" = None  # int64 [1] on the device: its low bit names the set if there are two
    count: "torch.Tensor | None" = None  # int32 [1] on the device: places from there on are empty

    @property
    def layout(self) -> Layout:
        """Rank-major."""
        return Layout.RANK_MAJOR

    @property
    def capacity_rows(self) -> int:
        """N."""
        return len(self.out)

    def set_index(self) -> int:
        """The set in use; waits for the device if there are two."""
        if len(self.sets) == 1 or self.epoch is None:
            return 0
        return int(self.epoch.reshape(-1)[0]) & 1

    def present(self, set_index: int = 0) -> "torch.Tensor":
        """bool [N]: which places of a set are taken. Enqueues torch operations; for checks, not for speed."""
        import torch

        one = self.sets[set_index]
        here = torch.ones(len(one.ids), dtype=torch.bool, device=one.ids.device)
        if one.headers is not None and self.epoch is not None:
            epoch = self.epoch.reshape(-1)[0]
            of_round = (one.headers ^ (epoch << EPOCH_SHIFT)) >> EPOCH_SHIFT == 0
            here &= (of_round & (one.headers & 1 == 1)).reshape(-1)
        if self.count is not None:
            here &= torch.arange(len(here), device=here.device) < self.count.reshape(-1)[0]
        return here


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMajorRows:
    """Rows sorted by expert, M places each; what an expert makes of its row goes to the same place, unweighted."""

    rows: "torch.Tensor"  # uint8 [E, M, row_bytes]
    scales: "torch.Tensor"  # fp32 [E, M, hidden / 128], any strides; of no size for bf16
    counts: "torch.Tensor"  # int32 [E] on the device: rows that each expert has
    out: "torch.Tensor"  # bf16 [E, M, hidden]

    @property
    def layout(self) -> Layout:
        """Expert-major."""
        return Layout.EXPERT_MAJOR

    @property
    def capacity_rows(self) -> int:
        """M."""
        return self.out.shape[1]


ExpertRows = RankMajorRows | ExpertMajorRows


def of_dispatched(dispatched: "Dispatched", out: "torch.Tensor", local: int = 0) -> RankMajorRows:
    """The rows that `OneSidedAllToAll.dispatch` left, for local rank `local`, with its combine buffer as `out`.

    Args:
        dispatched: what `dispatch` returned; the views stay valid, so one object serves every round and every replay.
        out: `combine_buffer()`: bf16 [ep, C, hidden], or [V, ep, C, hidden] for V > 1 local ranks.
        local: which of them.
    """
    several = out.dim() == 4

    def flat(tensor: "torch.Tensor") -> "torch.Tensor":
        mine = tensor[local] if several else tensor
        return mine.flatten(0, 1)  # places follow each other at one stride, so this is a view

    sets = [
        RowSet(
            rows=flat(landing.rows),
            scales=flat(landing.scales),
            ids=flat(landing.ids),
            weights=flat(landing.weights),
            headers=(landing.headers[local] if several else landing.headers).transpose(0, 1),
        )
        for landing in dispatched.sets
    ]
    return RankMajorRows(sets=tuple(sets), out=flat(out), epoch=dispatched.epoch[local : local + 1])


def flat_rows(
    rows: "torch.Tensor",
    ids: "torch.Tensor",
    weights: "torch.Tensor",
    out: "torch.Tensor",
    *,
    scales: "torch.Tensor | None" = None,
    count: "torch.Tensor | None" = None,
) -> RankMajorRows:
    """Rows of a library that returns plain tensors, as views.

    Args:
        rows: [N, values], bf16, e4m3 or bytes; last dimension dense.
        ids: int32 [N, top_k], global slots or -1.
        weights: fp32 [N, top_k].
        out: bf16 [N, hidden].
        scales: fp32 [N, hidden / 128], last dimension dense, for fp8 rows.
        count: int32 [1]; rows from there on are empty.
    """
    import torch

    none = torch.empty((len(rows), 0), dtype=torch.uint8, device=rows.device)
    one = RowSet(
        rows=rows.view(torch.uint8), scales=none if scales is None else scales.view(torch.uint8), ids=ids,
        weights=weights,
    )  # fmt: skip
    return RankMajorRows(sets=(one,), out=out, count=count)


def addresses(rows: ExpertRows) -> Sequence[int]:
    """Where the tensors of `rows` begin: what a captured graph goes on reading."""
    if isinstance(rows, ExpertMajorRows):
        return [t.data_ptr() for t in (rows.rows, rows.scales, rows.counts, rows.out)]
    parts = [t.data_ptr() for one in rows.sets for t in (one.rows, one.scales, one.ids, one.weights)]
    return [*parts, rows.out.data_ptr()]
