"""An expert stage alone: the partials of one rank's experts, judged by the oracle that judges layers."""

from typing import TYPE_CHECKING

import numpy as np

from epcross.harness.backends.base import Batch
from epcross.harness.backends.experts_only import ExpertsOnly
from epcross.harness.verification.layer_ranks import LayerRanks
from epcross.harness.workload.batches import GroupBatch
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor


class ExpertsRanks(LayerRanks):
    """See `LocalRanks`. The process knows all ranks' inputs and has one rank's experts."""

    def judged(self, set_index: int, batch: GroupBatch) -> "list[tuple[int, Tensor]]":
        """See `LayerRanks`: the outputs of rows that chose an expert of the rank."""
        import torch

        assert isinstance(self.backend, ExpertsOnly)
        (out,) = self.backend.outputs_ranks(set_index)
        source, token = self._arrived(batch)
        place = source * max(1, self.point.max_tokens_per_rank) + token
        return [(self.backend.rank, out[torch.from_numpy(place).to(out.device)])]

    def operands(self, rank: int, batch: GroupBatch) -> "tuple[Tensor, Tensor, Tensor]":
        """See `LayerRanks`: of the rows that chose an expert of the rank."""
        source, token = self._arrived(batch)
        row = np.cumsum((0, *self.point.tokens))[source] + token
        ids, weights = np.concatenate(batch.ids), np.concatenate(batch.weights)
        return self.values(batch, source, token), self.put(ids[row]), self.put(weights[row])

    def slots_of(self, rank: int) -> range:
        """See `LayerRanks`."""
        first = rank * self.point.experts_per_rank
        return range(first, first + self.point.experts_per_rank)

    def tokens_of(self, rank: int) -> int:
        """See `LayerRanks`."""
        return sum(self.point.tokens)

    def given(self, batch: GroupBatch) -> list[Batch]:
        """See `LayerRanks`. Rows of tokens that come to the slice alone, an eighth of those of 64 ranks: making and
        copying rows is what such a unit would take longest for."""
        source, token = self._arrived(batch)
        made, size = batch.rows(source, token), row_size(batch.point.dispatch_format, self.point.model.hidden)
        found = []
        for rank, (ids, weights) in enumerate(zip(batch.ids, batch.weights, strict=True)):
            rows = np.zeros((len(ids), size.padded_row_bytes), np.uint8)
            rows[token[source == rank]] = made[source == rank]
            scales = np.zeros((len(ids), size.padded_scale_bytes), np.uint8)
            found.append(Batch(ids=ids.copy(), weights=weights.copy(), rows=rows, scales=scales))
        return found

    def _arrived(self, batch: GroupBatch) -> tuple[np.ndarray, np.ndarray]:
        """Source and token of rows that chose an expert of the rank."""
        assert isinstance(self.backend, ExpertsOnly)
        first = self.backend.rank * self.point.experts_per_rank
        last = first + self.point.experts_per_rank
        here = [np.flatnonzero(((ids >= first) & (ids < last)).any(axis=1)) for ids in batch.ids]
        source = np.concatenate([np.full(len(tokens), rank) for rank, tokens in enumerate(here)])
        return source.astype(np.int64), np.concatenate(here).astype(np.int64)
