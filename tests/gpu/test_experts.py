"""Expert stages on a GPU at the sizes of DeepSeek-V3, judged by the oracle; in graphs that see other routing."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from epcross.kernels.experts import oracle
from epcross.kernels.experts.compute import ExpertCompute
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE, DeepGemm
from epcross.kernels.experts.flashinfer import FlashInferMoe
from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.gather_gemm import GatherGemm
from epcross.kernels.experts.landing import ExpertMajorLanding, RankMajorLanding
from epcross.kernels.experts.quantise import quantise_fp8_rows, quantise_rows
from epcross.kernels.experts.torch_grouped import TorchGrouped
from epcross.kernels.experts.weights import ExpertWeights, make_weights
from epcross.kernels.formats import RowFormat

from tests._experts import hidden_states, random_ids, rank_major, untouched  # isort: skip

SLOTS, TOP_K, SOURCES = 256, 8, 8
FORMATS = {
    "bf16": (RowFormat.BF16, WeightFormat.BF16),
    "fp8": (RowFormat.FP8, WeightFormat.FP8),
    "bf16 x fp4": (RowFormat.BF16, WeightFormat.FP4),
}
RANK_MAJOR: dict[str, Callable[[], ExpertCompute]] = {
    "torch_grouped": TorchGrouped,
    "gather_gemm": GatherGemm,
    "gather_gemm of specialised warps": lambda: GatherGemm(specialised=1),
    "deepgemm masked": lambda: DeepGemm("masked"),
    "deepgemm contiguous": lambda: DeepGemm("contiguous"),
    "flashinfer": FlashInferMoe,
}
EXPERT_MAJOR: dict[str, Callable[[], ExpertCompute]] = {"torch_grouped": TorchGrouped, "deepgemm": DeepGemm}
_made: dict[str, ExpertWeights] = {}


def shape_of(formats: str, tokens: int, experts: int = 8) -> ExpertShape:
    rows, weights = FORMATS[formats]
    return ExpertShape(
        num_local_experts=experts, first_slot=8, top_k=TOP_K, hidden=7168, intermediate=2048, row_format=rows,
        weight_format=weights, capacity_rows=SOURCES * tokens,
        expected_rows_per_expert=max(1, SOURCES * tokens * TOP_K // 64),
    )  # fmt: skip


def weights_of(shape: ExpertShape) -> ExpertWeights:
    """Of one format at a time, in two copies."""
    key = f"{shape.weight_format} {shape.num_local_experts}"
    if key not in _made:
        _made.clear()
        _made[key] = make_weights(shape, seed=1, device="cuda", copies=2)
    return _made[key]


def land(landing: RankMajorLanding | ExpertMajorLanding, shape: ExpertShape, tokens: int, seed: int) -> None:
    """Tokens of every source that choose among 64 slots, this rank's 8 among them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for source in range(SOURCES):
        values = hidden_states(tokens, shape.hidden, generator, "cuda")
        rows, scales = values.view(torch.uint8), None
        if shape.row_format is RowFormat.FP8:
            codes, scales = quantise_fp8_rows(values)
            rows = codes.view(torch.uint8)
        weights = torch.rand((tokens, TOP_K), generator=generator, device="cuda")
        landing.land(source, rows, scales, random_ids(tokens, TOP_K, 64, generator, "cuda"), weights)


def served(compute: ExpertCompute, shape: ExpertShape, layout: Layout) -> None:
    if reason := compute.unavailable() or compute.unsupported(shape, layout):
        pytest.skip(f"not on this GPU: {reason}")


def judged(shape: ExpertShape, compute: ExpertCompute, rows) -> None:
    place, wanted = oracle.expected_of_rows(shape, weights_of(shape).copies[0], rows, compute.arithmetic(shape))
    verdict = oracle.judge(rows.out.flatten(0, -2)[place], wanted)
    assert len(place) > 0
    sys.stdout.write(f"{type(compute).__name__}: {verdict.sentence()}\n")  # pytest -rP shows it
    assert verdict.ok, verdict.sentence()


