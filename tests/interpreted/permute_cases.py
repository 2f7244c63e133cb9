"""The kernels around DeepGEMM's products, to the last bit, run by Triton's interpreter on the CPU.

`tests/unit/test_interpreted.py` runs this file, in a process of its own.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epcross.kernels.experts.deepgemm import DeepGemm
from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.rows import RankMajorRows
from epcross.kernels.experts.weights import make_weights
from epcross.kernels.formats import RowFormat

from tests._experts import rank_major, shape_of, untouched  # isort: skip
from tests.fakes import grouped_products  # isort: skip
from tests.interpreted import faults  # isort: skip

faults.mend()
torch.set_num_threads(1)

FORMATS = {"bf16": (RowFormat.BF16, WeightFormat.BF16), "fp8": (RowFormat.FP8, WeightFormat.FP8)}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "some of the rows": ({}, {}),
    "two sets": ({}, {"sets": 2, "epoch": 7}),
    "nobody came": ({}, {"share": 0.0}),
    "none for this rank": ({"first_slot": 16}, {"share": 1.0, "headers": False}),
    "one token": ({"capacity_rows": 1}, {"share": 1.0, "sources": 1, "slots": 12}),
    "all tokens on one expert": ({"top_k": 1, "first_slot": 0}, {"share": 1.0, "slots": 1}),
    "every selection here": ({"top_k": 4, "first_slot": 0}, {"share": 1.0, "slots": 4, "headers": False}),
    "room is full": (
        {"top_k": 2, "num_local_experts": 2, "first_slot": 0, "capacity_rows": 128},
        {"share": 1.0, "slots": 2},
    ),
    "odd numbers": ({"top_k": 5, "num_local_experts": 3, "capacity_rows": 23}, {"sources": 1, "slots": 12}),
    "many experts": ({"top_k": 3, "num_local_experts": 37, "first_slot": 0}, {"slots": 37}),
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = grouped_products.deep_gemm()
    monkeypatch.setitem(__import__("sys").modules, "deep_gemm", made)
    return made


def prepared(form: str, shape: ExpertShape) -> DeepGemm:
    compute = DeepGemm(form)
    compute.prepare(shape, Layout.RANK_MAJOR, make_weights(shape, seed=3, device="cpu"))
    return compute


def ids_here(shape: ExpertShape, rows: RankMajorRows) -> torch.Tensor:
    """int [N, K]: experts of this rank, -1 for others."""
    number = rows.set_index()
    ids = torch.where(rows.present(number)[:, None], rows.sets[number].ids, -1)
    return torch.where((ids >= shape.first_slot) & (ids <= shape.last_slot), ids - shape.first_slot, -1)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("form", ["masked", "contiguous"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_copied_and_sums_are_added_in_the_order_of_selections(
    library: SimpleNamespace, case: str, form: str, formats: str
) -> None:
    of_shape, of_rows = CASES[case]
    shape = shape_of(*FORMATS[formats], **of_shape)
    rows = rank_major(shape, **of_rows)
    compute = prepared(form, shape)
    permutation, one, experts = compute._permutation, rows.sets[rows.set_index()], ids_here(shape, rows)
    assert permutation is not None
    assert compute._x is not None
    assert compute._x_scale is not None
    assert compute._y is not None
    counted = [int((experts == expert).sum()) for expert in range(shape.num_local_experts)]
    here = (experts >= 0).any(1).nonzero()[:, 0]
    for _ in range(2):  # the second finds counters as the first left them
        permutation.bring(rows, compute._x, compute._x_scale, compute._group)
        assert permutation.expert_rows.tolist() == counted
        count = int(permutation.listed_count)
        listed = permutation._listed[:count]
        assert sorted(listed[:, 0].tolist()) == here.tolist()
        x = compute._x.view(torch.uint8).flatten(0, -2)
        seen = []
        for (row, pairs), places in zip(listed.tolist(), permutation._place[:count].tolist(), strict=True):
            mine = experts[row][experts[row] >= 0].tolist()
            assert pairs == len(mine)
            assert places[pairs:] == [-1] * (shape.top_k - pairs)
            for expert, place in zip(mine, places, strict=False):
                assert torch.equal(x[place], one.rows[row])
                if formats == "fp8":
                    scales = compute._x_scale.flatten(0, -2)[place]
                    assert torch.equal(scales, one.scales[row].view(torch.float32))
                assert expert_at(compute, place) == expert
            seen += places[:pairs]
        assert len(set(seen)) == len(seen) == sum(counted)
        if compute._group is not None:
            tiles = [expert for expert in range(len(counted)) for _ in range(-(-counted[expert] // 128))]
            groups = compute._group.view(-1, 128).unique(dim=1)
            assert groups[:, 0].tolist() == tiles + [-1] * (permutation.max_tiles - len(tiles))

        compute._swiglu(permutation.expert_rows)
        y = torch.randn(compute._y.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        rows.out.fill_(float("nan"))
        permutation.back(rows, y)
        for (row, pairs), places in zip(listed.tolist(), permutation._place[:count], strict=True):
            weights = one.weights[row][experts[row] >= 0]
            total = torch.zeros(shape.hidden)
            for pair in range(pairs):
                total = total + y.flatten(0, -2)[int(places[pair])].float() * weights[pair]
            assert torch.equal(rows.out[row], total.to(torch.bfloat16))
        assert untouched(rows.out, here)
        assert not permutation._counters.any()


def expert_at(compute: DeepGemm, place: int) -> int:
    """Whose place that is."""
    return place // compute._room if compute._group is None else int(compute._group[place])


@pytest.mark.parametrize("form", ["masked", "contiguous"])
def test_a_layer_gives_the_same_bits_whatever_the_order_of_rows(library: SimpleNamespace, form: str) -> None:
    """On a GPU the order of an expert's pairs is that of atomic operations; here rows come in both directions."""
    shape = shape_of(*FORMATS["fp8"], top_k=3, capacity_rows=40, first_slot=0)
    compute, rows = prepared(form, shape), rank_major(shape, slots=6, headers=False)
    here = (ids_here(shape, rows) >= 0).any(1)
    compute.run(rows)
    there = rows.out[here].clone()
    turned = {name: getattr(rows.sets[0], name).flip(0) for name in ("rows", "scales", "ids", "weights")}
    back = replace(rows, sets=(replace(rows.sets[0], **turned),))
    compute.run(back)
    assert torch.equal(back.out.flip(0)[here], there)


