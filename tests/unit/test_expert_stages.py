"""Expert stages that libraries bring: FlashInfer's against an imitation, and what each says that it cannot serve."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from epcross.kernels.experts import oracle
from epcross.kernels.experts.compute import ExpertCompute
from epcross.kernels.experts.deepgemm import DeepGemm, rank_major_form
from epcross.kernels.experts.flashinfer import FlashInferMoe
from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather import specialised
from epcross.kernels.experts.gather.tiles import DEFAULTS, chosen_tiles, default_tiles
from epcross.kernels.experts.gather_gemm import GatherGemm
from epcross.kernels.experts.torch_grouped import TorchGrouped
from epcross.kernels.experts.weights import make_weights
from epcross.kernels.formats import RowFormat

from tests._experts import rank_major, shape_of  # isort: skip
from tests.fakes import grouped_products  # isort: skip

BF16, FP8, FP4 = WeightFormat.BF16, WeightFormat.FP8, WeightFormat.FP4


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flashinfer")
    package.__version__ = "0.7.4"  # type: ignore[attr-defined]
    package.fused_moe = grouped_products.flashinfer_moe()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", package.fused_moe)


@pytest.mark.parametrize("weights", [BF16, FP4])
@pytest.mark.parametrize("rows", [{}, {"sets": 2, "epoch": 7}, {"sets": 2, "epoch": 8}, {"headers": False}])
def test_flashinfer(weights: WeightFormat, rows: dict[str, Any]) -> None:
    shape, compute = shape_of(RowFormat.BF16, weights), FlashInferMoe()
    assert compute.unavailable() is None
    assert compute.unsupported(shape, Layout.RANK_MAJOR) is None
    landed, stored = rank_major(shape, **rows), make_weights(shape, seed=3, device="cpu", copies=2)
    compute.prepare(shape, Layout.RANK_MAJOR, stored)
    place, wanted = oracle.expected_of_rows(shape, stored.copies[0], landed, compute.arithmetic(shape))
    for turn in range(3):
        landed.out.fill_(float("nan"))
        compute.run(landed, turn)
        judged = oracle.judge(landed.out[place], wanted)
        assert judged.ok, judged.sentence()
    assert compute.describe().version == "flashinfer 0.7.4"
    assert compute.workspace_bytes > sum(tensor.nbytes for tensor in stored.copies[0].tensors())
    compute.release()


def test_flashinfer_without_the_sources_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a trimmed install: a build of it would fail in every unit."""
    jit = ModuleType("flashinfer.jit")
    jit.env = SimpleNamespace(  # type: ignore[attr-defined]
        FLASHINFER_CSRC_DIR=tmp_path / "csrc",
        FLASHINFER_JIT_DIR=tmp_path / "ops",
        FLASHINFER_AOT_DIRS=(tmp_path / "aot",),
    )
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    said = FlashInferMoe().unavailable() or ""
    assert said.startswith("this flashinfer has neither fused_moe_90 compiled nor the sources to compile it from")
    assert str(tmp_path / "csrc") in said
    compiled = tmp_path / "aot" / "fused_moe_90" / "fused_moe_90.so"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert FlashInferMoe().unavailable() is None
    compiled.unlink()
    (tmp_path / "csrc" / "fused_moe" / "cutlass_backend").mkdir(parents=True)
    assert FlashInferMoe().unavailable() is None


