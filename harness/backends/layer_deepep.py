"""Layers around DeepEP: both generations, and both modes of the first."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from epcross.harness.backends.deepep import DeepEP
from epcross.harness.backends.deepep_ll import DeepEPLowLatency
from epcross.harness.backends.deepep_normal import DeepEPNormal
from epcross.harness.backends.deepep_v2 import DeepEPV2
from epcross.harness.backends.split_layer import Given, InLayer, SplitLayer
from epcross.harness.point import Point
from epcross.harness.terms import RowFormat
from epcross.kernels.experts.capability import power_of_two_scales
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE
from epcross.kernels.experts.formats import FP8_BLOCK, Layout, RowScaling
from epcross.kernels.experts.rows import ExpertMajorRows, ExpertRows, flat_rows

if TYPE_CHECKING:
    from torch import Tensor


class DeepEPInLayer(DeepEP, InLayer):
    """What the flat layouts share: rows one after another, ids that count from the rank's first slot."""

    local_slots: ClassVar[bool] = True

    _partials: "list[Tensor]"

    def capacity_rows(self, point: Point) -> int:
        """See `InLayer`: without a sync of the host there is room for every token of every rank."""
        return point.ep_size * max(1, point.max_tokens_per_rank)

    def given_ranks(self, set_index: int) -> Sequence[Given]:
        """See `InLayer`."""
        inputs = self._inputs[set_index]
        return [Given(inputs.rows, inputs.scales)]

    def partial_buffers(self) -> "Sequence[Tensor]":
        """See `InLayer`."""
        return self._partials

    def flat(self, set_index: int, x: "Tensor | tuple[Tensor, Tensor]", ids: "Tensor", weights: "Tensor") -> ExpertRows:
        """The rows that a dispatch returned. Ids become int32, which is a kernel inside the window."""
        import torch

        rows, scales = x if isinstance(x, tuple) else (x, None)
        return flat_rows(
            rows,
            ids.to(torch.int32),
            weights,
            self._partials[set_index],
            scales=scales,
            count=self.arrived(),
        )

    @abstractmethod
    def arrived(self) -> "Tensor":
        """int32 [1] on the device: how many rows the last dispatch brought."""


class V2InLayer(DeepEPV2, DeepEPInLayer):
    """The second generation."""

    def landed_ranks(self, set_index: int) -> Sequence[ExpertRows]:
        """See `InLayer`."""
        x, ids, weights, _, _ = self._landed
        return [self.flat(set_index, x, ids, weights)]

    def arrived(self) -> "Tensor":
        """See `DeepEPInLayer`."""
        return self._landed[3].psum_num_recv_tokens_per_scaleup_rank[-1:]


class NormalInLayer(DeepEPNormal, DeepEPInLayer):
    """The first generation's throughput kernels."""

    def landed_ranks(self, set_index: int) -> Sequence[ExpertRows]:
        """See `InLayer`."""
        x, ids, weights, _, _, _ = self._landed
        return [self.flat(set_index, x, ids, weights)]

    def arrived(self) -> "Tensor":
        """See `DeepEPInLayer`."""
        return self._landed[4][0][-1:, self._rank]


class LowLatencyInLayer(DeepEPLowLatency, InLayer):
    """The first generation's low-latency kernels: rows by expert, fp8 ones quantised inside its dispatch."""

    layout = Layout.EXPERT_MAJOR
    quantises = True
    room_multiple = MASKED_ROWS_MULTIPLE  # the one expert stage that reads rows by expert asks for it

    _fp8 = False
    _rounded: Mapping[str, bool] = {}

    def use_format(self, row_format: RowFormat) -> None:
        """How rows travel, where that is not how they are given."""
        self._fp8 = row_format is RowFormat.FP8
        self._rounded = {"round_scale": True} if power_of_two_scales(row_format) else {}

    def capacity_rows(self, point: Point) -> int:
        """See `InLayer`: of each expert."""
        return self.room(point) * point.ep_size

    def given_ranks(self, set_index: int) -> Sequence[Given]:
        """See `InLayer`."""
        inputs = self._inputs[set_index]
        return [Given(inputs.rows, inputs.scales)]

    def partial_buffers(self) -> "Sequence[Tensor]":
        """See `InLayer`."""
        return self._partials

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        if not self._fp8:
            super().dispatch(set_index)
            return
        inputs = self._inputs[set_index]
        self._landed = self._buffer.low_latency_dispatch(
            inputs.values, inputs.ids, self._most, self._slots, use_fp8=True, **self._rounded
        )

    def landed_ranks(self, set_index: int) -> Sequence[ExpertRows]:
        """See `InLayer`."""
        import torch

        x, counts, _, _, _ = self._landed
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if scales is None:
            scales = torch.empty(*rows.shape[:2], 0, dtype=torch.float32, device=rows.device)
        assert scales.shape[2] in (0, self._hidden // FP8_BLOCK)
        return [
            ExpertMajorRows(rows=rows.view(torch.uint8), scales=scales, counts=counts, out=self._partials[set_index])
        ]


class LayerDeepEPV2(SplitLayer):
    """`deepep_v2` with experts."""

    name = "layer_deepep_v2"
    exchange_class = V2InLayer


class LayerDeepEPNormal(SplitLayer):
    """`deepep_normal` with experts."""

    name = "layer_deepep_normal"
    exchange_class = NormalInLayer


class LayerDeepEPLowLatency(SplitLayer):
    """`deepep_ll` with experts. In fp8 its dispatch quantises, which no option takes out of the window."""

    name = "layer_deepep_ll"
    exchange_class = LowLatencyInLayer
    row_scaling = RowScaling.FACTOR  # calculate_fp8_scales of its kernels/utils.cuh

    def unsupported(self, point: Point) -> str | None:
        """See `SplitLayer`."""
        if point.dispatch_format not in (RowFormat.BF16, RowFormat.FP8):
            return f"{self.name} dispatches bf16 and fp8 rows, not {point.dispatch_format}"
        if point.dispatch_format is RowFormat.FP8 and not self.options["staging"]:
            return f"{self.name} quantises inside its dispatch, so staging=false is not to be had at fp8"
        if point.dispatch_format is RowFormat.FP8 and point.model.hidden % FP8_BLOCK:
            return f"{self.name} takes fp8 rows of a multiple of {FP8_BLOCK} values, not {point.model.hidden}"
        return super().unsupported(point)

    def prepare_exchange(self, point: Point) -> None:
        """See `SplitLayer`."""
        assert isinstance(self.exchange, LowLatencyInLayer)
        self.exchange.use_format(point.dispatch_format)
