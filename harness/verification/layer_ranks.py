"""The ranks of a process whose backend is a layer: what comes out is judged, token by token, by a float64 oracle.

The oracle (`kernels.experts.oracle`) computes over the operands as quantised, re-quantised intermediate included, and
rounds where the expert stage says that it rounds. A token's error may be twice that of a plain grouped GEMM in the same
formats, and what tensor cores lose on top; errors are added over a rank's tokens by expert, too. Every expert that a
token chose is made again here, wherever its rank is.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from epcross.harness.backends.base import Batch, Group, Shard
from epcross.harness.backends.layer import LayerBackend, expert_shape
from epcross.harness.backends.rank_weights import check_expert
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind, Regime, RowFormat, WeightsBy
from epcross.harness.verification.device_ranks import current_device
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.tape import Payload
from epcross.kernels.experts import oracle
from epcross.kernels.experts.formats import Arithmetic
from epcross.kernels.experts.quantise import E4M3_MAX, quantise_fp8_rows

if TYPE_CHECKING:
    from torch import Tensor

_KEPT = 2
"""Expectations held at a time: those of the sets of a chain, which several checks ask for."""

_TOGETHER = 1 << 14
"""Tokens whose expectations are computed at once, at most: each takes a few hundred KB meanwhile."""

_SAME = 2.0**-6
"""By what share of a row's largest value two runs of one expert stage may differ: a few roundings of bf16."""


