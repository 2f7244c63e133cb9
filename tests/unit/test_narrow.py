"""`backend=` and `compute=` in a sweep of blocks: which blocks they leave, each with what it says of its own."""

from collections import Counter
from pathlib import Path

from planning import plan_of, sweep_file, the_problem

from epcross.harness.planning.plan import Plan

OWN = """
description: each backend in a block of its own
grid: {model: tiny, ep_size: 2, regime: steady}
blocks:
  - grid: {backend: plain, tokens_per_rank: 1, backend.options.chunk: [2, 3]}
  - grid: {backend: [other, plain], tokens_per_rank: 1, dispatch_format: fp8}
  - zip: [{backend: [other, small, plain], tokens_per_rank: [4, 5, 6]}]
"""

COMMON = """
description: some blocks take the common backends, and one its own
grid: {model: tiny, ep_size: 2, tokens_per_rank: 1, regime: steady, backend: [plain, other]}
blocks:
  - grid: {dispatch_format: bf16}
  - grid: {dispatch_format: fp8}
  - grid: {backend: small, tokens_per_rank: 8}
"""


def places(plan: Plan) -> Counter[tuple[object, ...]]:
    """How many points there are of each backend, stage, number of experts, row format and regime."""
    return Counter(
        (p.backend, p.compute, p.model.num_experts, str(p.dispatch_format), str(p.regime)) for p in plan.points
    )


def test_the_layer_sweep_narrowed_to_a_fused_layer_is_its_own_blocks() -> None:
    plan = plan_of("sweep=layer_h200x2", "backend=megamoe")
    assert places(plan) == {("megamoe", "", 64, "fp8", "steady"): 13, ("megamoe", "", 256, "fp8", "steady"): 4}
    beside = plan_of("sweep=layer_h200x2").points
    assert list(plan.points) == [point for point in beside if point.backend == "megamoe"]


def test_every_backend_of_the_layer_sweep_keeps_its_own_points() -> None:
    points = plan_of("sweep=layer_h200x2").points
    for backend in dict.fromkeys(point.backend for point in points):
        narrowed = plan_of("sweep=layer_h200x2", f"backend={backend}").points
        assert set(narrowed) == {point for point in points if point.backend == backend}
    several = plan_of("sweep=layer_h200x2", "backend=megamoe_push,layer_flashinfer").points
    assert set(several) == {point for point in points if point.backend in ("megamoe_push", "layer_flashinfer")}


def test_the_layer_that_has_most_sms_is_planned_where_they_matter() -> None:
    points = plan_of("sweep=layer_h200x2", "backend=layer_deepep_v2_max").points
    assert {(p.compute, dict(p.options)["sm_budget"], p.regime) for p in points} == {("deepgemm", "maximum", "steady")}
    assert Counter((p.model.num_experts, str(p.dispatch_format), p.tokens_per_rank) for p in points) == Counter(
        [*((64, "fp8", tokens) for tokens in (128, 224, 512, 2048, 4096)), (64, "bf16", 128)]
        + [(256, "fp8", tokens) for tokens in (128, 512)]
    )
    beside = plan_of("sweep=layer_h200x2", "backend=layer_deepep_v2").points  # of each there is one with few SMs
    few = {(p.model.num_experts, p.dispatch_format, p.tokens, p.compute, p.regime) for p in beside}
    assert {(p.model.num_experts, p.dispatch_format, p.tokens, p.compute, p.regime) for p in points} <= few


def test_a_stage_keeps_the_blocks_that_have_it() -> None:
    points = plan_of("sweep=experts_h200").points
    kept = plan_of("sweep=experts_h200", "compute=torch_grouped").points
    assert set(kept) == {point for point in points if point.compute == "torch_grouped"}
    both = plan_of("sweep=layer_h200x2", "backend=layer_deepep_v2", "compute=gather_gemm")
    assert places(both) == {("layer_deepep_v2", "gather_gemm", 64, "fp8", "steady"): 3}


def test_a_stage_that_no_block_has_takes_the_place_of_those_there() -> None:
    plan = plan_of("sweep=layer_h200x2", "backend=layer_flashinfer", "compute=flashinfer")
    assert places(plan) == {("layer_flashinfer", "flashinfer", 256, "fp8", "steady"): 4}


def test_options_formats_and_zips_stay_with_their_block(tmp_path: Path) -> None:
    more = (sweep_file(tmp_path, OWN),)
    plan = plan_of("sweep=mine", "backend=plain", more=more)
    assert [(dict(p.options)["chunk"], p.dispatch_format, p.tokens_per_rank) for p in plan.points] == [
        (2, "bf16", 1),
        (3, "bf16", 1),
        (4, "fp8", 1),
        (4, "bf16", 6),
    ]
    # no point is left that reads the option of the first block
    plan = plan_of("sweep=mine", "backend=small,other", more=more)
    assert [(p.backend, p.dispatch_format, p.tokens_per_rank) for p in plan.points] == [
        ("other", "fp8", 1),
        ("other", "bf16", 4),
        ("small", "bf16", 5),
    ]
    # all other words replace what the blocks that are left say
    plan = plan_of("sweep=mine", "backend=plain", "tokens_per_rank=7", "backend.options.chunk=9", more=more)
    assert [(dict(p.options)["chunk"], p.dispatch_format, p.tokens_per_rank) for p in plan.points] == [
        (9, "bf16", 7),
        (9, "fp8", 7),
    ]


def test_a_backend_that_no_block_has_is_told_what_there_is(tmp_path: Path) -> None:
    more = (sweep_file(tmp_path, OWN),)
    for word in ("backend=absent", "backend=plain,absent"):
        assert the_problem("sweep=mine", word, more=more) == (
            "sweep 'mine' has no block for backend=absent; each of its blocks names its own, of plain, other, small: "
            "choose among these, or take another sweep"
        )
    assert the_problem("sweep=mine", "backend=plian", more=more).startswith(
        "command line: unknown backend 'plian'; did you mean 'plain'?"
    )


def test_a_new_backend_goes_where_the_common_ones_do(tmp_path: Path) -> None:
    more = (sweep_file(tmp_path, COMMON),)
    found = [(p.backend, p.dispatch_format) for p in plan_of("sweep=mine", "backend=careless", more=more).points]
    assert found == [("careless", "bf16"), ("careless", "fp8")]
    found = [(p.backend, p.tokens_per_rank) for p in plan_of("sweep=mine", "backend=small", more=more).points]
    assert found == [("small", 8)]
    found = [(p.backend, p.tokens_per_rank) for p in plan_of("sweep=mine", "backend=small,other", more=more).points]
    assert found == [("other", 1), ("other", 1), ("small", 8)]


def test_an_option_of_the_sweep_that_the_chosen_backend_has_not_is_no_mistake(tmp_path: Path) -> None:
    text = COMMON[: COMMON.index("blocks:")] + "blocks:\n  - grid: {backend.options.chunk: 2}\n"
    more = (sweep_file(tmp_path, text),)
    assert [p.backend for p in plan_of("sweep=mine", "backend=other", more=more).points] == ["other"]
    words = ("sweep=mine", "backend=other", "backend.options.chunk=3")
    assert the_problem(*words, more=more) == "no backend of the sweep has the option 'chunk'"
