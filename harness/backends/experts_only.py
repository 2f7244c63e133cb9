"""An expert stage alone: one rank's slice of a layer on rows that are in place, on one GPU.

Rows and selections are those that routing of all ranks brings to `rank`. They lie as an exchange would leave them: one
place for each (source, token), or sorted by expert. No rank sends anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Description, Float32, Group, Int32, Shard
from epcross.harness.backends.layer import LayerBackend, expert_shape
from epcross.harness.backends.rank_weights import bytes_of_copies, of_rank, rank_weights
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import BackendKind, Boundary, Domain, Phase, RowFormat, Sharing
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout
from epcross.kernels.experts.quantise import quantise_fp8_rows
from epcross.kernels.experts.rows import ExpertMajorRows, ExpertRows, flat_rows

if TYPE_CHECKING:
    from torch import Tensor


class ExpertsOnly(LayerBackend):
    """One process, which knows the inputs of all ranks."""

    name = "experts_only"
    kind = BackendKind.EXPERTS
    domains = frozenset({Domain.SHARED_GPU})
    phases = frozenset({Phase.EXPERTS})
    boundary: ClassVar = {Phase.EXPERTS: frozenset({Boundary.EXPERTS})}

    _compute: ExpertCompute | None = None

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`rank`: whose slice. `layout`: rank_major, or expert_major as low-latency exchanges leave rows."""
        return {"rank": 0, "layout": str(Layout.RANK_MAJOR)}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        return vendor.too_small(options, rank=0) + vendor.not_among(options, layout=Layout)

    @property
    def rank(self) -> int:
        """Whose experts they are."""
        return vendor.integer(self.options["rank"])

    def unavailable(self) -> str | None:
        """No GPU; what an expert stage needs besides it says itself."""
        return vendor.no_gpu()

    def unsupported(self, point: Point) -> str | None:
        """What rules out the expert stage, or the slice."""
        if point.combine_format is not RowFormat.BF16:
            return f"{self.name} writes bf16 partials; combine_format={point.combine_format} is not one"
        if point.sharing is not Sharing.ONE_LAUNCH:
            return f"{self.name} makes the rows of all ranks in one process; use device=cuda_one_launch"
        if not 0 <= self.rank < point.ep_size:
            return f"rank={self.rank} is none of the {point.ep_size} ranks"
        if point.weight_format is None or self.make_compute is None:
            return f"{self.name} was given no expert stage"
        shape = self._shape(point)
        return "; ".join(shape.problems()) or self.make_compute().unsupported(shape, self._layout)

    def workspace_bytes(self, point: Point) -> int:
        """Weights, rows and outputs."""
        shape = self._shape(point)
        places = shape.capacity_rows * (1 if self._layout is Layout.RANK_MAJOR else shape.num_local_experts)
        return bytes_of_copies(point) + places * 4 * point.model.hidden

    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """See `LayerBackend`."""
        assert self.make_compute is not None
        told = self.make_compute().arithmetic(self._shape(point))
        return [replace(told, output_rounded=True) if self._layout is Layout.EXPERT_MAJOR else told]

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `LayerBackend`."""
        assert self.make_compute is not None
        self._point, self._device = point, vendor.device()
        ids = [
            np.concatenate([shard.batches[index].ids for shard in shards]) for index in range(len(shards[0].batches))
        ]
        weights = rank_weights(point, self.rank, self._device, of_rank(point, self.rank, ids))
        self._copies, self._next_copy = len(weights.copies), 0
        self._compute = self.make_compute()
        self._compute.prepare(self._shape(point), self._layout, weights)
        self._rows: list[ExpertRows] = [self._empty() for _ in shards[0].batches]
        self._made: list[tuple[Int32, Float32]] = [(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))] * len(
            ids
        )
        for index in range(len(ids)):
            self.refill_ranks(index, [shard.batches[index] for shard in shards])
        vendor.synchronize()

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `LayerBackend`."""
        import torch

        point, width = self._point, 2 * self._point.model.hidden
        places, top_k = point.ep_size * self._capacity(point), point.model.top_k
        ids = np.full((places, top_k), -1, np.int32)
        weights = np.zeros((places, top_k), np.float32)
        hidden = torch.zeros(places, point.model.hidden, dtype=torch.bfloat16, device=self._device)
        first = self.rank * point.experts_per_rank
        for source, batch in enumerate(batches):
            begin = source * self._capacity(point)
            at = slice(begin, begin + len(batch.ids))
            here = ((batch.ids >= first) & (batch.ids < first + point.experts_per_rank)).any(axis=1, keepdims=True)
            ids[at], weights[at] = np.where(here, batch.ids, -1), np.where(here, batch.weights, 0)
            token = np.flatnonzero(here)
            rows = torch.from_numpy(np.ascontiguousarray(batch.rows[token, :width]))
            hidden.view(torch.uint8)[torch.from_numpy(begin + token).to(self._device)] = rows.to(self._device)
        self._made[set_index] = ids, weights
        rows, scales = self._quantised(hidden)
        held = self._rows[set_index]
        if isinstance(held, ExpertMajorRows):
            self._by_expert(held, ids, rows, scales)
            return
        one = held.sets[0]
        one.rows.copy_(rows)
        one.scales.copy_(scales)
        one.ids.copy_(torch.from_numpy(ids))
        one.weights.copy_(torch.from_numpy(weights))

    def dispatch(self, set_index: int) -> None:
        """Nothing: rows are in place."""

    def experts(self, set_index: int) -> None:
        """See `LayerBackend`."""
        assert self._compute is not None
        self._compute.run(self._rows[set_index], self._next_copy)
        self._next_copy = (self._next_copy + 1) % self._copies

    def combine(self, set_index: int) -> None:
        """Nothing: what experts write is what is looked at."""

    def outputs_ranks(self, set_index: int) -> "list[Tensor]":
        """bf16 [ep_size * capacity, hidden]: weighted sums of this rank's experts by (source, token); rows by expert
        are weighted and added here, outside the window."""
        import torch

        vendor.synchronize()
        held = self._rows[set_index]
        if not isinstance(held, ExpertMajorRows):
            return [held.out]
        ids, weights = self._made[set_index]
        total = torch.zeros(len(ids), self._point.model.hidden, dtype=torch.float32, device=self._device)
        for expert in range(self._point.experts_per_rank):
            place, selection = np.nonzero(ids == self.rank * self._point.experts_per_rank + expert)
            weight = torch.from_numpy(weights[place, selection]).to(self._device)
            rows = held.out[expert, : len(place)].float() * weight[:, None]
            total.index_add_(0, torch.from_numpy(place).to(self._device), rows)
        return [total.to(torch.bfloat16)]

    def poison(self) -> None:
        """See `Backend`."""
        for rows in self._rows:
            rows.out.fill_(float("nan"))

    def describe(self) -> Description:
        """See `Backend`."""
        assert self._compute is not None
        told = self._compute.describe()
        chosen = [f"{name} {value}" for name, value in told.options.items()]
        if self._shape(self._point).power_of_two_scales:
            chosen.append("scales powers of two")
        return Description(
            version=told.version,
            transport="none",
            algorithm=", ".join(chosen),
            kernels=told.kernels,
            workspace_bytes=self._compute.workspace_bytes,
        )

    def compute_description(self) -> ComputeDescription:
        """See `LayerBackend`."""
        assert self._compute is not None
        return self._compute.describe()

    def close(self) -> None:
        """See `Backend`."""
        compute, self._compute = self._compute, None
        if compute is not None:
            vendor.synchronize()
            compute.release()
            self._rows = []

    @property
    def _layout(self) -> Layout:
        return Layout(self.options["layout"])

    def _capacity(self, point: Point) -> int:
        return max(1, point.max_tokens_per_rank)

    def _room(self, point: Point) -> int:
        """Places that there are; of each expert, if rows lie by expert: whole tiles, as exchanges leave room for."""
        step = 1 if self._layout is Layout.RANK_MAJOR else MASKED_ROWS_MULTIPLE
        return -(-point.ep_size * self._capacity(point) // step) * step

    def _shape(self, point: Point) -> ExpertShape:
        return expert_shape(point, self.rank, capacity_rows=self._room(point))

    def _quantised(self, hidden: "Tensor") -> "tuple[Tensor, Tensor]":
        """Bytes of rows and scales."""
        import torch

        if self._point.dispatch_format is RowFormat.BF16:
            return hidden.view(torch.uint8), torch.empty(len(hidden), 0, dtype=torch.uint8, device=hidden.device)
        rows, scales = quantise_fp8_rows(hidden, power_of_two=self._shape(self._point).power_of_two_scales)
        return rows.view(torch.uint8), scales.contiguous().view(torch.uint8)

    def _empty(self) -> ExpertRows:
        import torch

        point, top_k, hidden = self._point, self._point.model.top_k, self._point.model.hidden
        places = self._room(point)
        fp8 = point.dispatch_format is not RowFormat.BF16

        def zeros(*shape: int, dtype: Any) -> Any:
            return torch.zeros(*shape, dtype=dtype, device=self._device)

        if self._layout is Layout.EXPERT_MAJOR:
            shape = (point.experts_per_rank, places)
            columns = hidden // 128 if fp8 else 0
            return ExpertMajorRows(
                rows=zeros(*shape, hidden if fp8 else 2 * hidden, dtype=torch.uint8),
                scales=zeros(shape[0], columns, -(-places // 4) * 4, dtype=torch.float32).transpose(1, 2)[:, :places],
                counts=zeros(shape[0], dtype=torch.int32),
                out=zeros(*shape, hidden, dtype=torch.bfloat16),
            )
        rows = zeros(places, hidden, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        return flat_rows(
            rows,
            zeros(places, top_k, dtype=torch.int32) - 1,
            zeros(places, top_k, dtype=torch.float32),
            zeros(places, hidden, dtype=torch.bfloat16),
            scales=zeros(places, hidden // 128, dtype=torch.float32) if fp8 else None,
        )

    def _by_expert(self, held: ExpertMajorRows, ids: Int32, rows: "Tensor", scales: "Tensor") -> None:
        import torch

        first = self.rank * self._point.experts_per_rank
        for expert in range(self._point.experts_per_rank):
            place = torch.from_numpy(np.nonzero(ids == first + expert)[0]).to(self._device)
            held.counts[expert] = len(place)
            held.rows[expert, : len(place)] = rows[place]
            if held.scales.shape[2]:
                held.scales[expert, : len(place)] = scales.view(torch.float32)[place]
