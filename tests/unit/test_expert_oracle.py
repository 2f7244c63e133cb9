"""The oracle of the experts: what is right passes however it rounds, and each way to be wrong is seen, at each size."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from epcross.kernels.experts import oracle
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.rows import RankMajorRows
from epcross.kernels.experts.torch_grouped import TorchGrouped
from epcross.kernels.experts.weights import ExpertWeights, WeightCopy, make_weights
from epcross.kernels.formats import RowFormat

from tests._experts import expert_major, rank_major, shape_of, untouched  # isort: skip

FORMATS = (
    (RowFormat.BF16, WeightFormat.BF16),
    (RowFormat.FP8, WeightFormat.FP8),
    (RowFormat.FP8, WeightFormat.FP4),
    (RowFormat.BF16, WeightFormat.FP4),
)
SIZES = {
    "small": {"hidden": 256, "intermediate": 128},
    "middle": {"hidden": 1024, "intermediate": 512, "capacity_rows": 16},
    "deepseek": {"hidden": 7168, "intermediate": 2048, "num_local_experts": 1, "top_k": 1, "capacity_rows": 2},
}
CASES = [(size, *formats) for size in ("small", "middle") for formats in FORMATS]
CASES += [("deepseek", RowFormat.FP8, WeightFormat.FP8)]  # the largest sums, and steps of re-quantisation


pytestmark = pytest.mark.usefixtures("one_thread")


def world(size: str, rows: RowFormat, weights: WeightFormat, **other) -> tuple[ExpertShape, WeightCopy, RankMajorRows]:
    shape = shape_of(rows, weights, **SIZES[size])
    slots = shape.first_slot + shape.num_local_experts
    landed = rank_major(shape, headers=False, share=1.0, slots=slots, **other)
    ids = landed.sets[0].ids
    ids[:] = shape.first_slot + ids % shape.num_local_experts  # every selection is local, and distinct
    distinct = torch.arange(shape.capacity_rows)[:, None] + torch.arange(shape.top_k)
    ids[:] = (shape.first_slot + distinct % shape.num_local_experts).to(torch.int32)
    landed.sets[0].weights[:] = torch.tensor([0.5, 0.2, 0.3, 0.1])[: shape.top_k]
    return shape, make_weights(shape, seed=1, device="cpu").copies[0], landed


def rounded_elsewhere(rows: RowFormat) -> tuple[Arithmetic, ...]:
    plain = Arithmetic(intermediate=rows)
    ways = (plain, replace(plain, gate_up_rounded=True, output_rounded=True), replace(plain, weight_first=True))
    return (*ways, replace(plain, power_of_two_scales=True)) if rows is RowFormat.FP8 else ways


@pytest.mark.parametrize(("size", "rows", "weights"), CASES)
def test_a_plain_grouped_gemm_passes_by_its_own_arithmetic(size: str, rows: RowFormat, weights: WeightFormat) -> None:
    shape, copy, landed = world(size, rows, weights)
    for arithmetic in rounded_elsewhere(rows) if size == "small" else rounded_elsewhere(rows)[:1]:
        place, wanted = oracle.expected_of_rows(shape, copy, landed, arithmetic)
        judged = oracle.judge(wanted.plain, wanted)
        assert len(place) == shape.capacity_rows
        assert judged.ok, judged.sentence()
        assert judged.times_plain.max() == 1
        assert 5e-4 < judged.error.max() < (4e-3 if rows is RowFormat.BF16 else 2e-2)


def broken(kind: str, shape: ExpertShape, copy: WeightCopy, landed: RankMajorRows) -> tuple[WeightCopy, RankMajorRows]:
    one = landed.sets[0]
    ids, weights, scales = one.ids.clone(), one.weights.clone(), one.scales.clone()
    if kind == "expert dropped":
        ids[1, 1] = -1
    elif kind == "weight swapped":
        weights[1, [0, 1]] = weights[1, [1, 0]]
    elif kind == "weight stale":
        weights[1, 0] *= 1.05
    elif kind == "row scale stale":
        fresh, stale = scales.view(torch.float32)[1], scales.view(torch.float32)[2]
        fresh[0] = stale[(stale / fresh[0]).log().abs().argmax()]
    elif kind in {"gate_up scale stale", "down scale stale"}:
        name = kind.split()[0] + "_scales"
        wrong = getattr(copy, name).clone()
        if wrong.dtype == torch.uint8:
            wrong[0, :128, :4] += 1
        else:
            wrong[0, 0, 0] = wrong[0].flatten()[(wrong[0] / wrong[0, 0, 0]).log().abs().argmax()]
        copy = replace(copy, **{name: wrong})
    return copy, replace(landed, sets=(replace(one, ids=ids, weights=weights, scales=scales),))


@pytest.mark.parametrize(("size", "rows", "weights"), CASES)
def test_each_fault_is_seen(size: str, rows: RowFormat, weights: WeightFormat) -> None:
    shape, copy, landed = world(size, rows, weights)
    arithmetic = Arithmetic(intermediate=rows, gate_up_rounded=rows is RowFormat.FP8)
    _, wanted = oracle.expected_of_rows(shape, copy, landed, arithmetic)
    kinds = ["expert dropped", "weight swapped", "weight stale"]
    kinds += ["row scale stale"] if rows is RowFormat.FP8 else []
    kinds += ["gate_up scale stale", "down scale stale"] if weights is not WeightFormat.BF16 else []
    if size == "deepseek":
        kinds = ["gate_up scale stale"]
    for kind in kinds:
        bad_copy, bad_rows = broken(kind, shape, copy, landed)
        _, given = oracle.expected_of_rows(shape, bad_copy, bad_rows, arithmetic)
        judged = oracle.judge(given.plain, wanted)
        assert not judged.ok, kind
        assert not judged.right[1] or "scale" in kind, kind
        if kind in {"expert dropped", "weight swapped", "weight stale", "row scale stale"}:
            assert judged.right.sum() == shape.capacity_rows - 1, f"{kind}: the other tokens are right"


def test_rows_that_were_not_written_are_wrong() -> None:
    shape, copy, landed = world("small", RowFormat.BF16, WeightFormat.BF16)
    place, wanted = oracle.expected_of_rows(shape, copy, landed, Arithmetic(intermediate=RowFormat.BF16))
    judged = oracle.judge(landed.out[place], wanted)
    assert not judged.right.any()
    assert "24 of 24 tokens wrong" in judged.sentence()
    zeros = oracle.judge(torch.zeros_like(landed.out[place]), wanted)
    assert not zeros.right.any()


@pytest.mark.parametrize(("sets", "headers"), [(1, True), (2, True), (1, False)])
def test_torch_grouped_rank_major(sets: int, headers: bool) -> None:
    shape = shape_of(RowFormat.BF16, WeightFormat.BF16)
    weights = make_weights(shape, seed=3, device="cpu", copies=2)
    landed = rank_major(shape, sets=sets, headers=headers)
    check(TorchGrouped(), shape, weights, landed)


def test_torch_grouped_expert_major() -> None:
    shape = shape_of(RowFormat.BF16, WeightFormat.BF16)
    check(TorchGrouped(), shape, make_weights(shape, seed=3, device="cpu"), expert_major(shape))


def check(compute: TorchGrouped, shape: ExpertShape, weights: ExpertWeights, landed) -> None:
    assert compute.unavailable() is None
    assert compute.unsupported(shape, landed.layout) is None
    compute.prepare(shape, landed.layout, weights)
    compute.run(landed, 1)
    place, wanted = oracle.expected_of_rows(shape, weights.copies[0], landed, compute.arithmetic(shape))
    assert 0 < len(place) < landed.out.flatten(0, -2).shape[0]
    judged = oracle.judge(landed.out.flatten(0, -2)[place], wanted)
    assert judged.ok, judged.sentence()
    assert untouched(landed.out, place)


def test_torch_grouped_says_what_it_cannot_do() -> None:
    shape = shape_of(RowFormat.FP8, WeightFormat.FP8)
    assert "bf16 rows and weights only" in (TorchGrouped().unsupported(shape, Layout.RANK_MAJOR) or "")
    odd = replace(shape, hidden=200)
    assert "hidden=200 is not a multiple of 128" in (TorchGrouped().unsupported(odd, Layout.RANK_MAJOR) or "")


def stage_of(shape: ExpertShape, copy: WeightCopy, intermediate: RowFormat) -> dict[str, Any]:
    """What `oracle.expected` needs beside tokens."""
    return {
        "expert": oracle.stored_experts(shape, copy),
        "slots": range(shape.first_slot, shape.last_slot + 1),
        "row_format": shape.row_format,
        "arithmetic": Arithmetic(intermediate=intermediate),
    }


def test_several_ranks_partials_are_rounded_as_they_travel() -> None:
    """With each expert on a rank of its own the plain sum rounds every partial, and its error grows."""
    shape, copy, landed = world("middle", RowFormat.BF16, WeightFormat.BF16)
    one = landed.sets[0]
    values = oracle.row_values(shape.row_format, one.rows, one.scales)
    given = stage_of(shape, copy, RowFormat.BF16)
    together = oracle.expected(values, one.ids, one.weights, **given)
    apart = oracle.expected(values, one.ids, one.weights, slots_per_rank=1, **given)
    assert torch.equal(together.value, apart.value)
    errors = [(each.plain.double() - each.value).norm() for each in (together, apart)]
    assert errors[0] < errors[1] < 3 * errors[0]


@pytest.mark.parametrize("formats", [(RowFormat.BF16, WeightFormat.BF16), (RowFormat.FP8, WeightFormat.FP8)])
def test_tokens_that_are_computed_together_are_judged_as_if_each_part_had_been_alone(formats) -> None:
    """Also where a part is empty, or has no token of an expert."""
    shape, copy, landed = world("middle", *formats)
    one = landed.sets[0]
    values = oracle.row_values(shape.row_format, one.rows, one.scales)
    given = stage_of(shape, copy, shape.row_format)
    cuts = [1, 0, len(values) // 2, len(values) - 1 - len(values) // 2]
    parts = oracle.expected(values, one.ids, one.weights, **given).parts(cuts)
    first = 0
    for count, part in zip(cuts, parts, strict=True):
        mine = slice(first, first := first + count)
        alone = oracle.expected(values[mine], one.ids[mine], one.weights[mine], **given)
        for own, wanted in ((part, alone), (part.moves, alone.moves)):
            for name in ("value", "slack", "mean", "variance", "largest"):
                if hasattr(own, name):
                    torch.testing.assert_close(getattr(own, name), getattr(wanted, name), rtol=1e-9, atol=0)
        assert part.moves.slots == alone.moves.slots
        assert all(torch.equal(a, b) for a, b in zip(part.moves.token, alone.moves.token, strict=True))
        out = alone.value.to(torch.bfloat16)
        assert oracle.judge(out, part).worst == pytest.approx(oracle.judge(out, alone).worst, rel=1e-3)
