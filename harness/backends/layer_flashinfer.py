"""A layer around FlashInfer's one-sided exchange: experts write into the library's own combine buffer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from epcross.harness.backends.flashinfer_one_sided import FlashInferOneSided
from epcross.harness.backends.split_layer import Given, InLayer, SplitLayer
from epcross.harness.point import Point
from epcross.kernels.experts.rows import ExpertRows, flat_rows

if TYPE_CHECKING:
    from torch import Tensor


class OneSidedInLayer(FlashInferOneSided, InLayer):
    """Rows by source, `tokens` of them for each, ids of padding -1."""

    _combine_input: "Tensor | None" = None

    def capacity_rows(self, point: Point) -> int:
        """See `InLayer`: a step's most tokens of each rank, which the library is told."""
        return point.ep_size * max(1, *point.tokens)

    def given_ranks(self, set_index: int) -> Sequence[Given]:
        """See `InLayer`."""
        inputs = self._inputs[set_index]
        return [Given(inputs.rows, inputs.scales)]

    def partial_buffers(self) -> "Sequence[Tensor]":
        """See `InLayer`. The library hands it out between dispatch and combine alone; it is the same each time."""
        return [] if self._combine_input is None else [self._combine_input]

    def landed_ranks(self, set_index: int) -> Sequence[ExpertRows]:
        """See `InLayer`."""
        landed = self._landed
        self._combine_input = self._buffer()
        out = self._combine_input[: len(landed.topk_ids)]
        return [
            flat_rows(
                landed.hidden_states,
                landed.topk_ids,
                landed.topk_weights,
                out,
                scales=landed.hidden_states_scale,
            )
        ]


class LayerFlashInfer(SplitLayer):
    """`flashinfer_one_sided` with experts."""

    name = "layer_flashinfer"
    exchange_class = OneSidedInLayer
