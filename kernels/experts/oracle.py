"""What experts must give: float64 over the operands as quantised, the re-quantised intermediate included.

Everything is judged against a plain grouped GEMM: fp32 products over the same operands with the same roundings, summed
and rounded to bf16 as a rank's partial is. A token is right if the 2-norm of its error is at most twice the plain
one's, slack aside, and so is each 128 of its columns.

The slack is what tensor cores may do to any plain grouped GEMM in these formats. An element of a product over K values
is taken to be off by up to

    d = ACCUMULATOR_LOSS * sqrt(sum over k of (x_k * w_k)**2 + 4 * s**2 / (K / 128))

where s is the sum: the first part is the size of the products, which may cancel in s, and the second that of sums of
128 of them, which is what the accumulator holds. Re-quantising is a step function, so an element that is off by d in
gate and in up may land on another step, and so may the whole block if its largest element moves its scale. Of each
element the farthest value that its own corners (gate -+ d, up -+ d) and the ends of its block's scale reach is taken,
carried through GEMM2 as an independent error, and the sum of squares is allowed (`Expected.slack`), with the square of
half of ACCUMULATOR_LOSS times the size of GEMM2's own products (`intermediate.py` has the steps).

That bounds the worst of a token, and is far above what is usual. So errors are added over the tokens of each expert as
well, and may be little more than what is expected of right ones (`expert_sums.py`).
`tests/benchmark/fp8_accumulation.py` emulates the tensor cores and says how far right results stay below both bounds,
and faults above them.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.experts.expert_sums import ExpertSums, Moves, column_sums, judge_sums
from epcross.kernels.experts.formats import FP8_BLOCK, Arithmetic, ExpertShape
from epcross.kernels.experts.intermediate import intermediate, plain_intermediate
from epcross.kernels.experts.rows import ExpertMajorRows, RankMajorRows
from epcross.kernels.experts.weights import WeightCopy, decoded, matrix
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

ACCUMULATOR_LOSS = {RowFormat.BF16: 2.0**-14, RowFormat.FP8: 2.0**-10}
"""By the format of rows: what a tensor core may lose of a sum, as a share of the size of what it adds (above).

bf16 products are added in about fp32, each addition truncated, which shortens a long sum step by step: of 7168 values
about zero one standard deviation of what is lost is 2**-17.1 of the size, and the most of 50 million elements, among
sums of up to twelve times their products' root of squares, 2**-14.6 (on an H200, by tests/benchmark/gpu_bf16_loss.py).

For fp8, Hopper aligns 32 products and the sum so far to the largest of them and cuts them off 13 bits below it
(DeepSeek-V3 report, section 3.3.2; on an H200 the 13th bit arrives and the 14th does not, wherever it stands, by
tests/benchmark/gpu_fp8_bits.py); every 128 values are added in fp32 by the kernel. One standard deviation of what is
lost is 2**-13.1 of the size, emulated and on the H200.

