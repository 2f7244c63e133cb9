"""A layer of two parts: an exchange that is measured by itself too, and an expert stage (`compute`) between its calls.

Nothing lies between the two but what the library leaves: experts read rows where they landed and write what `combine`
reads. What an adapter of an exchange must add for that is `InLayer`.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Description, Group, Shard
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.backends.kept_rows import keep_again, kept, put_back
from epcross.harness.backends.layer import LayerBackend, expert_shape, layer_boundaries
from epcross.harness.backends.rank_weights import bytes_of_copies, rank_weights, shared_out
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, Phase, RowFormat
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import FP8_BLOCK, Arithmetic, ExpertShape, Layout
from epcross.kernels.experts.quantise import quantise_rows
from epcross.kernels.experts.rows import ExpertRows
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor


class Given(NamedTuple):
    """Where an exchange reads a rank's rows of one set. T = tokens of the rank."""

    rows: "Tensor"  # uint8 [T, at least row_bytes]
    scales: "Tensor"  # uint8 [T, at least scale_bytes]


class InLayer(GpuBackend):
    """An adapter of an exchange that a layer can be built around."""

    layout: ClassVar[Layout] = Layout.RANK_MAJOR
    quantises: ClassVar[bool] = False
    """Whether `dispatch` takes BF16 rows and quantises them itself."""
    local_slots: ClassVar[bool] = False
    """Whether ids of landed rows count from the rank's first slot."""

    @abstractmethod
    def capacity_rows(self, point: Point) -> int:
        """Places of a landing set, or of an expert: what `ExpertRows.capacity_rows` will be."""

    @abstractmethod
    def given_ranks(self, set_index: int) -> Sequence[Given]:
        """Buffers that `dispatch` of this set reads, of each rank of this process."""

    @abstractmethod
    def partial_buffers(self) -> "Sequence[Tensor]":
        """What `combine` reads, as far as it is known yet: to be poisoned, so that no stale partial passes for a new
        one."""

    @abstractmethod
    def landed_ranks(self, set_index: int) -> Sequence[ExpertRows]:
        """What the last `dispatch`, of this set, left, with `out` where `combine` will read. Called between the two,
        also in a capture; may enqueue."""


