"""A layer whose exchange is the stand-in in plain torch, all ranks in one process: the whole path without a GPU."""

from dataclasses import replace
from typing import Any

from tests._points import small_point
from tests._torch_one_launch import torch_one_launch

from epcross.harness.backends.split_layer import Given, InLayer, SplitLayer
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind, Domain, Regime, RowFormat, Sharing
from epcross.kernels.experts import oracle
from epcross.kernels.experts.compute import ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, WeightFormat
from epcross.kernels.experts.intermediate import requantised
from epcross.kernels.experts.rows import ExpertMajorRows, flat_rows
from epcross.kernels.experts.weights import decoded


class TorchInLayer(torch_one_launch(), InLayer):
    """Every row goes to every rank; ids of rows that a rank has no use for are -1."""

    def capacity_rows(self, point: Point) -> int:
        return point.ep_size * point.max_tokens_per_rank

    def given_ranks(self, set_index: int) -> list[Given]:
        return [
            Given(self.rows[set_index, rank, :count], self.scales[set_index, rank, :count])
            for rank, count in enumerate(self.point.tokens)
        ]

    def partial_buffers(self) -> list[Any]:
        return [self.partials]

    def landed_ranks(self, set_index: int) -> list[Any]:
        torch, found = self.torch, []
        for rank in range(self.ep):
            ids = torch.where(self.present[rank][..., None], self.ids[set_index], -1)
            found.append(
                flat_rows(
                    self.landed[rank].flatten(0, 1)[:, : self.row_bytes],
                    ids.flatten(0, 1),
                    self.weights[set_index].flatten(0, 1),
                    self.partials[rank].flatten(0, 1),
                    scales=self._scales(rank),
                )
            )
        return found

    def _scales(self, rank: int) -> Any:
        if self.point.dispatch_format is RowFormat.BF16:
            return None
        return self.landed_scales[rank].flatten(0, 1)[:, : self.point.model.hidden // 32]

    @property
    def row_bytes(self) -> int:
        return self.point.model.hidden * (2 if self.point.dispatch_format is RowFormat.BF16 else 1)


class TorchLayer(SplitLayer):
    name = "torch_layer"
    exchange_class = TorchInLayer


class PlainExperts(ExpertCompute):
    """A loop over experts in fp32, in any format: right, and a base for what goes wrong."""

    name = "plain_experts"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, shape: Any, layout: Any) -> str | None:
        return next(iter(shape.problems()), None)

    def arithmetic(self, shape: Any) -> Arithmetic:
        return Arithmetic(intermediate=shape.row_format, power_of_two_scales=shape.power_of_two_scales)

    def prepare(self, shape: Any, layout: Any, weights: Any) -> None:
        import torch

        self.shape = shape
        self.copies = [
            [
                decoded(shape.weight_format, values, scales, torch.float32)
                for values, scales in ((c.gate_up, c.gate_up_scales), (c.down, c.down_scales))
            ]
            for c in map(self.changed, weights.copies)
        ]

    def changed(self, copy: Any) -> Any:
        """The weights, as a broken layer has them."""
        return copy

    def ids_of(self, rows: Any) -> Any:
        """Slots that the rows of the set in use chose, likewise; -1 in places where there is none."""
        import torch

        number = rows.set_index()
        return torch.where(rows.present(number)[:, None], rows.sets[number].ids, -1)

    def weights_of(self, rows: Any) -> Any:
        """Routing weights, likewise."""
        return rows.sets[rows.set_index()].weights

    def run(self, rows: Any, weights_copy: int = 0) -> None:
        import torch

        matrices = self.copies[weights_copy % len(self.copies)]
        if isinstance(rows, ExpertMajorRows):
            for expert, count in enumerate(rows.counts.tolist()):
                made = self._made(matrices, expert, rows.rows[expert, :count], rows.scales[expert, :count])
                rows.out[expert, :count] = made.to(torch.bfloat16)
            return
        one, ids, weights = rows.sets[rows.set_index()], self.ids_of(rows), self.weights_of(rows)
        first, total = self.shape.first_slot, torch.zeros(rows.out.shape)
        for expert in range(self.shape.num_local_experts):
            row, selection = (ids == first + expert).nonzero(as_tuple=True)
            made = self._made(matrices, expert, one.rows[row], one.scales[row])
            total.index_add_(0, row, made * weights[row, selection, None])
        chosen = (rows.present(rows.set_index())[:, None] & (one.ids >= first) & (one.ids <= self.shape.last_slot)).any(
            1
        )
        rows.out[chosen] = total[chosen].to(torch.bfloat16)

    def _made(self, matrices: Any, expert: int, rows: Any, scales: Any) -> Any:
        import torch

        gate_up, down = matrices
        x = oracle.row_values(self.shape.row_format, rows.contiguous(), scales.contiguous()).float()
        gate, up = (x @ gate_up[expert].T).chunk(2, 1)
        middle = torch.nn.functional.silu(gate.double()) * up.double()
        return requantised(middle, self.arithmetic(self.shape)).float() @ down[expert].T

    def describe(self) -> Any:
        from epcross.kernels.experts.compute import ComputeDescription

        return ComputeDescription(version="1", kernels=("matmul",))

    @property
    def workspace_bytes(self) -> int:
        return 0


def layer(compute: type[ExpertCompute] = PlainExperts, **options: Any) -> TorchLayer:
    made = TorchLayer({**TorchLayer.option_defaults(), **options})
    made.use_compute(compute)
    return made


def layer_point(
    tokens: tuple[int, ...] = (5, 3, 0, 7),
    *,
    regime: Regime = Regime.STEADY,
    dispatch_format: RowFormat = RowFormat.BF16,
    weight_format: WeightFormat = WeightFormat.BF16,
    kind: BackendKind = BackendKind.LAYER,
    **shape: Any,
) -> Point:
    point = small_point(tokens, dispatch_format=dispatch_format, **{"hidden": 128, **shape})
    return replace(
        point,
        backend="torch_layer",
        regime=regime,
        domain=Domain.SHARED_GPU,
        sharing=Sharing.ONE_LAUNCH,
        kind=kind,
        compute="plain_experts",
        weight_format=weight_format,
    )