@pytest.mark.parametrize("form", ["masked", "contiguous"])
def test_a_run_that_failed_half_way_leaves_nothing_behind(library: SimpleNamespace, form: str) -> None:
    shape = shape_of(*FORMATS["bf16"])
    compute, rows = prepared(form, shape), rank_major(shape)
    compute.run(rows)
    wanted = rows.out.clone()
    name = f"m_grouped_bf16_gemm_nt_{form}"
    works = getattr(library, name)

    def fails(*arguments: object) -> None:
        raise RuntimeError("no memory")

    setattr(library, name, fails)
    with pytest.raises(RuntimeError, match="no memory"):
        compute.run(rows)
    setattr(library, name, works)
    rows.out.fill_(float("nan"))
    compute.run(rows)
    assert torch.equal(rows.out.view(torch.int16), wanted.view(torch.int16))


def test_pairs_above_what_was_promised_have_no_place_and_count_as_zero(library: SimpleNamespace) -> None:
    """16 selections are promised, so there is one tile of 128 places, and 140 rows come."""
    shape = shape_of(*FORMATS["bf16"], max_selections=16, capacity_rows=140, first_slot=0, num_local_experts=1, top_k=1)
    compute, rows = prepared("contiguous", shape), rank_major(shape, share=1.0, slots=1)
    permutation = compute._permutation
    assert permutation is not None
    assert (permutation.max_tiles, permutation.places) == (1, 128)
    compute.run(rows)
    assert sorted(permutation._place.flatten().tolist()) == [-1] * 12 + list(range(128))
    assert int((rows.out == 0).all(1).sum()) == 12
    assert rows.out.isfinite().all()
