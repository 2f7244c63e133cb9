"""An expert stage alone: the partials of one rank's experts, judged by the oracle that judges layers."""

from typing import TYPE_CHECKING

import numpy as np

from epcross.harness.backends.experts_only import ExpertsOnly
from epcross.harness.terms import RowFormat
from epcross.harness.verification.layer_ranks import LayerRanks
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload.batches import GroupBatch
from epcross.kernels.experts import oracle
from epcross.kernels.experts.formats import Arithmetic

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

    def expected(self, rank: int, batch: GroupBatch, arithmetic: Arithmetic) -> oracle.Expected:
        """See `LayerRanks`."""
        point = self.point
        source, token = self._arrived(batch)
        ids = np.concatenate(batch.ids), np.concatenate(batch.weights)
        row = np.cumsum((0, *point.tokens))[source] + token
        first = rank * point.experts_per_rank
        return oracle.expected(
            self.values(batch, source, token),
            self.put(ids[0][row]),
            self.put(ids[1][row]),
            expert=self.experts(),
            slots=range(first, first + point.experts_per_rank),
            row_format=RowFormat.BF16 if point.dispatch_format is RowFormat.BF16 else RowFormat.FP8,
            arithmetic=arithmetic,
        )

    def _arrived(self, batch: GroupBatch) -> tuple[np.ndarray, np.ndarray]:
        """Source and token of rows that chose an expert of the rank."""
        assert isinstance(self.backend, ExpertsOnly)
        first = self.backend.rank * self.point.experts_per_rank
        last = first + self.point.experts_per_rank
        here = [np.flatnonzero(((ids >= first) & (ids < last)).any(axis=1)) for ids in batch.ids]
        source = np.concatenate([np.full(len(tokens), rank) for rank, tokens in enumerate(here)])
        return source.astype(np.int64), np.concatenate(here).astype(np.int64)