class LayerRanks:
    """`count` ranks of one layer, consecutive; see `LocalRanks`.

    `worst_ratio` is the largest error that was seen, right or wrong, over that of a plain grouped GEMM, and
    `worst_share` over what is allowed. Infinite where outputs are no numbers; below 0 as long as nothing was judged.
    """

    def __init__(self, backend: LayerBackend, point: Point, group: Group, slots: Slots, count: int) -> None:
        self.backend, self.point, self.group, self.slots = backend, point, group, slots
        self.ranks = range(group.rank * count, (group.rank + 1) * count)
        self.worst_ratio = self.worst_share = -math.inf
        self._device = current_device()
        self._expected: dict[tuple[object, ...], oracle.Expected] = {}
        self._arithmetics = list(backend.arithmetics(point))
        self._coming: list[GroupBatch] = []
        self._timed: list[GroupBatch] = []
        self._in_place: tuple[int, list[Tensor]] | None = None

    def prepare(self, timed: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`."""
        given, tokens, slot_rank = [self.given(batch) for batch in timed], self.point.tokens, self.slots.slot_rank
        shards = [
            Shard(rank=rank, tokens=tokens, slot_rank=slot_rank, batches=own)
            for rank, own in zip(self.ranks, zip(*given, strict=True), strict=True)
        ]
        self.backend.prepare_ranks(self.point, shards, self.group)

    def given(self, batch: GroupBatch) -> list[Batch]:
        """The inputs of this process's ranks."""
        return [batch.batch(rank) for rank in self.ranks]

    def expect(self, batches: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`. Bringing an expert's weights to float64 takes longer than its few tokens, so what must come
        out of all batches is computed when that of the first is asked for."""
        self._coming = list(batches)

    def refill(self, set_index: int, batch: GroupBatch) -> None:
        """See `LocalRanks`."""
        self.backend.refill_ranks(set_index, self.given(batch))

    def check_received(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`. A layer's rows are its own; what experts make of them is what its own make. In the exact
        round those of the layer in place, which so is checked as the layer itself."""
        backend = self.backend
        if backend.kind is BackendKind.LAYER and batch.payload is Payload.EXACT:
            backend.keep(set_index)
            backend.in_place(set_index)
            backend.restore(set_index)
        else:
            backend.experts(set_index)
        return None

    def check_combined(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`."""
        return self._check(set_index, batch, "")

    def stage_timed(self, timed: Sequence[GroupBatch]) -> None:
        """See `LocalRanks`. One layer of each set, whose rows are kept for the layer in place where that is timed."""
        backend = self.backend
        self._timed = list(timed)
        keeps = backend.kind is BackendKind.LAYER and self.point.regime is Regime.STEADY
        for set_index in range(len(timed)):
            backend.dispatch(set_index)
            if keeps:
                backend.keep(set_index)
                backend.in_place(set_index)
                backend.restore(set_index)
            else:
                backend.experts(set_index)
            backend.combine(set_index)
        if keeps:
            last = len(timed) - 1
            self._in_place = last, [made.clone() for made in backend.in_place_ranks(last)]

    def check_timed(self, set_index: int, batch: GroupBatch) -> Mismatch | None:
        """See `LocalRanks`. Every set has outputs of its own, so all are looked at: inputs that a timed layer did not
        stage would be right for the set that was staged last."""
        for index, timed in enumerate(self._timed or [batch]):
            if wrong := self._check(index if self._timed else set_index, timed, " in a timed series"):
                return wrong
        return self._check_in_place(set_index)

    def _check(self, set_index: int, batch: GroupBatch, where: str) -> Mismatch | None:
        """The first rank's that is wrong; all are judged, for the worst of them."""
        found = [self._check_rank(rank, batch, out, where) for rank, out in self.judged(set_index, batch)]
        return next((wrong for wrong in found if wrong is not None), None)

    def _check_rank(self, rank: int, batch: GroupBatch, out: "Tensor", where: str) -> Mismatch | None:
        import torch

        wanted = self._of(rank, batch, self._arithmetics[0]).value.shape
        if tuple(out.shape) != tuple(wanted) or out.dtype is not torch.bfloat16:
            self._seen(math.inf, math.inf)
            what = f"outputs{where} are {out.dtype} {tuple(out.shape)}, not {torch.bfloat16} {tuple(wanted)}"
            return Mismatch(what=what, rank=rank, wrong=1, total=1, unit="of the outputs is malformed")
        judged = self._judge(rank, batch, out)
        ratios = judged.times_plain.nan_to_num(nan=math.inf, posinf=math.inf).tolist()
        self._seen(max(ratios, default=0.0), judged.worst)
        if judged.ok:
            return None
        what = f"wrong outputs{where}: {judged.sentence()}"
        if judged.right.all():
            wrong = int((judged.experts.times_allowed > 1).sum())
            return Mismatch(
                what=what, rank=rank, wrong=wrong, total=len(judged.experts.slots), unit="experts are wrong"
            )
        return Mismatch(
            what=what,
            rank=rank,
            source=rank,
            token=int(judged.times_allowed.argmax()),
            wrong=int((~judged.right).sum()),
            total=len(out),
            unit="output rows are wrong",
        )

    def _seen(self, ratio: float, share: float) -> None:
        self.worst_ratio, self.worst_share = max(self.worst_ratio, ratio), max(self.worst_share, share)

    def judged(self, set_index: int, batch: GroupBatch) -> "list[tuple[int, Tensor]]":
        """Rank and outputs that are looked at."""
        return list(zip(self.ranks, self.backend.outputs_ranks(set_index), strict=True))

    def _judge(self, rank: int, batch: GroupBatch, out: "Tensor") -> oracle.Judgement:
        """By the arithmetic that explained all outputs before, if there are several. One that does not explain these
        is not the library's, and is not asked again; if none does, the nearest one's judgement."""
        nearest: oracle.Judgement | None = None
        for number, arithmetic in enumerate(self._arithmetics):
            judged = oracle.judge(out, self._of(rank, batch, arithmetic))
            if judged.ok:
                del self._arithmetics[:number]
                return judged
            if nearest is None or judged.worst < nearest.worst:
                nearest = judged
        assert nearest is not None, "a layer says where it rounds"
        return nearest

    def _check_in_place(self, set_index: int) -> Mismatch | None:
        """The layer in place was timed too: idle, it would be taken for a layer that only communicates."""
        if self._in_place is None or self._in_place[0] != set_index:
            return None
        for rank, made, before in zip(
            self.ranks, self.backend.in_place_ranks(set_index), self._in_place[1], strict=False
        ):
            bound = _SAME * before.float().abs().nan_to_num().amax(dim=-1, keepdim=True)
            same = ((made.float() - before.float()).abs() <= bound) | (made.isnan() & before.isnan())
            if not bool(same.all()):
                wrong = int((~same).any(dim=-1).sum())
                return Mismatch(
                    what="what experts made of rows in place in a timed series is not what they made before",
                    rank=rank,
                    wrong=wrong,
                    total=same[..., 0].numel(),
                    unit="rows are wrong",
                )
        return None

    def _of(self, rank: int, batch: GroupBatch, arithmetic: Arithmetic) -> oracle.Expected:
        wanted = _key(rank, batch, arithmetic)
        if wanted not in self._expected:
            together = self._together(rank, batch, arithmetic)
            most = max(_KEPT, len(self._timed), len(together)) * len(self.ranks)
            for other, made in zip(together, self.expected(rank, together, arithmetic), strict=True):
                while len(self._expected) >= most:
                    self._expected.pop(next(iter(self._expected)))
                self._expected[_key(rank, other, arithmetic)] = made
        return self._expected[wanted]

    def _together(self, rank: int, batch: GroupBatch, arithmetic: Arithmetic) -> list[GroupBatch]:
        """The batch, and those to come with it that are not known yet, as many as may be computed at once."""
        found = [batch]
        if any(each is batch for each in self._coming):
            others = [each for each in self._coming if each is not batch]
            unknown = [each for each in others if _key(rank, each, arithmetic) not in self._expected]
            found += unknown[: max(0, _TOGETHER // max(1, self.tokens_of(rank)) - 1)]
        return found

    def expected(self, rank: int, batches: Sequence[GroupBatch], arithmetic: Arithmetic) -> "list[oracle.Expected]":
        """What must come out for the tokens of one rank, of each batch."""
        import torch

        point = self.point
        given = [self.operands(rank, batch) for batch in batches]
        values, ids, weights = (torch.cat(each) for each in zip(*given, strict=True))
        together = oracle.expected(
            values,
            ids,
            weights,
            expert=self.experts(),
            slots=self.slots_of(rank),
            row_format=RowFormat.BF16 if point.dispatch_format is RowFormat.BF16 else RowFormat.FP8,  # what is added
            arithmetic=arithmetic,
            # one bf16 partial for each rank, unless the library's combine weights and adds selections one by one
            slots_per_rank=point.experts_per_rank if self.backend.weights_by is WeightsBy.EXPERTS else 0,
        )
        return together.parts([len(each) for each, _, _ in given])

    def operands(self, rank: int, batch: GroupBatch) -> "tuple[Tensor, Tensor, Tensor]":
        """Rows as quantised (float64), slots and weights of the tokens whose outputs a rank has."""
        count = self.point.tokens[rank]
        values = self.values(batch, np.full(count, rank), np.arange(count))
        return values, self.put(batch.ids[rank]), self.put(batch.weights[rank])

    def slots_of(self, rank: int) -> range:
        """The experts whose outputs are in those of a rank."""
        return range(self.point.placement.num_slots)

    def tokens_of(self, rank: int) -> int:
        """How many `operands` are at most."""
        return self.point.tokens[rank]

    def values(self, batch: GroupBatch, source: np.ndarray, token: np.ndarray) -> "Tensor":
        """float64 [n, hidden]: hidden states of these tokens as they are once quantised for dispatch."""
        import torch

        width = 2 * self.point.model.hidden
        hidden = torch.empty(len(token), width // 2, dtype=torch.bfloat16, device=self._device)
        hidden.view(torch.uint8).copy_(torch.from_numpy(np.ascontiguousarray(batch.rows(source, token)[:, :width])))
        if self.point.dispatch_format is RowFormat.BF16:
            return hidden.double()
        if self.point.dispatch_format is RowFormat.MXFP8:
            return mxfp8_values(hidden)
        powers = expert_shape(self.point, 0).power_of_two_scales
        quantised, scales = quantise_fp8_rows(hidden, power_of_two=powers, scaling=self.backend.row_scaling)
        return (quantised.double().unflatten(1, (scales.shape[1], -1)) * scales.double()[..., None]).flatten(1)

    def experts(self) -> "Callable[[int], tuple[Tensor, Tensor]]":
        """Any expert of the model by slot, float64, as quantised."""
        point, device = self.point, self._device

        return lambda slot: check_expert(point, slot, device)

    def put(self, array: np.ndarray) -> "Tensor":
        """On the device."""
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _key(rank: int, batch: GroupBatch, arithmetic: Arithmetic) -> tuple[object, ...]:
    return rank, batch.seed, batch.set_index, batch.payload, arithmetic


def mxfp8_values(hidden: "Tensor") -> "Tensor":
    """float64 of bf16 [n, hidden] quantised to e4m3 with a scale for each 32 values, the least power of two with which
    nothing saturates: what libraries do that scale by e8m0."""
    import torch

    parts = hidden.double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.log2(parts.abs().amax(-1, keepdim=True) / E4M3_MAX).ceil())
    scale = torch.where(scale > 0, scale, 1.0)
    return ((parts / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)
