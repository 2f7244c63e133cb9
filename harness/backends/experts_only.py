"""The expert stage of one rank alone, on one GPU: rank 0's share of a group's routing, on rows that lie where an
exchange would have left them.

    rank_major     [source rank, its token] with a header for each, as our exchange lands rows; weighted sums come out
    expert_major   [expert, place] with a count for each; outputs come out one by one, and whoever combines weights them

Rows are quantised before the window. The other ranks of the group only lend their tokens.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Description, Group, Shard
from epcross.harness.backends.layer import LayerBackend, expert_shape
from epcross.harness.backends.rank_weights import rank_weights
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import BackendKind, Boundary, Domain, Phase, RowFormat, Sharing
from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout
from epcross.kernels.experts.landing import ExpertMajorLanding, RankMajorLanding
from epcross.kernels.experts.quantise import quantise_fp8_rows

if TYPE_CHECKING:
    from torch import Tensor


class ExpertsOnly(LayerBackend):
    """One compute on rank 0's rows."""

    name = "experts_only"
    kind = BackendKind.EXPERTS
    phases = frozenset({Phase.EXPERTS})
    domains = frozenset({Domain.SHARED_GPU})
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {Phase.EXPERTS: frozenset({Boundary.EXPERTS})}

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`layout`: how rows lie, `rank_major` or `expert_major`."""
        return {"layout": str(Layout.RANK_MAJOR)}

    def unavailable(self) -> str | None:
        """Needs torch; the expert stage says what else."""
        return vendor.no_gpu()

    def unsupported(self, point: Point) -> str | None:
        """One process with all tokens, and what rules out the experts."""
        if point.weight_format is None:
            return f"{self.name} is an expert stage, and the point has no weights"
        if point.sharing is not Sharing.ONE_LAUNCH:
            return f"{self.name} is one rank's work with all ranks' tokens in one process; use device=cuda_one_launch"
        if self.options["layout"] not in list(Layout):
            return f"layout={self.options['layout']} must be {' or '.join(Layout)}"
        shape = self._shape(point)
        found = list(shape.problems())
        if self.make_compute is not None and not found:
            found = list(filter(None, [self.make_compute().unsupported(shape, self._layout)]))
        return "; ".join(found) or None

    def workspace_bytes(self, point: Point) -> int:
        """The weights; rows are small beside them."""
        return point.experts_per_rank * self._shape(point).bytes_per_expert

    def served_slots(self, point: Point) -> range:
        """See `LayerBackend`: those of rank 0."""
        return range(point.experts_per_rank)

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `LayerBackend`."""
        assert self.make_compute is not None, f"{self.name} was given no expert stage"
        self._point, self._device = point, vendor.device()
        shape, sets = self._shape(point), range(len(shards[0].batches))
        made = RankMajorLanding if self._layout is Layout.RANK_MAJOR else ExpertMajorLanding
        self._landings = [made(shape, point.ep_size, self._device) for _ in sets]
        every = [np.concatenate([shard.batches[number].ids for shard in shards]) for number in sets]
        weights = rank_weights(point, 0, self._device, every)
        self._copies, self._next_copy = len(weights.copies), 0
        self._compute: ExpertCompute = self.make_compute()
        self._compute.prepare(shape, self._layout, weights)
        for number in sets:
            self.refill_ranks(number, [shard.batches[number] for shard in shards])
        vendor.synchronize()

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `LayerBackend`."""
        import torch

        landing, width = self._landings[set_index], 2 * self._point.model.hidden
        for source, batch in enumerate(batches):
            ids = torch.from_numpy(np.ascontiguousarray(batch.ids)).to(self._device)
            weights = torch.from_numpy(np.ascontiguousarray(batch.weights)).to(self._device)
            hidden = torch.empty((len(ids), width // 2), dtype=torch.bfloat16, device=self._device)
            hidden.view(torch.uint8).copy_(torch.from_numpy(np.ascontiguousarray(batch.rows[:, :width])))
            rows, scales = hidden, None
            if self._point.dispatch_format is RowFormat.FP8:
                rows, scales = quantise_fp8_rows(hidden)
            rows = rows.view(torch.uint8)
            landing.land(source, rows, scales, ids, weights)

    def dispatch(self, set_index: int) -> None:
        """Nothing: rows are there."""

    def experts(self, set_index: int) -> None:
        """See `LayerBackend`."""
        self._compute.run(self._landings[set_index].rows, self._next_copy)
        self._next_copy = (self._next_copy + 1) % self._copies

    def combine(self, set_index: int) -> None:
        """Nothing: outputs stay."""

    def outputs_ranks(self, set_index: int) -> "Sequence[Tensor]":
        """For each rank's tokens what rank 0's experts made of them; zeros for tokens that chose none of these."""
        vendor.synchronize()
        landing = self._landings[set_index]
        return [landing.sums(source)[:count] for source, count in enumerate(self._point.tokens)]

    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """See `LayerBackend`."""
        assert self.make_compute is not None
        return [self.make_compute().arithmetic(self._shape(point))]

    def poison(self) -> None:
        """See `Backend`."""
        for landing in self._landings:
            landing.rows.out.fill_(float("nan"))

    def describe(self) -> Description:
        """See `Backend`."""
        told = self.compute_description()
        chosen = [f"{name} {value}" for name, value in told.options.items()]
        return Description(
            version=told.version,
            algorithm=", ".join([*chosen, f"weights in {self._copies} copies"]),
            transport="none",
            kernels=told.kernels,
            workspace_bytes=self._compute.workspace_bytes,
        )

    def compute_description(self) -> ComputeDescription:
        """See `LayerBackend`."""
        return self._compute.describe()

    def close(self) -> None:
        """See `Backend`."""
        vendor.synchronize()
        if compute := vars(self).pop("_compute", None):
            compute.release()
        self._landings = []

    @property
    def _layout(self) -> Layout:
        return Layout(str(self.options["layout"]))

    def _shape(self, point: Point) -> ExpertShape:
        return expert_shape(point, 0, capacity_rows=point.ep_size * max(1, point.max_tokens_per_rank))
