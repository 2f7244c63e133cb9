"""Rows as an exchange leaves them, made without one: for measuring and checking experts by themselves."""

from typing import TYPE_CHECKING, Any

from epcross.kernels.experts.formats import FP8_BLOCK, ExpertShape
from epcross.kernels.experts.rows import ExpertMajorRows, RankMajorRows, RowSet
from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided.layout import EPOCH_SHIFT

if TYPE_CHECKING:
    import torch

_EPOCH = 1
_RECORD_ALIGN = 128


class RankMajorLanding:
    """Records of row, scales, ids and weights, [source, token], and a header for each, as our exchange has them."""

    def __init__(self, shape: ExpertShape, sources: int, device: "torch.device | str") -> None:
        """Room for `capacity_rows / sources` tokens of each source; none is there yet."""
        import torch

        self._shape, self._each = shape, shape.capacity_rows // sources
        scales = shape.hidden // FP8_BLOCK * 4 if shape.row_format is RowFormat.FP8 else 0
        widths = (shape.row_bytes, scales, 4 * shape.top_k, 4 * shape.top_k)
        stride = -(-sum(widths) // _RECORD_ALIGN) * _RECORD_ALIGN
        records = torch.zeros((shape.capacity_rows, stride), dtype=torch.uint8, device=device)
        parts, at = [], 0
        for width in widths:
            parts.append(records[:, at : at + width])
            at += width
        headers = torch.zeros((self._each, sources), dtype=torch.int64, device=device).transpose(0, 1)
        one = RowSet(
            rows=parts[0],
            scales=parts[1],
            ids=parts[2].view(torch.int32),
            weights=parts[3].view(torch.float32),
            headers=headers,
        )
        out = torch.zeros((shape.capacity_rows, shape.hidden), dtype=torch.bfloat16, device=device)
        epoch = torch.full((1,), _EPOCH, dtype=torch.int64, device=device)
        self.rows = RankMajorRows(sets=(one,), out=out, epoch=epoch)

    def land(self, source: int, rows: Any, scales: Any, ids: Any, weights: Any) -> None:
        """The tokens of a source, in place of what was there: those that chose an expert of this rank are present.

        Args:
            source: whose.
            rows: uint8 [T, row_bytes].
            scales: fp32 [T, hidden / 128], or None for bf16.
            ids: int32 [T, top_k].
            weights: fp32 [T, top_k].
        """
        import torch

        shape, one, count = self._shape, self.rows.sets[0], len(ids)
        part = slice(source * self._each, source * self._each + count)
        one.rows[part] = rows
        if scales is not None:
            one.scales.view(torch.float32)[part] = scales
        one.ids[part] = ids
        one.weights[part] = weights
        here = ((ids >= shape.first_slot) & (ids <= shape.last_slot)).any(1)
        assert one.headers is not None
        one.headers[source] = _EPOCH << EPOCH_SHIFT | count << 1
        one.headers[source, :count] |= here.long()

    def sums(self, source: int) -> "torch.Tensor":
        """bf16 [tokens, hidden] of a source: weighted sums of those present, zeros for others."""
        import torch

        part = slice(source * self._each, (source + 1) * self._each)
        here = self.rows.present()[part, None]
        return torch.where(here, self.rows.out[part], torch.zeros((), dtype=torch.bfloat16, device=here.device))


class ExpertMajorLanding:
    """Rows sorted by expert, with room for every token at each; scales lie by columns, as libraries load them."""

    def __init__(self, shape: ExpertShape, sources: int, device: "torch.device | str") -> None:
        """See `RankMajorLanding`; `capacity_rows` is the room of each expert."""
        import torch

        experts, places = shape.num_local_experts, shape.capacity_rows
        self._shape, self._each = shape, places // sources
        self._blocks = shape.hidden // FP8_BLOCK if shape.row_format is RowFormat.FP8 else 0
        height = -(-places // 4) * 4
        scales = torch.zeros((experts, self._blocks, height), dtype=torch.float32, device=device)
        self.rows = ExpertMajorRows(
            rows=torch.zeros((experts, places, shape.row_bytes), dtype=torch.uint8, device=device),
            scales=scales.transpose(1, 2)[:, :places],
            counts=torch.zeros(experts, dtype=torch.int32, device=device),
            out=torch.zeros((experts, places, shape.hidden), dtype=torch.bfloat16, device=device),
        )
        self._given: list[Any] = [None] * sources

    def land(self, source: int, rows: Any, scales: Any, ids: Any, weights: Any) -> None:
        """See `RankMajorLanding`. Places are given out anew once the last source has come."""
        self._given[source] = (rows, scales, ids, weights)
        if any(each is None for each in self._given):
            return
        import torch

        all_rows, all_scales, all_ids, all_weights = (
            None if each[0] is None else torch.cat(each) for each in zip(*self._given, strict=True)
        )
        assert all_ids is not None
        assert all_weights is not None
        assert all_rows is not None
        source_of = torch.cat([torch.full((len(g[2]),), n, device=g[2].device) for n, g in enumerate(self._given)])
        token_of = torch.cat([torch.arange(len(g[2]), device=g[2].device) for g in self._given])
        self._where = []  # of each expert: source, token and weight of its places
        for expert in range(self._shape.num_local_experts):
            row, selection = (all_ids == self._shape.first_slot + expert).nonzero(as_tuple=True)
            self.rows.rows[expert, : len(row)] = all_rows[row]
            if all_scales is not None:
                self.rows.scales[expert, : len(row)] = all_scales[row]
            self.rows.counts[expert] = len(row)
            self._where.append((source_of[row], token_of[row], all_weights[row, selection]))

    def sums(self, source: int) -> "torch.Tensor":
        """See `RankMajorLanding`; added here, in fp32."""
        import torch

        out = self.rows.out
        total = torch.zeros((self._each, self._shape.hidden), dtype=torch.float32, device=out.device)
        for expert, (sources, tokens, weights) in enumerate(self._where):
            mine = (sources == source).nonzero()[:, 0]
            total.index_add_(0, tokens[mine], out[expert, mine].float() * weights[mine, None])
        return total.to(torch.bfloat16)
