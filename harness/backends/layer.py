"""The contract of a layer: from BF16 hidden states with ids and weights to BF16 hidden states, on a GPU.

Beside `gpu.GpuBackend`, with the same processes, ranks and streams. A harness times one of these as it times a pair:

    dispatch(set)   hidden states are quantised (or staged) and sent to the ranks of their experts
    experts(set)    GEMM1, SwiGLU, re-quantisation, GEMM2, weighting, on the rows where they landed
    combine(set)    each rank's share goes back and is added

    keep(set)       right after `dispatch(set)`: remember the rows, so that
    in_place(set)   does the same work without any exchange: quantise, experts. What a layer takes longer is its
                    communication
    restore(set)    what `in_place` made is put where `combine` reads, to be checked as the layer's own

`kind` says how much of that there is: a fused layer does all of it in `experts` and has nothing to keep; an expert
stage alone has neither `dispatch` nor `combine`. Weights are `make_weights(shape, seed=WEIGHT_SEED)` of the point's
format, so that whoever checks can make them again. Inputs are rows of hidden states in BF16, whatever the dispatch
format.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from epcross.harness.backends.base import Backend, Batch, BF16Bits, Group, Received, Shard
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind, Boundary, GraphSupport, Phase
from epcross.kernels.experts.capability import power_of_two_scales
from epcross.kernels.experts.compute import ComputeDescription
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, RowScaling
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    from torch import Tensor

    from epcross.harness.backends.computes import MakeCompute

WEIGHT_SEED = 1
"""Of the model's weights; the same for every backend, so that one oracle serves all."""


class LayerBackend(Backend):
    """A layer, or the expert stage of one. `options` may hold `staging`: whether inputs are brought into the form and
    place that the library reads inside the timed window, or have been before."""

    kind: ClassVar[BackendKind] = BackendKind.LAYER
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.DISPATCH, Phase.COMBINE, Phase.LAYER, Phase.LAYER_COMM})
    host_sync: ClassVar[bool] = False
    graph: ClassVar[GraphSupport] = GraphSupport.YES

    row_scaling: ClassVar[RowScaling] = RowScaling.QUOTIENT
    """How hidden states become fp8 rows: as `quantise_rows` does it, unless the library does. For the oracle."""

    make_compute: "MakeCompute | None" = None

    def use_compute(self, make: "MakeCompute") -> None:
        """The expert stage to run: what makes one, an instance for each rank. Before anything else is called."""
        self.make_compute = make

    @abstractmethod
    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """As `GpuBackend.prepare_ranks`; rows of the batches are BF16 hidden states."""

    @abstractmethod
    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """New inputs of one set, in place; where `staging` is off they are also brought to where they are read."""

    @abstractmethod
    def outputs_ranks(self, set_index: int) -> "Sequence[Tensor]":
        """The hidden states [T, hidden] in BF16 that the last layer of this set left for each rank of this process.
        Waits for the device; raises `WaitExpired` if a bounded wait of a kernel ran out."""

    def parts(self) -> Sequence[tuple[Phase, Callable[[int], None]]]:
        """The calls that a layer is made of, in order, each with its name in a trace. What comes before the exchange
        may stand apart from it, as `stage`."""
        return ((Phase.DISPATCH, self.dispatch), (Phase.EXPERTS, self.experts), (Phase.COMBINE, self.combine))

    @abstractmethod
    def arithmetics(self, point: Point) -> Sequence[Arithmetic]:
        """Where the experts round, for the oracle; several where a library chooses by the shape and does not say what:
        outputs must then be right by one and the same of them. Needs no GPU."""

    def keep(self, set_index: int) -> None:
        """See above, in the same memory each time, since graphs of `in_place` are replayed with what is kept later.
        Nothing for kinds without an exchange of their own."""
        return

    def in_place(self, set_index: int) -> None:
        """See above. By default the experts, which is all that kinds without an exchange have."""
        self.experts(set_index)

    def in_place_ranks(self, set_index: int) -> "Sequence[Tensor]":
        """What the last `in_place` of this set wrote for each rank; empty where nothing is kept. Waits."""
        return ()

    def restore(self, set_index: int) -> None:
        """See above."""
        return

    def compute_description(self) -> ComputeDescription | None:
        """What ran the experts; None where that is part of what `describe` says."""
        return None

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        """See `Backend`."""
        self.prepare_ranks(point, (shard,), group)

    def refill(self, set_index: int, batch: Batch) -> None:
        """See `Backend`."""
        self.refill_ranks(set_index, (batch,))

    def received(self, set_index: int) -> Received:
        """A layer's rows stay inside: what is checked is what comes out."""
        raise NotImplementedError(f"{self.name} is a layer, whose outputs are checked and not its rows")

    def stage(self, set_index: int, partials: BF16Bits) -> None:
        """A layer has experts of its own."""
        raise NotImplementedError(f"{self.name} is a layer, whose experts are its own")

    def combined(self, set_index: int) -> BF16Bits:
        """See `Backend`: the outputs."""
        import torch

        (out,) = self.outputs_ranks(set_index)
        return np.array(out.contiguous().view(torch.int16).cpu().numpy(), copy=True).view(np.uint16)


def expert_shape(point: Point, rank: int, *, capacity_rows: int = 1) -> ExpertShape:
    """The experts that `rank` holds at a layer's point, and the format in which rows come to them on this machine."""
    assert point.weight_format is not None
    model = point.model
    return ExpertShape(
        num_local_experts=point.experts_per_rank,
        first_slot=rank * point.experts_per_rank,
        top_k=model.top_k,
        hidden=model.hidden,
        intermediate=model.intermediate,
        row_format=point.dispatch_format,
        weight_format=point.weight_format,
        capacity_rows=capacity_rows,
        power_of_two_scales=power_of_two_scales(point.dispatch_format),
        expected_rows_per_expert=max(1, sum(point.tokens) * model.top_k // point.placement.num_slots),
    )


def hidden_point(point: Point) -> Point:
    """The point whose rows are a layer's inputs: the same tokens, in BF16."""
    return replace(point, dispatch_format=RowFormat.BF16)


def layer_boundaries(
    dispatch: frozenset[Boundary],
    combine: frozenset[Boundary],
    *,
    before: frozenset[Boundary] = frozenset(),
    apart: bool = True,
) -> dict[Phase, frozenset[Boundary]]:
    """What lies inside each phase of a layer around these.

    Args:
        dispatch, combine: of the exchange, what its library does inside them included.
        before: what the layer does ahead of it.
        apart: whether the exchange can be told from the experts.
    """
    whole = before | dispatch | combine | {Boundary.EXPERTS}
    if not apart:
        return {Phase.LAYER: whole}
    return {
        Phase.DISPATCH: dispatch,
        Phase.COMBINE: combine,
        Phase.LAYER: whole,
        Phase.LAYER_COMM: dispatch | combine,
    }