@pytest.mark.parametrize(
    ("compute", "rows", "weights", "layout", "says"),
    [
        (TorchGrouped(), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "bf16 rows and weights only"),
        (GatherGemm(), RowFormat.BF16, BF16, Layout.EXPERT_MAJOR, "rank-major rows in place, not expert_major"),
        (GatherGemm(), RowFormat.BF16, FP4, Layout.RANK_MAJOR, "bf16 rows with bf16 weights and fp8 with fp8"),
        (GatherGemm(block_n=64), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "block_n=64 must be 128 for fp8"),
        (GatherGemm(in_turn=1), RowFormat.BF16, BF16, Layout.RANK_MAJOR, "in_turn=1 is for fp8 alone"),
        (GatherGemm(late=1), RowFormat.BF16, BF16, Layout.RANK_MAJOR, "late=1 is for fp8 alone"),
        (GatherGemm(late=1, in_turn=1), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "leave it out, or late=1"),
        (GatherGemm(late=1, alone=1), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "late=1 and alone=1 are two orders"),
        (GatherGemm(alone=1), RowFormat.BF16, BF16, Layout.RANK_MAJOR, "alone=1 is for fp8 alone"),
        (GatherGemm(block_t=32, tall=1), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "tall=1 needs block_t=64 or more"),
        (GatherGemm(block_t=16, down_tall=1), RowFormat.BF16, BF16, Layout.RANK_MAJOR, "more, the rows of a product"),
        (GatherGemm(tall=2), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "tall=2 must be 1, or 0 for its default"),
        (
            GatherGemm(block_t=128, tall=1, stages=8),
            RowFormat.FP8,
            FP8,
            Layout.RANK_MAJOR,
            "stages=8 of 49152 bytes take 393216 bytes of shared memory, more than the 232448 of a block: take 4",
        ),
        (GatherGemm(block_t=64, in_turn=1, stages=10), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "245760 bytes"),
        (
            GatherGemm(block_t=64, down_stages=10),
            RowFormat.BF16,
            BF16,
            Layout.RANK_MAJOR,
            "down_stages=10 of 24576",
        ),
        (DeepGemm("sideways"), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "form=sideways must be auto, masked or contig"),
        (DeepGemm(), RowFormat.BF16, FP8, Layout.RANK_MAJOR, "not bf16 rows with fp8 weights"),
        (
            DeepGemm(),
            RowFormat.FP8,
            FP8,
            Layout.EXPERT_MAJOR,
            "capacity_rows=24 of each expert is not a multiple of 128",
        ),
        (FlashInferMoe(), RowFormat.FP8, FP8, Layout.RANK_MAJOR, "bf16 rows with bf16 or fp4 weights"),
        (FlashInferMoe(), RowFormat.BF16, BF16, Layout.EXPERT_MAJOR, "rank-major rows, not expert_major"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    compute: ExpertCompute, rows: RowFormat, weights: WeightFormat, layout: Layout, says: str
) -> None:
    shape = shape_of(rows, weights)
    assert says in (compute.unsupported(shape, layout) or "")


def test_as_many_stages_as_fit_are_taken() -> None:
    """9 stages of 192 rows of 128 bytes are 221184, below 232448."""
    shape = shape_of(RowFormat.FP8, FP8)
    assert GatherGemm(block_t=64, in_turn=1, stages=9, down_stages=9).unsupported(shape, Layout.RANK_MAJOR) is None
    few = replace(shape, expected_rows_per_expert=8)
    assert default_tiles(few).stages == 6  # which of tiles of 64 pairs would take 245760
    assert GatherGemm(block_t=64).unsupported(few, Layout.RANK_MAJOR) is None


@pytest.mark.parametrize("compute", [TorchGrouped(), GatherGemm(), DeepGemm(), FlashInferMoe()])
def test_faulty_shapes_are_refused_by_all(compute: ExpertCompute) -> None:
    shape: ExpertShape = shape_of(RowFormat.BF16, BF16)
    for wrong, says in (
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"first_slot": -1}, "first_slot=-1 must not be negative"),
        ({"row_format": RowFormat.NVFP4}, "row_format=nvfp4 is no format"),
        ({"row_format": RowFormat.FP8, "hidden": 200}, "hidden=200 is not a multiple of 128"),
    ):
        for layout in Layout:
            assert says in (compute.unsupported(replace(shape, **wrong), layout) or "")


@pytest.mark.parametrize(
    ("experts", "rows", "form"),
    [(32, 1024, "masked"), (4, 8192, "masked"), (32, 8448, "masked"), (32, 8449, "contiguous"), (128, 2048, "masked")],
)
def test_deepgemm_makes_room_for_every_row_at_each_expert_up_to_8_gib(experts: int, rows: int, form: str) -> None:
    sizes = {"num_local_experts": experts, "first_slot": 0, "hidden": 7168, "intermediate": 2048, "top_k": 8}
    assert rank_major_form(shape_of(RowFormat.FP8, FP8, capacity_rows=rows, **sizes)) == form
    if (experts, rows) == (128, 2048):
        assert rank_major_form(shape_of(RowFormat.BF16, BF16, capacity_rows=rows, **sizes)) == "contiguous"


def test_gather_gemm_names_every_size_that_its_tiles_do_not_divide() -> None:
    shape = shape_of(RowFormat.BF16, BF16, hidden=200, intermediate=77)
    said = GatherGemm().unsupported(shape, Layout.RANK_MAJOR)
    assert said == "hidden=200 and intermediate=77 are not multiples of 128, the width of a tile"


def test_two_blocks_of_columns_divide_the_output() -> None:
    shape = shape_of(RowFormat.FP8, FP8, hidden=384)
    said = GatherGemm(down_pair=1).unsupported(shape, Layout.RANK_MAJOR) or ""
    assert said.startswith("hidden=384 is not a multiple of 256, the two blocks of down_pair=1")
    assert GatherGemm(down_pair=1, down_block_n=64).unsupported(shape, Layout.RANK_MAJOR) is None
    deep = GatherGemm(block_t=128, down_pair=1, down_stages=5).unsupported(
        replace(shape, hidden=512), Layout.RANK_MAJOR
    )
    assert "down_stages=5 of 49152 bytes" in (deep or "")