class SplitLayer(LayerBackend):
    """See the module. A subclass names the exchange."""

    exchange_class: ClassVar[type[InLayer]]
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]]

    exchange: InLayer

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "exchange_class" in vars(cls):
            made = cls.exchange_class
            cls.contract_shape = made.contract_shape
            cls.domains, cls.scopes, cls.graph = made.domains, made.scopes, made.graph
            cls.host_sync, cls.weights_by = made.host_sync, made.weights_by
            cls.boundary = _boundaries(made, before=True, inside=made.quantises)

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        super().__init__(options)
        self.exchange = self.make_exchange()
        self._staging = bool(self.options["staging"])

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """Those of the exchange. `staging`: whether hidden states are quantised inside the window; off, it is done
        before. BF16 rows are sent from where they are, so there is nothing to stage."""
        return {**cls.exchange_class.option_defaults(), "staging": True}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> Sequence[str]:
        """See `Backend`. Those of the exchange."""
        own = cls.exchange_class.option_defaults()
        return cls.exchange_class.option_problems({name: options[name] for name in own})

    def make_exchange(self) -> InLayer:
        """The exchange with its own of the options."""
        own = self.exchange_class.option_defaults()
        return self.exchange_class({name: value for name, value in self.options.items() if name in own})

    def unavailable(self) -> str | None:
        """See `Backend`. The expert stage is asked beside, since a layer may have any."""
        return self.exchange.unavailable()

    def unsupported(self, point: Point) -> str | None:
        """What rules out the exchange, the experts, or both."""
        if point.weight_format is None:
            return f"{self.name} is a layer, and the point has no weights"
        shape = self._shape(point, 0)
        found = [self.exchange.unsupported(_sent(self.exchange, point)), *shape.problems()]
        if self.make_compute is not None and not any(found):
            compute = self.make_compute()
            found.append(compute.unsupported(shape, self.exchange.layout))
        return "; ".join(filter(None, found)) or None

    def refused_here(self, point: Point) -> str | None:
        """What rules out the exchange in this process."""
        return self.exchange.refused_here(_sent(self.exchange, point))

    def workspace_bytes(self, point: Point) -> int:
        """Of the exchange, and the weights."""
        return self.exchange.workspace_bytes(_sent(self.exchange, point)) + bytes_of_copies(point)

    def prebuild(self) -> None:
        """See `Backend`."""
        self.exchange.prebuild()

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `LayerBackend`."""
        import torch

        assert self.make_compute is not None, f"{self.name} was given no expert stage"
        self._point, self._device = point, vendor.device()
        self._quantises = point.dispatch_format is not RowFormat.BF16 and not self.exchange.quantises
        self._bind_boundary()
        sent = _sent(self.exchange, point)
        self.prepare_exchange(point)
        empty = [
            replace(shard, batches=tuple(_without_rows(sent, batch) for batch in shard.batches)) for shard in shards
        ]
        self.exchange.prepare_ranks(sent, empty, group)
        self._hidden = [
            [
                torch.zeros(point.tokens[shard.rank], point.model.hidden, dtype=torch.bfloat16, device=self._device)
                for shard in shards
            ]
            for _ in shards[0].batches
        ]
        self._computes: list[ExpertCompute] = []
        self._copies = 1
        for shard in shards:
            weights = rank_weights(
                point, shard.rank, self._device, shared_out(point, [batch.ids for batch in shard.batches])
            )
            self._copies = max(self._copies, len(weights.copies))
            compute = self.make_compute()
            compute.prepare(self._shape(point, shard.rank), self.exchange.layout, weights)
            self._computes.append(compute)
        self._next_copy = 0
        self._kept: dict[int, list[ExpertRows]] = {}
        for index in range(len(shards[0].batches)):
            self.refill_ranks(index, [shard.batches[index] for shard in shards])
        vendor.synchronize()

    def prepare_exchange(self, point: Point) -> None:
        """What the exchange must know of a layer's point before its own `prepare_ranks`."""
        return

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `LayerBackend`."""
        import torch

        sent = _sent(self.exchange, self._point)
        self.exchange.refill_ranks(set_index, [_without_rows(sent, batch) for batch in batches])
        for held, batch in zip(self._hidden[set_index], batches, strict=True):
            bits = np.ascontiguousarray(batch.rows[:, : 2 * self._point.model.hidden])
            held.view(torch.uint8).copy_(torch.from_numpy(bits))
        if not self._quantises:
            width = 2 * self._point.model.hidden
            for given, held in zip(self.exchange.given_ranks(set_index), self._hidden[set_index], strict=True):
                given.rows[:, :width].copy_(held.view(torch.uint8))
        elif not self._staging:
            self._quantise(set_index)

    def dispatch(self, set_index: int) -> None:
        """See `LayerBackend`."""
        self.before(set_index)
        self.exchange.dispatch(set_index)

    def before(self, set_index: int) -> None:
        """Quantise a set's hidden states to where the exchange reads them, unless that was done outside the window."""
        if self._quantises and self._staging:
            self._quantise(set_index)

    def parts(self) -> Sequence[tuple[Phase, Callable[[int], None]]]:
        """See `LayerBackend`."""
        return (
            (Phase.STAGE, self.before),
            (Phase.DISPATCH, self.exchange.dispatch),
            (Phase.EXPERTS, self.experts),
            (Phase.COMBINE, self.combine),
        )

    def experts(self, set_index: int) -> None:
        """See `LayerBackend`."""
        self._run(self.exchange.landed_ranks(set_index))

    def combine(self, set_index: int) -> None:
        """See `LayerBackend`."""
        self.exchange.combine(set_index)

    def keep(self, set_index: int) -> None:
        """See `LayerBackend`."""
        vendor.synchronize()
        landed, before = self.exchange.landed_ranks(set_index), self._kept.get(set_index)
        self._kept[set_index] = (
            [kept(rows) for rows in landed] if before is None else list(map(keep_again, before, landed))
        )

    def in_place(self, set_index: int) -> None:
        """See `LayerBackend`."""
        self.before(set_index)
        self._run(self._kept[set_index])

    def in_place_ranks(self, set_index: int) -> "list[Tensor]":
        """See `LayerBackend`."""
        vendor.synchronize()
        return [rows.out for rows in self._kept[set_index]]

    def restore(self, set_index: int) -> None:
        """See `LayerBackend`."""
        for own, rows in zip(self._kept[set_index], self.exchange.landed_ranks(set_index), strict=True):
            put_back(own, rows)

    def outputs_ranks(self, set_index: int) -> "Sequence[Tensor]":
        """See `LayerBackend`."""
        return self.exchange.combined_ranks(set_index)

    def poison(self) -> None:
        """See `Backend`. What experts write is poisoned too: a stale partial must not pass for a new one."""
        self.exchange.poison()
        for buffer in self.exchange.partial_buffers():
            buffer.fill_(float("nan"))
        for held in self._kept.values():
            for rows in held:
                rows.out.fill_(float("nan"))

    def drain_timing(self) -> None:
        """See `Backend`."""
        self.exchange.drain_timing()

    def describe(self) -> Description:
        """See `Backend`."""
        told, experts = self.exchange.describe(), self.compute_description()
        own = sum(compute.workspace_bytes for compute in self._computes) // len(self._computes)
        chosen = [f"{name} {value}" for name, value in experts.options.items()]
        if self._shape(self._point, 0).power_of_two_scales:
            chosen.append("scales powers of two")
        return replace(
            told,
            algorithm=", ".join(filter(None, [told.algorithm, *chosen, f"weights in {self._copies} copies"])),
            kernels=(*told.kernels, *experts.kernels),
            workspace_bytes=told.workspace_bytes + own,
        )

    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """See `LayerBackend`. Rows by expert go back one by one, in BF16, before anybody weights them."""
        assert self.make_compute is not None
        told = self.make_compute().arithmetic(self._shape(point, 0))
        return [replace(told, output_rounded=True) if self.exchange.layout is Layout.EXPERT_MAJOR else told]

    def compute_description(self) -> ComputeDescription:
        """See `LayerBackend`."""
        return self._computes[0].describe()

    def close(self) -> None:
        """See `Backend`."""
        computes, self._computes = getattr(self, "_computes", []), []
        vendor.synchronize()
        for compute in computes:
            compute.release()
        self._kept, self._hidden = {}, []
        self.exchange.close()

    def _run(self, ranks: Sequence[ExpertRows]) -> None:
        for compute, rows in zip(self._computes, ranks, strict=True):
            compute.run(rows, self._next_copy)
        self._next_copy = (self._next_copy + 1) % self._copies

    def _quantise(self, set_index: int) -> None:
        import torch

        width, powers = self._point.model.hidden, self._shape(self._point, 0).power_of_two_scales
        for given, hidden in zip(self.exchange.given_ranks(set_index), self._hidden[set_index], strict=True):
            rows = given.rows[:, :width].view(torch.float8_e4m3fn)
            scales = given.scales[:, : 4 * (width // FP8_BLOCK)].view(torch.float32)
            quantise_rows(hidden, rows, scales, power_of_two=powers)

    def _shape(self, point: Point, rank: int) -> ExpertShape:
        shape = expert_shape(point, rank, capacity_rows=self.exchange.capacity_rows(_sent(self.exchange, point)))
        return replace(shape, first_slot=0) if self.exchange.local_slots else shape

    def _bind_boundary(self) -> None:
        """What the window holds at this point: quantisation only where there is some."""
        inside = self.exchange.quantises and self._point.dispatch_format is not RowFormat.BF16
        before = self._quantises and self._staging
        vars(self)["boundary"] = _boundaries(self.exchange, before=before, inside=inside)


def _boundaries(exchange: "InLayer | type[InLayer]", *, before: bool, inside: bool) -> dict[Phase, frozenset[Boundary]]:
    """Of a layer that quantises before its exchange, or whose exchange does so inside its dispatch."""
    dispatch, combine = exchange.boundary[Phase.DISPATCH], exchange.boundary[Phase.COMBINE]
    quantise = frozenset({Boundary.QUANTISE})
    return layer_boundaries(
        dispatch | (quantise if inside else frozenset()), combine, before=quantise if before else frozenset()
    )


def _sent(exchange: InLayer, point: Point) -> Point:
    """The point as the exchange sees it: one that quantises is given BF16 rows."""
    return replace(point, dispatch_format=RowFormat.BF16) if exchange.quantises else point


def _without_rows(point: Point, batch: Batch) -> Batch:
    """Ids and weights as they are, and room for rows in the format that travels."""
    size, tokens = row_size(point.dispatch_format, point.model.hidden), len(batch.ids)
    return replace(
        batch,
        rows=np.zeros((tokens, size.padded_row_bytes), np.uint8),
        scales=np.zeros((tokens, size.padded_scale_bytes), np.uint8),
    )
