"""Errors over all tokens of an expert: what is expected of them happens, and a fault that tokens hide is seen."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from epcross.kernels.experts import oracle
from epcross.kernels.experts.expert_sums import Moves, judge_sums
from epcross.kernels.experts.formats import Arithmetic, WeightFormat
from epcross.kernels.experts.intermediate import intermediate, plain_intermediate
from epcross.kernels.experts.weights import make_weights
from epcross.kernels.formats import RowFormat

from tests import _tensor_core  # isort: skip
from tests._experts import rank_major, shape_of  # isort: skip
from tests.benchmark import fp8_accumulation  # isort: skip

FP8 = Arithmetic(intermediate=RowFormat.FP8)
LOSS = 2.0**-13  # one standard deviation


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "arithmetic",
    [
        FP8,
        replace(FP8, gate_up_rounded=True),
        replace(FP8, weight_first=True, power_of_two_scales=True),
        replace(FP8, scale_block=32, power_of_two_scales=True, gate_up_rounded=True),
        Arithmetic(intermediate=RowFormat.BF16, gate_up_rounded=True),
    ],
)
def test_the_intermediate_moves_as_far_as_is_expected(arithmetic: Arithmetic) -> None:
    generator = torch.Generator().manual_seed(3)
    size = torch.rand((256, 2048), generator=generator, dtype=torch.float64) + 0.5
    sums = torch.randn(size.shape, generator=generator, dtype=torch.float64) * size
    weight = torch.rand((256, 1), generator=generator, dtype=torch.float64) if arithmetic.weight_first else 1.0
    made = intermediate(sums, size, weight, arithmetic, lost=8 * LOSS, usual=LOSS)
    assert torch.equal(made.value, plain_intermediate(sums, weight, arithmetic))
    found = torch.zeros_like(made.value)
    for _ in range(4):
        off = torch.randn(size.shape, generator=generator, dtype=torch.float64) * size * LOSS
        move = plain_intermediate(sums + off, weight, arithmetic) - made.value
        assert (move.abs() <= made.farthest + made.step / 8).all()  # a step's end moves with the block's scale
        found += move.square() / 4
    assert 0.6 < found.sum() / made.moved.sum() < 1.25  # sizes that are added are a bound


def bennett(variance: float, largest: float) -> float:
    """How far above its mean, by the smallest of many values that are far enough."""
    steps = (0.001 * number for number in range(100_000))
    return next(
        z
        for z in steps
        if variance * ((1 + z * largest / variance) * math.log(1 + z * largest / variance) - z * largest / variance)
        >= 28 * largest**2
    )


def test_a_sum_worked_out_by_hand() -> None:
    """Two experts share token 1, of which slot 4 has a quarter; of 256 columns, in two blocks."""
    moves = Moves(
        mean=torch.tensor([[1.0, 1.0, 2.0]] * 3, dtype=torch.float64),
        variance=torch.tensor([[0.5, 0.5, 1.0]] * 3, dtype=torch.float64),
        largest=torch.tensor([[0.3, 0.3, 0.6], [0.3, 0.6, 0.6], [0.3, 0.3, 0.6]], dtype=torch.float64),
        token=[torch.tensor([0, 1]), torch.tensor([1, 2])],
        own=[torch.tensor([2.0, 0.5], dtype=torch.float64), torch.tensor([1.5, 2.0], dtype=torch.float64)],
        slots=[4, 9],
    )
    rounding = torch.full((3, 2), 0.25, dtype=torch.float64)
    error = torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, 40.0]], dtype=torch.float64)
    judged = judge_sums(error, rounding, moves)
    one = 0.5 + 2 / 128  # of a token and 128 columns
    allowed = 1.25 * 1.25 + bennett(one * (1 + 1 / 16), 0.3)
    assert judged.times_allowed[0].item() == pytest.approx(math.sqrt(2.25 / allowed), abs=1e-3)
    allowed = 1.75 * 1.25 + bennett(one * (1 + 9 / 16), 0.45)
    assert judged.times_allowed[1].item() == pytest.approx(math.sqrt(40.75 / allowed), abs=1e-3)
    assert not judged.ok
    assert "1 of 2 experts wrong" in judged.sentence()
    assert "slot 9, over 2 tokens and columns 128 to 255" in judged.sentence()
    lost = judge_sums(error.fill_(math.nan), rounding, moves)
    assert lost.times_allowed.tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    "arithmetic",
    [FP8, replace(FP8, gate_up_rounded=True, output_rounded=True), replace(FP8, scale_block=64, weight_first=True)],
    ids=["as gather_gemm", "as DeepGEMM", "as MegaMoE"],
)
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_sums_of_few_tokens_are_right_by_whatever_rounding_is_declared(arithmetic: Arithmetic, tokens: int) -> None:
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, hidden=512, intermediate=256, first_slot=0, top_k=1, capacity_rows=4 * tokens
    )
    copy = make_weights(shape, seed=1, device="cpu").copies[0]
    assert copy.down_scales is not None
    scales = copy.down_scales.clone()
    scales[:, 0, 0] *= 1.6
    stale = replace(copy, down_scales=scales)
    right, wrong = [], []
    for seed in range(3):
        rows = rank_major(shape, seed=seed, headers=False, share=1.0, slots=4)
        rows.sets[0].ids[:] = torch.arange(4, dtype=torch.int32).repeat(tokens)[:, None]
        _, wanted = oracle.expected_of_rows(shape, copy, rows, arithmetic)
        for given, found in ((copy, right), (stale, wrong)):
            judged = oracle.judge(_tensor_core.layer(shape, given, rows, 13, arithmetic), wanted)
            assert judged.experts.tokens == [tokens] * 4
            found.append(judged.experts.times_allowed)
    assert torch.cat(right).max() < 0.8
    assert torch.cat(wrong).min() > 1


def test_a_stale_scale_that_every_token_hides_is_seen_in_their_sum() -> None:
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, hidden=1024, intermediate=512, first_slot=5, top_k=4, capacity_rows=64
    )
    copy = make_weights(shape, seed=1, device="cpu").copies[0]
    rows = rank_major(shape, seed=2, headers=False, share=1.0, slots=4)
    rows.sets[0].ids[:] += shape.first_slot
    _, wanted = oracle.expected_of_rows(shape, copy, rows, FP8)
    out = _tensor_core.layer(shape, copy, rows, 13)
    judged = oracle.judge(out, wanted)
    assert judged.ok, judged.sentence()
    assert judged.experts.slots == [5, 6, 7, 8]
    assert judged.experts.tokens == [64] * 4
    assert judged.experts.times_allowed.max() < 0.5
    assert 0.25 < fp8_accumulation.of_expected(out, wanted) < 1
    assert "0 of 4 experts wrong" in judged.sentence()
    exact = oracle.judge(wanted.value.to(torch.bfloat16), wanted)
    assert exact.experts.times_allowed.max() < judged.experts.times_allowed.max()
    assert copy.down_scales is not None
    scales = copy.down_scales.clone()
    scales[1, 0, 0] *= 0.95
    judged = oracle.judge(_tensor_core.layer(shape, replace(copy, down_scales=scales), rows, 13), wanted)
    assert judged.right.all()
    assert not judged.ok
    assert "1 of 4 experts wrong" in judged.sentence()
    assert "slot 6, over 64 tokens and columns 0 to 127" in judged.sentence()
    assert "tokens wrong" not in judged.sentence()


def test_a_stale_scale_of_gemm2_at_the_size_of_deepseek() -> None:
    """By an eighth, as emulated: of one of 16 blocks that are added in 128 of 7168 columns, at 6 tokens."""
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, hidden=7168, intermediate=2048, first_slot=0, num_local_experts=1, top_k=1,
        capacity_rows=6,
    )  # fmt: skip
    copy = make_weights(shape, seed=1, device="cpu").copies[0]
    rows = rank_major(shape, seed=5, headers=False, share=1.0, slots=1)
    one = rows.sets[0]
    assert copy.gate_up_scales is not None
    assert copy.down_scales is not None
    codes, scales = one.rows.view(torch.float8_e4m3fn), one.scales.contiguous().view(torch.float32)
    sums = _tensor_core.product(codes, scales, copy.gate_up[0], copy.gate_up_scales[0], 13)
    gate, up = sums.chunk(2, 1)
    h, h_scales = _tensor_core.recast(torch.nn.functional.silu(gate) * up)
    made = _tensor_core.product(h, h_scales, copy.down[0], copy.down_scales[0], 13)
    _, wanted = oracle.expected_of_rows(shape, copy, rows, FP8)
    right = oracle.judge((made * one.weights).to(torch.bfloat16), wanted)
    assert right.ok, right.sentence()
    assert right.experts.times_allowed.max() < 0.6
    stale = copy.down_scales[0, :1].clone()
    stale[0, 0] *= 0.88
    made[:, :128] = _tensor_core.product(h, h_scales, copy.down[0, :128], stale, 13)
    judged = oracle.judge((made * one.weights).to(torch.bfloat16), wanted)
    assert not judged.experts.ok
    assert "slot 0, over 6 tokens and columns 0 to 127" in judged.sentence()
