"""Layers whose exchange and experts are one kernel, or kernels that only work together: what their adapters share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Group, Reduction, Shard
from epcross.harness.backends.layer import LayerBackend
from epcross.harness.backends.rank_weights import bytes_of_copies, rank_weights, shared_out
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import BackendKind, Boundary, Domain, Phase, WeightsBy
from epcross.kernels.experts.formats import WeightFormat
from epcross.kernels.experts.weights import WeightCopy
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    from torch import Tensor

Formats = tuple[RowFormat, WeightFormat]
"""Of activations and of weights."""


class FusedInputs:
    """One set of a rank: hidden states, ids and weights as the library takes them, and outputs. T = tokens."""

    def __init__(self, point: Point, batch: Batch, device: str, ids_dtype: Any) -> None:
        import torch

        tokens, top_k = len(batch.ids), point.model.top_k
        self.hidden: Tensor = torch.zeros(tokens, point.model.hidden, dtype=torch.bfloat16, device=device)
        self.ids: Tensor = torch.full((tokens, top_k), -1, dtype=ids_dtype, device=device)
        self.weights: Tensor = torch.zeros(tokens, top_k, dtype=torch.float32, device=device)
        self.out: Tensor = torch.zeros_like(self.hidden)
        self.refill(batch)

    def refill(self, batch: Batch) -> None:
        """New contents, in place."""
        import torch

        rows = np.ascontiguousarray(batch.rows[:, : 2 * self.hidden.shape[1]])
        self.hidden.view(torch.uint8).copy_(torch.from_numpy(rows))
        self.ids.copy_(torch.from_numpy(np.ascontiguousarray(batch.ids)))
        self.weights.copy_(torch.from_numpy(np.ascontiguousarray(batch.weights)))


class FusedLayer(LayerBackend):
    """One rank a process. With `staging` the inputs are quantised and copied into the library's buffer inside the
    window, one buffer for all sets, as an engine does; without, every set has a buffer of its own, filled before."""

    kind = BackendKind.FUSED
    domains = frozenset({Domain.NVLINK, Domain.SHARED_GPU})
    phases = frozenset({Phase.LAYER})
    weights_by = WeightsBy.COMBINE  # selections are added one by one, whoever has multiplied them
    reduction = Reduction(order="unordered", accumulate="fp32", exact=False)
    formats: ClassVar[frozenset[Formats]]
    ids_type: ClassVar[str] = "int64"
    multiple: ClassVar[int] = 128  # of hidden and intermediate
    stages: ClassVar[frozenset[Boundary]] = frozenset({Boundary.STAGE})  # what `staging` puts inside the window

    _open = False
    _buffers: "Sequence[Any]" = ()  # of the library; none yet, if `make` failed

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`staging`: whether inputs are brought into the library's buffer inside the timed window."""
        return {"staging": True}

    def unsupported(self, point: Point) -> str | None:
        """Formats, sizes, and ranks with unequal tokens, for which these libraries promise nothing."""
        given = (point.dispatch_format, point.weight_format)
        problems = []
        if given not in self.formats:
            known = ", ".join(sorted(f"{rows} x {weights}" for rows, weights in self.formats))
            problems.append(f"{self.name} computes {known} (activations x weights), not {given[0]} x {given[1]}")
        if point.combine_format is not RowFormat.BF16:
            problems.append(f"{self.name} sends bf16 partials back; combine_format={point.combine_format} is not one")
        model = point.model
        for name, value in (("hidden", model.hidden), ("intermediate", model.intermediate)):
            if value % self.multiple:
                problems.append(f"{self.name} takes {name} of a multiple of {self.multiple}, not {value}")
        if len(set(point.tokens)) > 1 or not min(point.tokens):
            problems.append(f"{self.name} takes the same tokens on every rank, at least one, not {list(point.tokens)}")
        if model.top_k > point.placement.num_slots:
            problems.append(f"top_k={model.top_k} is above num_slots={point.placement.num_slots}")
        return "; ".join([*problems, *self.limits(point)]) or None

    def limits(self, point: Point) -> list[str]:
        """What else rules a point out."""
        return []

    def workspace_bytes(self, point: Point) -> int:
        """About the library's buffer: rows of every selection that may come here, twice, and the weights."""
        rows = point.ep_size * max(1, point.max_tokens_per_rank) * min(point.model.top_k, point.experts_per_rank)
        return rows * (point.model.hidden + point.model.intermediate) * 2 + bytes_of_copies(point)

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `LayerBackend`."""
        import torch

        (shard,) = shards
        self._point, self._rank, self._group = point, shard.rank, group
        self._device, self._staging = vendor.device(), bool(self.options["staging"])
        ids_dtype = getattr(torch, self.ids_type)
        self._inputs = [FusedInputs(point, batch, self._device, ids_dtype) for batch in shard.batches]
        weights = rank_weights(
            point, shard.rank, self._device, shared_out(point, [batch.ids for batch in shard.batches])
        )
        self._open = True
        quantises = {Boundary.QUANTISE} if point.dispatch_format is not RowFormat.BF16 else set()
        staged = self.stages | quantises if self._staging else frozenset()
        vars(self)["boundary"] = {Phase.LAYER: type(self).boundary[Phase.LAYER] | staged}
        self.make(vendor.torch_group(group, "gloo"), 1 if self._staging else len(self._inputs))
        self._weights = [self.transformed(copy) for copy in weights.copies]
        self._next_copy = 0
        if not self._staging:
            for index in range(len(self._inputs)):
                self.stage_set(index)
        vendor.synchronize()

    @abstractmethod
    def make(self, torch_group: Any, buffers: int) -> None:
        """Make the library's buffers: one, or one for each set. Collective."""

    @abstractmethod
    def transformed(self, copy: WeightCopy) -> Any:
        """The weights in the library's layout: the same values, in other places."""

    @abstractmethod
    def stage_set(self, set_index: int) -> None:
        """Enqueue what brings a set's inputs into its buffer (`buffer_of`)."""

    @abstractmethod
    def compute_set(self, set_index: int, weights: Any) -> None:
        """Enqueue the layer on what is staged, into the set's `out`."""

    def buffer_of(self, set_index: int) -> int:
        """Which of the buffers a set is staged in."""
        return 0 if self._staging else set_index

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `LayerBackend`."""
        (batch,) = batches
        self._inputs[set_index].refill(batch)
        if not self._staging:
            self.stage_set(set_index)

    def dispatch(self, set_index: int) -> None:
        """See `LayerBackend`: only what comes before the kernel."""
        if self._staging:
            self.stage_set(set_index)

    def experts(self, set_index: int) -> None:
        """See `LayerBackend`: everything."""
        self.compute_set(set_index, self._weights[self._next_copy])
        self._next_copy = (self._next_copy + 1) % len(self._weights)

    def combine(self, set_index: int) -> None:
        """See `LayerBackend`."""

    def outputs_ranks(self, set_index: int) -> "Sequence[Tensor]":
        """See `LayerBackend`."""
        vendor.synchronize()
        return [self._inputs[set_index].out]

    def poison(self) -> None:
        """See `Backend`."""
        for held in self._inputs:
            held.out.fill_(float("nan"))

    def close(self) -> None:
        """See `Backend`. All ranks let go together, when none of them computes any more."""
        was_open, self._open = self._open, False
        if was_open:
            vendor.synchronize()
            self._group.barrier()
            self.release()
            self._inputs, self._weights = [], []

    @abstractmethod
    def release(self) -> None:
        """Let go of the library's buffers."""