@pytest.mark.parametrize(("weights", "most"), [(BF16, 128), (FP8, 64)])
def test_every_count_of_pairs_has_default_tiles(weights: WeightFormat, most: int) -> None:
    shape = shape_of(RowFormat.FP8 if weights is FP8 else RowFormat.BF16, weights, capacity_rows=1)
    for pairs, block_t in ((1, 16), (10, 16), (11, 32), (24, 32), (25, 64), (48, 64), (49, most), (1 << 20, most)):
        assert default_tiles(replace(shape, expected_rows_per_expert=pairs)).block_t == block_t
    assert default_tiles(shape).block_t == 16
    assert [least for least, _, _ in DEFAULTS[weights]] == sorted(least for least, _, _ in DEFAULTS[weights])


@pytest.mark.parametrize(
    ("pairs", "experts", "there"),
    [(48, 32, False), (49, 32, True), (49, 4, False), (96, 4, False), (97, 4, True), (4096, 32, True)],
)
def test_many_pairs_are_served_by_warps_that_each_do_one_thing(pairs: int, experts: int, there: bool) -> None:
    sizes = {"num_local_experts": experts, "first_slot": 0, "hidden": 7168, "intermediate": 2048, "top_k": 8}
    shape = replace(shape_of(RowFormat.FP8, FP8, **sizes), expected_rows_per_expert=pairs)
    assert default_tiles(shape, specialised=True).specialised == there
    assert not default_tiles(shape).specialised  # where they cannot be had
    odd = replace(shape, hidden=7168 + 128)
    assert not default_tiles(odd, specialised=True).specialised
    # who asks for another form gets it, and rounding does not depend on which of them a GPU serves
    assert not chosen_tiles(shape, {"block_t": 64}, specialised=True).specialised
    assert default_tiles(shape, specialised=True).rounded == default_tiles(shape).rounded
    assert chosen_tiles(shape, {"balance": 1}, specialised=True).specialised == there


@pytest.mark.parametrize(
    ("asked", "weights", "sizes", "says"),
    [
        ({"tall": 1}, FP8, {}, "specialised=1 has its own tiles: leave out tall=1, or it"),
        ({}, BF16, {}, "specialised=1 is for fp8 alone"),
        ({}, FP8, {"hidden": 640}, "hidden=640: with specialised=1 hidden and intermediate must be multiples of 512"),
    ],
)
def test_what_specialised_warps_cannot_serve(asked: dict, weights: WeightFormat, sizes: dict, says: str) -> None:
    rows = RowFormat.FP8 if weights is FP8 else RowFormat.BF16
    shape = shape_of(rows, weights, **{"hidden": 512, "intermediate": 512, **sizes})
    assert says in (GatherGemm(specialised=1, **asked).unsupported(shape, Layout.RANK_MAJOR) or "")


def test_specialised_warps_say_why_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(RowFormat.FP8, FP8, hidden=512, intermediate=512)
    monkeypatch.setattr(specialised, "interpreted", lambda: False)
    monkeypatch.setattr(specialised, "major_capability", lambda: 10)
    said = GatherGemm(specialised=1).unsupported(shape, Layout.RANK_MAJOR)
    assert said == "specialised=1 cannot be had: they are for compute capability 9, and this GPU has 10; leave it out"
    assert not GatherGemm()._chosen(replace(shape, expected_rows_per_expert=1000)).specialised
    monkeypatch.setattr(specialised, "major_capability", lambda: 9)
    assert GatherGemm(specialised=1).unsupported(shape, Layout.RANK_MAJOR) is None
    assert GatherGemm()._chosen(replace(shape, expected_rows_per_expert=1000)).specialised


def test_gather_gemm_says_what_its_index_cannot_hold() -> None:
    shape = shape_of(RowFormat.BF16, BF16, capacity_rows=1 << 24)
    assert "32-bit index" in (GatherGemm().unsupported(shape, Layout.RANK_MAJOR) or "")
    assert torch.iinfo(torch.int32).max < (1 << 24) * 128


@pytest.mark.parametrize(
    ("option", "value"),
    [("block_t", -3), ("block_t", 48), ("warps", 5), ("stages", 40), ("balance", 3), ("prefetch", 7)],
)
def test_tiles_that_cannot_be_are_refused_by_name(option: str, value: int) -> None:
    shape = shape_of(RowFormat.BF16, WeightFormat.BF16)
    assert GatherGemm(**{option: 0}).unsupported(shape, Layout.RANK_MAJOR) is None
    said = GatherGemm(**{option: value}).unsupported(shape, Layout.RANK_MAJOR) or ""
    assert said.startswith(f"{option}={value} must be one of ")
    assert said.endswith(", or 0 for its default")
