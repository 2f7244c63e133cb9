"""The need of a plan: closed form, so its parts are checked by hand and its trends by comparison."""

from dataclasses import replace
from pathlib import Path

import pytest
from planning import plan_of

from epcross.harness.planning import estimate
from epcross.harness.terms import Regime


def one(*words: str):
    regime = [] if any(word.startswith("regime") for word in words) else ["regime=steady"]
    return plan_of("sweep=crossover", "backend=plain", "tokens_per_rank=8", *regime, *words)


def test_parts_by_hand():
    plan = one("model=tiny", "timing=smoke")
    (point,) = plan.points
    # tiny: 128 bytes a row, top-2 of EP 2: 8 tokens are copied to 2 ranks, there and back
    assert estimate.pair_us(point, cores=2) == pytest.approx(10 + 8 * 2 * 256 / 3e3)
    pairs = min(5e3 / estimate.pair_us(point, cores=2), 2000)
    assert estimate.series_s(point, plan.timing, 2) == pytest.approx((5 + pairs) * estimate.pair_us(point, 2) * 1e-6)
    entry = replace(point, regime=Regime.ENTRY)
    assert estimate.series_s(entry, plan.timing, 2) == pytest.approx(15 * estimate.pair_us(point, 2) * 1e-6)
    # 16 tokens: inputs of two sets, then four times what is sent, received and summed
    assert estimate.checked_bytes(point, plan.timing) == 2 * 16 * 128 + 4 * (16 * 128 + 32 * 128 + 16 * 128)


def test_need_of_a_job():
    plan = one("model=tiny", "timing=smoke", "max_tokens_per_rank=1000")
    (need,) = estimate.needs(plan, cores=2)
    assert need.shm_bytes == 2 * 100 * 1000
    assert need.rank_memory_bytes > 150e6 + 100 * 1000
    assert (need.units, need.rows) == (1, 1)
    assert need.time_s == pytest.approx(0.6 + estimate.unit_s(plan.points[0], plan.timing, 2))
    (three,) = estimate.needs(one("model=tiny", "timing=smoke", "timing.launches=3", "regime=entry"), cores=2)
    assert (three.units, three.rows) == (3, 9)


def test_more_of_anything_needs_no_less():
    base = estimate.needs(one(), cores=2)[0]
    for words in (
        ["timing.seeds=9"],
        ["timing.launches=9"],
        ["timing.chains=9"],
        ["ep_size=8"],
        ["tokens_per_rank=512"],
    ):
        more = estimate.needs(plan_of("sweep=crossover", "backend=plain", "regime=steady", *words), cores=2)[0]
        assert more.time_s > base.time_s, words
    assert estimate.pair_us(one("ep_size=4").points[0], cores=2) > estimate.pair_us(one("ep_size=4").points[0], cores=4)


def test_a_unit_never_takes_longer_than_its_limit():
    plan = one("timing.chain_ms=1e9", "timing.max_pairs=1000000000", "timing.wall_limit_s=3")
    assert estimate.unit_s(plan.points[0], plan.timing, 2) == 3.0


def test_free_bytes():
    assert estimate.free_shm_bytes(Path("/no/such/folder")) is None
    free = estimate.free_shm_bytes(Path("/tmp"))
    assert free is not None
    assert free > 0


def test_a_floor_job_needs_no_rows():
    needs = estimate.needs(plan_of("sweep=floor"), cores=2)
    assert [(need.ep_size, need.rows, need.shm_bytes) for need in needs] == [(2, 0, 0), (4, 0, 0)]


def test_an_expert_stage_by_itself_is_one_ranks_work_whatever_the_ep_size():
    """Not that of all ranks: what a machine is lent for minutes is chosen by these numbers."""
    words = ("sweep=experts_h200", "compute=gather_gemm", "dispatch_format=fp8", "tokens_per_rank=128")
    points = {p.ep_size: p for p in plan_of(*words).points if "rank_major" in str(p.options)}
    timing = plan_of(*words).timing
    took = {ep_size: estimate.unit_s(point, timing, 16) for ep_size, point in points.items()}
    assert took[8] > took[16] > took[64] > estimate.GPU_PREPARE_S  # fewer experts each
    assert took[8] < 4


def test_what_an_oracle_costs_grows_with_experts_and_tokens():
    words = ("sweep=layer_h200x2", "backend=layer_onesided", "compute=gather_gemm", "dispatch_format=fp8")
    timing = plan_of(*words).timing
    took = {
        (p.model.num_experts, p.tokens_per_rank): estimate.unit_s(p, timing, 32)
        for p in plan_of(*words, "regime=steady", "tokens_per_rank=32,128,2048").points
    }
    assert took[64, 32] < took[64, 2048]
    assert took[64, 128] < took[256, 128]
