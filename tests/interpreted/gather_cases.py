"""The kernels of `gather_gemm`, and those around DeepGEMM's products, run by Triton's interpreter on the CPU.

`tests/unit/test_interpreted.py` runs this file, in a process of its own.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from epcross.kernels.errors import DoesNotFit
from epcross.kernels.experts import oracle
from epcross.kernels.experts.compute import ExpertCompute
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE, DeepGemm
from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather import index_kernel
from epcross.kernels.experts.gather.fetch_kernels import first_of_gate_up
from epcross.kernels.experts.gather.index import PairIndex, interpreted, on
from epcross.kernels.experts.gather.quantise_kernels import quantise_kernel
from epcross.kernels.experts.gather_gemm import GatherGemm
from epcross.kernels.experts.quantise import quantise_fp8_rows
from epcross.kernels.experts.rows import ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import make_weights
from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided.layout import EPOCH_SHIFT

from tests._experts import expert_major, hidden_states, rank_major, shape_of, untouched  # isort: skip
from tests.fakes import grouped_products  # isort: skip
from tests.interpreted import faults  # isort: skip

faults.mend()
torch.set_num_threads(1)

FORMATS = {
    "bf16": (RowFormat.BF16, WeightFormat.BF16),
    "fp8": (RowFormat.FP8, WeightFormat.FP8),
}
ROWS = {
    "one set": {},
    "two sets, the second": {"sets": 2, "epoch": 7},
    "two sets, the first": {"sets": 2, "epoch": 8},
    "no headers": {"headers": False},
    "three sources": {"sources": 3, "share": 0.5},
}
SHAPES = {
    "plain": {},
    "many tiles": {"num_local_experts": 2, "first_slot": 3, "capacity_rows": 48},
    "one expert": {"num_local_experts": 1, "first_slot": 15},
    "one selection": {"top_k": 1},
    "three of five": {"num_local_experts": 3, "top_k": 5, "first_slot": 0},
}


def compared(compute: ExpertCompute, shape: ExpertShape, rows: ExpertRows, times: int = 1) -> None:
    weights = make_weights(shape, seed=3, device="cpu", copies=2)
    assert compute.unavailable() is None
    assert compute.unsupported(shape, rows.layout) is None
    compute.prepare(shape, rows.layout, weights)
    place, wanted = oracle.expected_of_rows(shape, weights.copies[0], rows, compute.arithmetic(shape))
    assert 0 < len(place) < rows.out.flatten(0, -2).shape[0]
    for turn in range(times):
        rows.out.fill_(float("nan"))
        compute.run(rows, turn)
        judged = oracle.judge(rows.out.flatten(0, -2)[place], wanted)
        assert judged.ok, judged.sentence()
        assert judged.times_plain.max() < 1.5  # exact sums, so little more than rounding
        assert untouched(rows.out, place)
    assert compute.workspace_bytes > 0
    assert compute.describe().kernels


def test_it_is_the_interpreter() -> None:
    assert interpreted()
    assert index_kernel.EPOCH_SHIFT.value == EPOCH_SHIFT


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_wherever_they_lie(formats: str, rows: str) -> None:
    shape = shape_of(*FORMATS[formats])
    compared(GatherGemm(block_t=16), shape, rank_major(shape, **ROWS[rows]), times=2)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_experts_of_any_number(formats: str, name: str) -> None:
    shape = shape_of(*FORMATS[formats], **SHAPES[name])
    compared(GatherGemm(block_t=16), shape, rank_major(shape, sources=2))


@pytest.mark.parametrize("formats", FORMATS)
def test_few_tiles_share_their_sums(formats: str) -> None:
    """Wanted units far above the tiles: sums of GEMM1 are split 8 ways, and whoever comes last adds the parts."""
    shape = shape_of(*FORMATS[formats], hidden=1024, num_local_experts=2)
    compute = GatherGemm(block_t=16, per_sm=16)
    compared(compute, shape, rank_major(shape), times=2)
    assert int(compute._index.schedule[index_kernel.SPLITS.value]) == 8


@pytest.mark.parametrize("formats", FORMATS)
def test_sums_are_shared_among_any_number(formats: str) -> None:
    """Two units for 16 programs: five parts of each keep ten busy, which draws as much as sixteen would."""
    shape = shape_of(*FORMATS[formats], hidden=1024, num_local_experts=2, capacity_rows=12)
    compute = GatherGemm(block_t=16, per_sm=8, balance=1)
    compared(compute, shape, rank_major(shape), times=2)
    assert int(compute._index.schedule[index_kernel.SPLITS.value]) == 5


@pytest.mark.parametrize("formats", FORMATS)
def test_sums_of_the_last_turn_are_shared_and_others_are_not(formats: str) -> None:
    """Six units for four programs: four whole, and two parts of each of the two that are left."""
    shape = shape_of(*FORMATS[formats], hidden=1024, intermediate=384, num_local_experts=2, capacity_rows=12)
    compute = GatherGemm(block_t=16, per_sm=2, balance=2)
    compared(compute, shape, rank_major(shape), times=2)
    schedule = compute._index.schedule
    assert (int(schedule[index_kernel.SPLITS.value]), int(schedule[index_kernel.WHOLE.value])) == (2, 4)


@pytest.mark.parametrize("balance", [0, 1, 2])
@pytest.mark.parametrize("formats", FORMATS)
def test_a_row_gives_the_same_bits_in_whichever_tile_it_is(formats: str, balance: int) -> None:
    """On a GPU the order of an expert's pairs is that of atomic operations; here it is that of rows, so these come in
    both directions. With balance=2 the first 16 of 18 sums would be whole: of the three tiles of the last expert at its
    last column but one, 15 are, and 3 are shared."""
    shape = shape_of(
        *FORMATS[formats], hidden=1024, intermediate=384, num_local_experts=2, first_slot=0, top_k=1, capacity_rows=90
    )
    compute = GatherGemm(block_t=16, per_sm=8, balance=balance)
    compute.prepare(shape, Layout.RANK_MAJOR, make_weights(shape, seed=3, device="cpu"))
    rows = rank_major(shape, slots=2, share=1.0, headers=False)
    compute.run(rows)
    ((tiles, _, _, _, whole), there) = compute._index.schedule.tolist(), rows.out.clone()
    assert (tiles, whole) == (6, 15 if balance == 2 else 0)
    turned = {name: getattr(rows.sets[0], name).flip(0) for name in ("rows", "scales", "ids", "weights")}
    back = replace(rows, sets=(replace(rows.sets[0], **turned),))
    compute.run(back)
    assert torch.equal(back.out.flip(0), there)


@pytest.mark.parametrize(
    ("experts", "balance", "splits"),
    [(4, 1, 3), (5, 1, 2), (8, 1, 2), (9, 1, 3), (9, 0, 2), (17, 1, 1), (4, 2, 3), (9, 2, 3), (17, 2, 8), (20, 2, 3)],
)
def test_parts_of_sums_fill_the_last_turn(experts: int, balance: int, splits: int) -> None:
    """As many experts, each of one tile and 16 units, on 264 programs: 9 x 16 x 2 would leave 24 for another turn."""
    shape = shape_of(*FORMATS["bf16"], num_local_experts=experts, first_slot=0, capacity_rows=12)
    index = PairIndex(shape, 16, torch.device("cpu"), column_blocks=16, units=264, balance=balance)
    index.fill(rank_major(shape, share=1.0, headers=False, slots=experts), pdl=False)
    tiles, found, _, _, whole = index.schedule.tolist()
    assert (tiles, found) == (experts, splits)
    assert whole == (experts * 16 // 264 * 264 if balance == 2 else 0)


def test_a_turn_of_large_tiles_takes_as_long_as_a_full_one() -> None:
    """Four tiles of 16 units on 132 programs: two parts of each are worth their storing, as the memory does not bound
    the products of such tiles."""
    shape = shape_of(*FORMATS["bf16"], num_local_experts=4, first_slot=0, capacity_rows=12)
    index = PairIndex(shape, 128, torch.device("cpu"), column_blocks=16, units=132, balance=1)
    index.fill(rank_major(shape, share=1.0, headers=False, slots=4), pdl=False)
    assert index.schedule.tolist()[:2] == [4, 2]


@pytest.mark.parametrize("formats", FORMATS)
def test_other_tiles_give_the_same(formats: str) -> None:
    shape = shape_of(*FORMATS[formats], intermediate=256)
    narrow = {} if formats == "fp8" else {"block_n": 64}
    compared(GatherGemm(block_t=32, down_block_n=64, regs=128, down_regs=96, **narrow), shape, rank_major(shape))


@pytest.mark.parametrize("per_sm", [1, 16])
@pytest.mark.parametrize("formats", FORMATS)
def test_tokens_as_the_tall_operand(formats: str, per_sm: int) -> None:
    """Sums of GEMM1 whole, and in parts."""
    shape = shape_of(*FORMATS[formats], hidden=1024, num_local_experts=2)
    compute = GatherGemm(block_t=64, tall=1, down_tall=1, per_sm=per_sm)
    compared(compute, shape, rank_major(shape))
    assert int(compute._index.schedule[index_kernel.SPLITS.value]) == (1 if per_sm == 1 else 8)


@pytest.mark.parametrize("form", ["in_turn", "late", "alone"])
@pytest.mark.parametrize("tiles", [{"block_t": 16}, {"block_t": 16, "per_sm": 16}, {"block_t": 128, "tall": 1}])
def test_another_order_of_the_two_sums_gives_the_same_bits(tiles: dict[str, int], form: str) -> None:
    shape = shape_of(*FORMATS["fp8"], hidden=1024, intermediate=256, num_local_experts=2)
    outs = []
    for other in ({}, {form: 1}):
        rows = rank_major(shape)
        compared(GatherGemm(**tiles, **other), shape, rows)
        outs.append(rows.out.view(torch.int16))
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "tiles", [{"block_t": 16}, {"block_t": 64, "down_tall": 1}, {"block_t": 16, "down_block_n": 64}]
)
@pytest.mark.parametrize("formats", FORMATS)
def test_two_blocks_of_columns_in_a_unit_give_the_same_bits(formats: str, tiles: dict[str, int]) -> None:
    shape = shape_of(*FORMATS[formats], hidden=512, intermediate=256)
    outs = []
    for other in ({}, {"down_pair": 1, "finish_per_sm": 8}):
        rows = rank_major(shape)
        compared(GatherGemm(**tiles, **other), shape, rows)
        outs.append(rows.out.view(torch.int16))
    assert torch.equal(*outs)


@pytest.mark.parametrize("formats", FORMATS)
def test_parts_of_a_row_may_be_kept_as_bf16(formats: str) -> None:
    """Which is told as rounding, and is some: the bits are others where a row has several pairs."""
    shape, outs = shape_of(*FORMATS[formats]), []
    for rounded in (0, 1):
        rows, compute = rank_major(shape), GatherGemm(rounded=rounded)
        assert compute.arithmetic(shape).output_rounded == bool(rounded)
        compared(compute, shape, rows)
        outs.append(rows.out.view(torch.int16))
    assert 0 < (outs[0] != outs[1]).double().mean() < 0.9


@triton.jit
def first_units_kernel(there_ptr, row_ptr, step_ptr, BALANCE: tl.constexpr, E: tl.constexpr):
    there, row, step = first_of_gate_up(E, STEPS=56, I=2048, BLOCK_N=128, BLOCK_T=16, BALANCE=BALANCE)
    program = tl.program_id(0)
    tl.store(there_ptr + program, there)
    tl.store(row_ptr + program * 256 + tl.arange(0, 256), row)
    tl.store(step_ptr + program, step)


@pytest.mark.parametrize(("experts", "balance"), [(4, 0), (4, 1), (4, 2), (8, 1), (9, 1), (9, 0), (17, 2), (20, 2)])
def test_weights_that_are_fetched_ahead_are_those_of_the_first_units(experts: int, balance: int) -> None:
    """Where every expert has one tile, as GEMM1 then reads in the index."""
    shape = shape_of(*FORMATS["bf16"], num_local_experts=experts, first_slot=0, capacity_rows=12)
    index = PairIndex(shape, 16, torch.device("cpu"), column_blocks=16, units=264, balance=balance)
    index.fill(rank_major(shape, share=1.0, headers=False, slots=experts), pdl=False)
    tiles, splits, _, _, whole = index.schedule.tolist()
    there, row, step = (torch.zeros(264, size, dtype=torch.int32) for size in (1, 256, 1))
    on(first_units_kernel, 264)(there, row, step, BALANCE=balance, E=experts)
    units = whole + (tiles * 16 - whole) * splits
    assert there.flatten().tolist() == [int(unit < units) for unit in range(264)]
    for unit in range(0, min(units, 264), 7):
        parts = 1 if unit < whole else splits
        expert, column = divmod(unit // parts, 16)
        gate = expert * 4096 + column * 128
        assert row[unit].tolist() == [*range(gate, gate + 128), *range(gate + 2048, gate + 2176)]
        assert int(step[unit]) == 56 * (unit % parts) // parts


def test_scales_that_are_powers_of_two() -> None:
    shape = shape_of(*FORMATS["fp8"], power_of_two_scales=True)
    rows = rank_major(shape)
    compared(GatherGemm(), shape, rows)
    scales = make_weights(shape, seed=3, device="cpu").copies[0].down_scales
    assert scales is not None
    assert set(np.frexp(scales.numpy())[0].ravel()) == {0.5}


def test_a_count_on_the_device_ends_the_rows() -> None:
    shape = shape_of(*FORMATS["bf16"])
    rows = rank_major(shape, headers=False, share=1.0, slots=12)
    compared(GatherGemm(), shape, replace(rows, count=torch.tensor([9], dtype=torch.int32)))


def test_nobody_came() -> None:
    shape = shape_of(*FORMATS["fp8"])
    compute, rows = GatherGemm(), rank_major(shape, share=0.0)
    compute.prepare(shape, Layout.RANK_MAJOR, make_weights(shape, seed=3, device="cpu"))
    compute.run(rows)
    assert rows.out.isnan().all()


def test_more_selections_than_promised_are_told() -> None:
    shape = shape_of(*FORMATS["bf16"], max_selections=16, capacity_rows=64)
    compute, rows = GatherGemm(block_t=16), rank_major(shape, share=1.0, slots=12)
    compute.prepare(shape, Layout.RANK_MAJOR, make_weights(shape, seed=3, device="cpu"))
    compute.run(rows)
    with pytest.raises(DoesNotFit, match=r"max_selections=16 came; raise it"):
        compute.check()


@pytest.mark.parametrize("seed", range(4))
def test_the_index_has_every_pair_once(seed: int) -> None:
    shape = shape_of(*FORMATS["bf16"], capacity_rows=150, num_local_experts=5, first_slot=2, top_k=6)
    rows: RankMajorRows = rank_major(shape, seed=seed, sources=3, share=0.6)
    index = PairIndex(shape, 16, torch.device("cpu"), column_blocks=4, units=30)
    index.fill(rows, pdl=False)
    ids = torch.where(rows.present()[:, None], rows.sets[0].ids, -1)
    tiles, splits, shared, dropped, _ = index.schedule.tolist()
    wanted_tiles, several = 0, set()
    for expert in range(5):
        row, selection = (ids == 2 + expert).nonzero(as_tuple=True)
        count = int(index.expert_rows[expert])
        assert count == len(row)
        pairs = index.pairs[expert, :count]
        assert sorted((pairs >> 1).tolist()) == (row * 6 + selection).tolist()
        assert int(index.expert_tile[expert]) == wanted_tiles
        found = [(index.tile[0, t], index.tile[1, t]) for t in range(wanted_tiles, wanted_tiles + -(-count // 16))]
        assert found == [(expert, 16 * number) for number in range(len(found))]
        of_expert = index.tile[2:, wanted_tiles : wanted_tiles + len(found)]
        assert of_expert.tolist() == [[count] * len(found), [wanted_tiles] * len(found)]
        wanted_tiles += len(found)
        assert torch.equal(index.place.reshape(-1)[pairs >> 1], expert * 150 + torch.arange(count, dtype=torch.int32))
        alone = (((ids >= 2) & (ids < 7)).sum(1) == 1)[(pairs >> 1) // 6]
        assert torch.equal(pairs & 1 == 0, alone)
        several |= set(((pairs[pairs & 1 == 1] >> 1) // 6).tolist())
    assert (tiles, dropped) == (wanted_tiles, 0)
    assert (index.place >= 0).sum() == index.expert_rows.sum()
    assert sorted(index.shared[:shared].tolist()) == sorted(several)
    assert tiles * 4 * splits >= 30 or splits == 8
    assert splits == 1 or tiles * 4 * splits // 2 < 30
    assert not index.counters.any()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantisation_is_bit_for_bit_that_of_torch(power_of_two: bool) -> None:
    x = hidden_states(5, 1280, torch.Generator().manual_seed(1))
    x[2, 128:256] = 0
    rows, scales = torch.empty(5, 1280, dtype=torch.float8_e4m3fn), torch.empty(5, 10)
    on(quantise_kernel, 5, 3)(
        x, x.stride(0), rows, rows.stride(0), scales, scales.stride(0), H=1280, BLOCKS=4, POWER_OF_TWO=power_of_two
    )
    wanted_rows, wanted_scales = quantise_fp8_rows(x, power_of_two=power_of_two)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(rows.view(torch.uint8), wanted_rows.view(torch.uint8))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = grouped_products.deep_gemm()
    monkeypatch.setitem(__import__("sys").modules, "deep_gemm", made)
    return made


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("form", ["masked", "contiguous"])
@pytest.mark.parametrize("rows", ["one set", "two sets, the second", "no headers"])
def test_deepgemm_rank_major(library: SimpleNamespace, formats: str, form: str, rows: str) -> None:
    shape = shape_of(*FORMATS[formats])
    compute = DeepGemm(form)
    compared(compute, shape, rank_major(shape, **ROWS[rows]), times=2)
    assert compute.describe().options == {"form": form}
    assert form in compute.describe().kernels[1 if form == "masked" else 2]


@pytest.mark.parametrize("formats", FORMATS)
def test_deepgemm_expert_major(library: SimpleNamespace, formats: str) -> None:
    shape = shape_of(*FORMATS[formats], capacity_rows=MASKED_ROWS_MULTIPLE)
    rows = expert_major(shape)
    if formats == "fp8":  # by columns, as DeepEP leaves them
        rows = replace(rows, scales=rows.scales.transpose(1, 2).contiguous().transpose(1, 2))
    compared(DeepGemm(), shape, rows, times=2)


@pytest.mark.parametrize("form", ["masked", "contiguous"])
def test_deepgemm_fp4_weights(library: SimpleNamespace, form: str) -> None:
    shape = shape_of(RowFormat.FP8, WeightFormat.FP4, power_of_two_scales=True)
    compared(DeepGemm(form), shape, rank_major(shape))