Eight standard deviations are allowed, as the largest of a million elements is off by that (fp8 on the H200: 2**-10.6,
of 131072).
"""

USUAL_LOSS = 1 / 8
"""Of ACCUMULATOR_LOSS: one standard deviation, where errors are added (`expert_sums.py`)."""

TIMES_PLAIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of n tokens."""

    value: "torch.Tensor"  # float64 [n, hidden]
    plain: "torch.Tensor"  # bf16 [n, hidden]: what a plain grouped GEMM gives
    slack: "torch.Tensor"  # float64 [n, hidden]: squares of differences that re-quantisation may make either way
    moves: Moves  # what those are expected to be, and whose

    def parts(self, counts: Sequence[int]) -> "list[Expected]":
        """Of the first `counts[0]` tokens, of the `counts[1]` after them, and so on, each as if it had been alone."""
        ends = list(itertools.accumulate(counts, initial=0))
        return [
            Expected(value=self.value[a:b], plain=self.plain[a:b], slack=self.slack[a:b], moves=self.moves.part(a, b))
            for a, b in itertools.pairwise(ends)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One verdict for each token, and one for each expert over its tokens."""

    right: "torch.Tensor"  # bool [n]
    error: "torch.Tensor"  # float64 [n]: 2-norm of the error, as a share of the value's
    times_plain: "torch.Tensor"  # float64 [n]: the error as a multiple of the plain one's
    times_allowed: "torch.Tensor"  # float64 [n]: above 1 is wrong, over the whole token or 128 of its columns
    experts: ExpertSums

    @property
    def ok(self) -> bool:
        """Whether every token is right, and every expert."""
        return bool(self.right.all()) and self.experts.ok

    @property
    def worst(self) -> float:
        """The largest error of a token or an expert, as a multiple of what is allowed: at most 1 if and only if ok."""
        return max([0.0, *self.times_allowed.tolist(), *self.experts.times_allowed.tolist()])

    def sentence(self) -> str:
        """How many are wrong and the worst, by the rule that is broken; by both if none is."""
        if not len(self.right):
            return "no tokens"
        rules = {self._tokens(): bool(self.right.all()), self.experts.sentence(): self.experts.ok}
        return "; ".join([words for words, kept in rules.items() if not kept or self.ok])

    def _tokens(self) -> str:
        worst, count = int(self.times_allowed.argmax()), len(self.right)
        return (
            f"{int((~self.right).sum())} of {count} token{'s' * (count != 1)} wrong; the worst, {worst}, is off by"
            f" {float(self.error[worst]):.2e} of its norm, {float(self.times_plain[worst]):.2f} times a plain grouped"
            f" GEMM and {float(self.times_allowed[worst]):.2f} times what is allowed"
        )


def expected(
    values: "torch.Tensor",
    ids: "torch.Tensor",
    weights: "torch.Tensor",
    *,
    expert: "Callable[[int], tuple[torch.Tensor, torch.Tensor]]",
    slots: Iterable[int],
    row_format: RowFormat,
    arithmetic: Arithmetic,
    slots_per_rank: int = 0,
) -> Expected:
    """What the experts in `slots` make of n tokens: their weighted outputs, added. Waits for the device.

    Args:
        values: float64 [n, hidden]: rows as quantised, decoded.
        ids: int [n, top_k]; slots that are not among `slots` count for nothing.
        weights: fp32 [n, top_k].
        expert: gate_up [2 * intermediate, hidden] and down [hidden, intermediate] of a slot, float64, as quantised.
        slots: ascending.
        row_format: how rows came, which says what accumulators lose.
        arithmetic: where the implementation rounds.
        slots_per_rank: slots of a rank, whose partials are rounded to bf16 before they are added; 0 = all are one rank.
    """
    import torch

    shape, device = values.shape, values.device
    value, slack = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))
    total, partial = (torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2))
    moves = Moves.none(values)
    rank = 0
    for slot in slots:
        if slots_per_rank and slot // slots_per_rank != rank:
            total, partial, rank = total + _rounded(partial), torch.zeros_like(partial), slot // slots_per_rank
        row, selection = (ids == slot).nonzero(as_tuple=True)
        if not len(row):
            continue
        gate_up, down = expert(slot)
        weight = weights[row, selection].double()[:, None]
        inner, outer = (weight, torch.ones_like(weight)) if arithmetic.weight_first else (1.0, weight)
        lost = ACCUMULATOR_LOSS[row_format]
        sums = values[row] @ gate_up.T
        partial_sums = sums.square() * (4 * FP8_BLOCK / shape[1])
        size = (values[row].square() @ gate_up.square().T + partial_sums).sqrt()
        made = intermediate(sums, size, inner, arithmetic, lost=lost, usual=lost * USUAL_LOSS)
        down_squares, outer_squares = down.square(), torch.as_tensor(outer, device=device).square()
        value.index_add_(0, row, made.value @ down.T * outer)
        spread = made.farthest.square() + (lost / 2 * made.value).square()
        slack.index_add_(0, row, spread @ down_squares.T * outer_squares)
        moves.add(slot, row, made, down_squares, outer_squares, lost * USUAL_LOSS)
        plain = plain_intermediate(values[row].float() @ gate_up.float().T, inner, arithmetic)
        output = plain.float() @ down.float().T
        if arithmetic.output_rounded:
            output = _rounded(output)
        partial.index_add_(0, row, output * outer.float())
    return Expected(value=value, plain=(total + _rounded(partial)).to(torch.bfloat16), slack=slack, moves=moves)


def judge(out: "torch.Tensor", wanted: Expected) -> Judgement:
    """Judge bf16 [n, hidden]; see the head of this file for the rules."""
    import torch

    error = column_sums((out.double() - wanted.value).square())
    plain = column_sums((wanted.plain.double() - wanted.value).square())
    slack = column_sums(wanted.slack)
    allowed = TIMES_PLAIN**2 * plain.sum(1) + slack.sum(1)
    fair = TIMES_PLAIN**2 * torch.maximum(plain, plain.mean(1, keepdim=True)) + 2 * slack
    ratio = torch.maximum(_over(error.sum(1), allowed), _over(error, fair).amax(1)).sqrt()
    ratio = torch.where(ratio.isnan(), torch.inf, ratio)
    norm = wanted.value.square().sum(1)
    return Judgement(
        right=ratio <= 1,
        error=_over(error.sum(1), norm).sqrt(),
        times_plain=_over(error.sum(1), plain.sum(1)).sqrt(),
        times_allowed=ratio,
        experts=judge_sums(error, TIMES_PLAIN**2 * plain, wanted.moves),
    )


def expected_of_rows(
    shape: ExpertShape, copy: WeightCopy, rows: RankMajorRows | ExpertMajorRows, arithmetic: Arithmetic
) -> "tuple[torch.Tensor, Expected]":
    """What a rank's experts must write for `rows` as they lie now. Waits for the device.

    Returns:
        The places of `out.flatten(0, -2)` that must be written, int64 [n], and what must be there.
    """
    import torch

    if isinstance(rows, RankMajorRows):
        number = rows.set_index()
        one = rows.sets[number]
        ids = torch.where(rows.present(number)[:, None], one.ids, -1)
        data, scales, weights = one.rows, one.scales, one.weights
    else:
        experts, capacity = rows.rows.shape[:2]
        slot = torch.arange(experts, device=rows.out.device, dtype=torch.int32)[:, None] + shape.first_slot
        here = torch.arange(capacity, device=rows.out.device)[None, :] < rows.counts[:, None]
        ids = torch.where(here, slot, -1).reshape(-1, 1)
        data, scales = rows.rows.flatten(0, 1), rows.scales.flatten(0, 1)
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    place = ((ids >= shape.first_slot) & (ids <= shape.last_slot)).any(1).nonzero()[:, 0]
    return place, expected(
        row_values(shape.row_format, data[place], scales[place]),
        ids[place],
        weights[place],
        expert=stored_experts(shape, copy),
        slots=range(shape.first_slot, shape.last_slot + 1),
        row_format=shape.row_format,
        arithmetic=arithmetic,
    )


def stored_experts(shape: ExpertShape, copy: WeightCopy) -> "Callable[[int], tuple[torch.Tensor, torch.Tensor]]":
    """The experts of a rank, by slot, from its weights."""
    import torch

    def expert(slot: int) -> "tuple[torch.Tensor, torch.Tensor]":
        at = slot - shape.first_slot
        gate_up_scales, down_scales = (None if s is None else s[at] for s in (copy.gate_up_scales, copy.down_scales))
        return (
            decoded(shape.weight_format, copy.gate_up[at], gate_up_scales, torch.float64),
            decoded(shape.weight_format, copy.down[at], down_scales, torch.float64),
        )

    return expert


def made_experts(
    shape: ExpertShape, seed: int, device: "torch.device | str"
) -> "Callable[[int], tuple[torch.Tensor, torch.Tensor]]":
    """Any expert of the model, by slot, made anew: what a rank needs to judge its own tokens."""
    import torch

    def expert(slot: int) -> "tuple[torch.Tensor, torch.Tensor]":
        both = (matrix(shape, seed, which, slot, device) for which in range(2))
        gate_up, down = (decoded(shape.weight_format, *one, torch.float64) for one in both)
        return gate_up, down

    return expert


def row_values(row_format: RowFormat, rows: "torch.Tensor", scales: "torch.Tensor") -> "torch.Tensor":
    """float64 [n, hidden] of rows (uint8 [n, row_bytes]) and scales (bytes, or fp32) of bf16 or fp8."""
    import torch

    if row_format is RowFormat.BF16:
        return rows.view(torch.bfloat16).double()
    scale = scales.contiguous().view(torch.float32)[:, : rows.shape[1] // FP8_BLOCK]
    return rows.view(torch.float8_e4m3fn).double() * scale.double().repeat_interleave(FP8_BLOCK, 1)


def _rounded(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    return values.to(torch.bfloat16).float()


def _over(part: "torch.Tensor", whole: "torch.Tensor") -> "torch.Tensor":
    """The quotient; 0 / 0 is 0."""
    import torch

    return torch.where(part == 0, torch.zeros_like(part), part / whole)