def in_a_graph(compute: ExpertCompute, shape: ExpertShape, landing, tokens: int) -> None:
    """Eagerly once, then captured, then replayed on other rows with other routing."""
    compute.prepare(shape, landing.rows.layout, weights_of(shape))
    land(landing, shape, tokens, 1)
    torch.cuda.synchronize()  # what was prepared is filled, before another stream reads it
    with torch.cuda.stream(torch.cuda.Stream()):
        compute.run(landing.rows)
        torch.cuda.synchronize()
        judged(shape, compute, landing.rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute.run(landing.rows, 1)
        for seed in (2, 3):
            land(landing, shape, tokens, seed)
            landing.rows.out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            judged(shape, compute, landing.rows)
    del graph
    compute.release()


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("name", RANK_MAJOR)
@pytest.mark.parametrize("formats", FORMATS)
def test_rank_major(formats: str, name: str, tokens: int) -> None:
    shape, compute = shape_of(formats, tokens), RANK_MAJOR[name]()
    served(compute, shape, Layout.RANK_MAJOR)
    in_a_graph(compute, shape, RankMajorLanding(shape, SOURCES, "cuda"), tokens)


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("name", EXPERT_MAJOR)
@pytest.mark.parametrize("formats", ["bf16", "fp8"])
def test_expert_major(formats: str, name: str, tokens: int) -> None:
    shape, compute = shape_of(formats, tokens), EXPERT_MAJOR[name]()
    room = -(-shape.capacity_rows // MASKED_ROWS_MULTIPLE) * MASKED_ROWS_MULTIPLE
    shape = replace(shape, capacity_rows=room)
    served(compute, shape, Layout.EXPERT_MAJOR)
    in_a_graph(compute, shape, ExpertMajorLanding(shape, SOURCES, "cuda"), tokens)


@pytest.mark.parametrize(
    "tiles",
    [
        {"block_t": 16, "prefetch": 1024, "balance": 1},
        {"block_t": 16, "warps": 8, "per_sm": 2, "regs": 128},
        {"block_t": 32},
        {"block_t": 64},
        {"block_t": 64, "warps": 16, "down_per_sm": 2, "down_regs": 128},
        {"block_t": 64, "tall": 1, "down_tall": 1},
        {"block_t": 128, "tall": 1, "stages": 3, "down_tall": 1, "down_block_n": 64},
        {"block_t": 128, "tall": 1, "warps": 8, "down_tall": 1, "down_pair": 1, "down_warps": 8, "down_per_sm": 1},
        {"block_t": 128, "tall": 1, "warps": 8, "down_pair": 1, "down_block_n": 64, "rounded": 1, "finish_per_sm": 8},
        {"block_t": 16, "warps": 8, "balance": 1, "ahead": 256, "early": 1},
    ],
)
@pytest.mark.parametrize("formats", ["bf16", "fp8"])
def test_gather_gemm_with_any_tiles_and_two_sets(formats: str, tiles: dict[str, int]) -> None:
    shape, compute = shape_of(formats, 40), GatherGemm(**tiles)
    served(compute, shape, Layout.RANK_MAJOR)
    compute.prepare(shape, Layout.RANK_MAJOR, weights_of(shape))
    for epoch in (7, 8):
        rows = rank_major(shape, sources=SOURCES, sets=2, epoch=epoch, slots=64, device="cuda")
        compute.run(rows)
        judged(shape, compute, rows)
        place, _ = oracle.expected_of_rows(shape, weights_of(shape).copies[0], rows, compute.arithmetic(shape))
        assert untouched(rows.out, place)


@pytest.mark.parametrize("balance", [1, 2])
@pytest.mark.parametrize("form", [{"in_turn": 1}, {"late": 1}, {"alone": 1}])
@pytest.mark.parametrize("of", [{"block_t": 16}, {"block_t": 64, "tall": 1}])
def test_gather_gemm_adds_in_the_same_order_in_every_form(
    of: dict[str, int], form: dict[str, int], balance: int
) -> None:
    """Of GEMM1's fp8 sums, to the last bit."""
    shape, outs = shape_of("fp8", 40), []
    rows = rank_major(shape, sources=SOURCES, slots=64, device="cuda")
    for tiles in (of, of | form):
        compute = GatherGemm(**tiles, balance=balance)
        served(compute, shape, Layout.RANK_MAJOR)
        compute.prepare(shape, Layout.RANK_MAJOR, weights_of(shape))
        rows.out.fill_(0)
        compute.run(rows)
        judged(shape, compute, rows)
        outs.append(rows.out.clone())
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("formats", "tokens", "tiles"),
    [("bf16", 2, {}), ("fp8", 2, {}), ("fp8", 2, {"specialised": 1}), ("fp8", 150, {"specialised": 1})],
)
def test_gather_gemm_gives_the_same_bits_again(formats: str, tokens: int, tiles: dict[str, int]) -> None:
    """Whoever comes last adds parts in their order, so that no run differs from another."""
    shape, compute = shape_of(formats, tokens, experts=2), GatherGemm(**tiles)
    served(compute, shape, Layout.RANK_MAJOR)
    landing = RankMajorLanding(shape, SOURCES, "cuda")
    land(landing, shape, tokens, 4)
    compute.prepare(shape, Layout.RANK_MAJOR, weights_of(shape))
    seen = []
    for _ in range(20):
        landing.rows.out.zero_()
        compute.run(landing.rows)
        seen.append(landing.rows.out.clone())
    assert all(torch.equal(seen[0].view(torch.int16), each.view(torch.int16)) for each in seen[1:])
    compute.check()


def test_quantisation_is_bit_for_bit_that_of_torch() -> None:
    x = hidden_states(300, 7168, torch.Generator("cuda").manual_seed(5), "cuda")
    x[7, 256:512] = 0
    rows = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty((300, 56), device="cuda")
    quantise_rows(x, rows, scales)
    wanted_rows, wanted_scales = quantise_fp8_rows(x.cpu())
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(rows.view(torch.uint8).cpu(), wanted_rows.view(torch.uint8))


def test_weights_are_the_same_on_any_device() -> None:
    shape = shape_of("fp8", 1, experts=1)
    here, there = (make_weights(shape, seed=9, device=device).copies[0] for device in ("cuda", "cpu"))
    for made, wanted in zip(here.tensors(), there.tensors(), strict=True):
        assert torch.equal(made.view(torch.uint8).cpu(), wanted.view(torch.uint8))
