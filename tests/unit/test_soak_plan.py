"""Soaks before any rank starts: which cases are drawn, how their time is shared, what the table says."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from planning import plan_of, problems_of, sweep_file
from rich.console import Console

from _spawn import TIMING, job, new_run, point
from epcross.harness.analysis.soak_table import failure_lines, moved_gb, soak_table, verified_rounds
from epcross.harness.measuring.soak_session import visiting_order
from epcross.harness.planning.build import build
from epcross.harness.planning.estimate import GPU_START_S, needs
from epcross.harness.planning.plan import Plan
from epcross.harness.record import Record
from epcross.harness.running.time_budget import TimeBudget
from epcross.harness.storing.rows import RunContext, base_record, failed_records
from epcross.harness.terms import Domain, Phase, PlacementKind, RoutingKind, RowFormat, Status

SMALL = """
description: A soak.
soak: {seconds: 20, case_s: 1.0, seed: 5}
grid:
  {backend: plain, model: tiny, model.num_experts: 12, ep_size: {from: 1, to: 4}, tokens_per_rank: {from: 1, to: 90}}
"""


def test_a_case_is_a_function_of_seed_and_number(tmp_path: Path):
    folder = sweep_file(tmp_path, SMALL)
    plan = plan_of("sweep=mine", more=(folder,))
    assert plan.soak is not None
    assert plan.soak.cases == tuple(range(20))
    assert plan == plan_of("sweep=mine", more=(folder,))
    longer = plan_of("sweep=mine", "soak.seconds=30", more=(folder,))
    assert longer.points[:20] == plan.points
    other = plan_of("sweep=mine", "soak.seed=6", more=(folder,))
    assert len(set(other.points) & set(plan.points)) < 10
    for number in (0, 7, 19):
        alone = plan_of("sweep=mine", f"soak.only={number}", "soak.seconds=300", more=(folder,))
        assert alone.points == (plan.points[number],)
        assert alone.soak is not None
        assert alone.soak.cases == (number,)
    assert {p.ep_size for p in longer.points} == {1, 2, 3, 4}
    assert len({p.tokens_per_rank for p in longer.points}) > 20


def test_the_shipped_soak_reaches_every_kind_of_case():
    plan = build(["sweep=soak", "soak.seconds=300"])
    points = plan.points
    assert len(points) >= 290
    assert {p.backend for p in points} == {"shm_sentinel", "shm_fence", "shm_two_sided"}
    assert {p.ep_size for p in points} == {1, 2, 3, 4}
    assert {p.dispatch_format for p in points} == set(RowFormat)
    assert {p.placement.kind for p in points} == set(PlacementKind)
    assert {p.routing.kind for p in points} == set(RoutingKind) - {RoutingKind.TRACE, RoutingKind.MATRIX}
    assert any(0 in p.tokens for p in points)
    assert any(max(p.tokens) > 2 * min(p.tokens) > 0 for p in points)
    assert any(p.max_tokens_per_rank > max(p.tokens) for p in points)
    assert any(p.routing.masked_fraction > 0.9 for p in points)
    assert {dict(p.options)["first_epoch"] for p in points} == {1, 2, 2147483640, 4294967290}
    assert sum(need.time_s for need in needs(plan)) == pytest.approx(300)


def test_the_soak_over_nvlink_reaches_both_protocols_and_every_size():
    plan = build(["sweep=soak_nvlink"])
    points = plan.points
    assert {p.domain for p in points} == {Domain.NVLINK}
    assert {(p.backend, p.dispatch_format) for p in points} == {
        (backend, row_format)
        for backend in ("onesided_sentinel", "onesided_fence")
        for row_format in (RowFormat.BF16, RowFormat.FP8)
    }
    assert {1, 2, 32, 4096} < {p.tokens_per_rank for p in points}
    assert {p.routing.kind for p in points} >= {RoutingKind.UNIFORM, RoutingKind.ZIPF, RoutingKind.HOT_EXPERT}
    assert {p.routing.masked_fraction for p in points} == {0.0, 0.1, 0.5, 0.95}
    assert plan.soak is not None
    assert plan.soak.seconds >= 480


def test_a_soak_survives_json():
    plan = build(["sweep=soak", "soak.seconds=5"])
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    old = build(["sweep=smoke"]).to_json()
    del old["soak"]  # as plans were before there were soaks
    assert Plan.from_json(old).soak is None


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("soak.seconds=0", "soak.seconds=0.0 must be above 0"),
        ("soak.seed=-1", "soak.seed=-1 must be at least 0"),
        ("soak.only=-2", "soak.only=-2 must be at least 0"),
        ("soak.seconds=1e9", "over 20000 cases; raise case_s"),
        ("soak.case_s=1e22", "soak.case_s=1e+22 must be at most 10000000"),
        ("soak.seconds=long", "soak: seconds is 'long', but must be a number"),
        ("soak.secnds=5", "did you mean 'seconds'?"),
        ("soak.seconds=5,6", "give one value"),
        ("tokens_per_rank=0", "draws gave no point that can exist"),
    ],
)
def test_a_wrong_soak_is_refused(tmp_path: Path, word: str, says: str):
    assert says in "\n".join(problems_of("sweep=mine", word, more=(sweep_file(tmp_path, SMALL),)))


def test_only_a_soak_takes_a_soaks_words():
    assert "sweep 'smoke' is no soak" in "\n".join(problems_of("sweep=smoke", "backend=plain", "soak.seconds=5"))


def test_a_range_is_every_integer_between_and_a_wrong_one_is_no_value(tmp_path: Path):
    text = "description: x\ngrid: {backend: plain, model: tiny, tokens_per_rank: {from: 3, to: 6}}\n"
    (tmp_path / "right").mkdir()
    plan = plan_of("sweep=mine", more=(sweep_file(tmp_path / "right", text),))
    assert [p.tokens_per_rank for p in plan.points] == [3, 4, 5, 6]
    for number, wrong in enumerate(("{from: 6, to: 3}", "{from: 1, to: 9999999}", "{from: 1.0, to: 3}", "{from: 1}")):
        folder = tmp_path / str(number)
        folder.mkdir()
        problems = problems_of("sweep=mine", more=(sweep_file(folder, text.replace("{from: 3, to: 6}", wrong)),))
        assert "must be an integer" in "\n".join(problems)


def test_groups_share_the_time_that_is_left(tmp_path: Path):
    run = new_run(tmp_path)
    now = 1000.0
    small = job(run, [point(n) for n in (1, 2, 3)], timing=replace(TIMING, launches=1))
    big = job(run, [point(4, ep_size=4)], timing=replace(TIMING, launches=1))
    budget = TimeBudget(60.0, [*[(Domain.CPU, 2)] * 3, (Domain.CPU, 4)], cores=2, clock=lambda: now)
    first = budget.allot(small)
    assert first.stop_at_s == pytest.approx(1000 + 60 * 3 / 5)  # EP 4 on two cores weighs double
    assert 0 < first.timing.chain_ms * 3 < 36_000
    assert first.timing.wall_limit_s > TIMING.wall_limit_s
    now = 1050.0  # the first took longer than it should
    last = budget.allot(big)
    assert last.stop_at_s == pytest.approx(1060.0)
    assert last.timing.chain_ms < 10_000
    on_gpus = TimeBudget(100.0, [(Domain.NVLINK, 64)] * 3, cores=2, clock=lambda: now)
    begun = on_gpus.allot(replace(small, domain=Domain.NVLINK, ep_size=64))
    assert begun.stop_at_s == pytest.approx(1150.0)
    assert 25_000 < begun.timing.chain_ms < (100 - GPU_START_S) / 3 * 1e3  # it takes its time to start, and no longer
    late = TimeBudget(1.0, [(Domain.CPU, 2)], cores=2, clock=lambda: now)
    now = 2000.0
    assert late.allot(small).stop_at_s == 2000.0


def test_sets_take_turns_without_repeats():
    orders = [visiting_order(3, 4, number) for number in range(50)]
    for order in orders:
        assert [order.count(s) for s in range(3)] == [4, 4, 4]
        assert all(one != other for one, other in pairwise(order))
    assert len({tuple(order) for order in orders}) > 40


def test_the_table_counts_and_says_how_to_run_a_failure_again():
    plan = build(["sweep=soak", "soak.seconds=4", "soak.seed=9", "backend=shm_fence,shm_sentinel"])
    context = RunContext(run_id="r", measure_hash="m", machine="x", allocation_id="a", git_sha="", git_dirty=False)
    good, bad, late = plan.points[:3]
    ok = replace(
        base_record(good, context),
        phase=Phase.ROUND_TRIP,
        status=Status.OK,
        verified_rounds=100,
        wall_s=90.0,
        pairs_sum=50,
        padded_bytes=300,
        combine_row_bytes=200,
    )
    wrong = failed_records(
        bad, plan.timing, 0, context, Status.INCORRECT, "burst 3: rank 1: a wrong row", failed_rank=1
    )
    skipped = failed_records(late, plan.timing, 0, context, Status.SKIPPED, "not reached")
    rows: list[Record] = [ok, *(replace(r, verified_rounds=7) for r in wrong), *skipped]
    assert verified_rounds(rows) == 107
    assert moved_gb([ok]) == pytest.approx(100 * 50 * 500 / 1e9)
    out = Console(width=100, record=True, file=None, highlight=False)
    with out.capture() as captured:
        out.print(soak_table(rows, plan))
    table = captured.get()
    assert "1 ok" in table
    assert " 1.5 " in table
    assert "1 incorrect" in table
    assert "1 skipped" in table
    assert "107" in table
    assert plan.soak is not None
    number = plan.soak.cases[1]
    command = f"epcross run sweep=soak backend=shm_fence,shm_sentinel soak.seed=9 soak.only={number} soak.seconds=30"
    assert failure_lines(rows, plan) == [
        f"case {number}, {bad.backend}, EP {bad.ep_size}: incorrect: burst 3: rank 1: a wrong row",
        f"  again: {command}",
    ]
    again = build(command.split()[2:])
    assert again.points == (bad,)
