"""Compiling by running: a plan in parts that run beside each other, and what is said of them."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from planning import plan_of

from epcross.harness.planning.plan import Job, Plan
from epcross.harness.terms import BackendKind, Regime

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import warm


def planned(*words: str) -> Plan:
    """The plan, as if everything in it could run here."""
    plan = plan_of(*words, "timing=warm")
    first = plan.points[0]
    job = Job(
        ep_size=first.ep_size, domain=first.domain, sharing=first.sharing, scope=first.scope, cluster="local",
        backends=tuple(dict.fromkeys(point.backend for point in plan.points)), points=plan.points,
    )  # fmt: skip
    return replace(plan, impossible=(), jobs=(job,))


def test_every_kernel_of_a_sweep_is_in_one_part_and_fused_ones_come_first() -> None:
    plan = planned("sweep=layer_h200x2")
    parts = warm.parts(plan)
    kinds = [part.points[0].kind for part in parts]
    fused = kinds.count(BackendKind.FUSED)
    assert set(kinds[:fused]) == {BackendKind.FUSED}
    assert all(len({point.backend for point in part.points}) == 1 for part in parts)
    assert max(len(part.points) for part in parts) <= warm.MOST

    def kernels(point):
        options = {name: value for name, value in point.options if name != "staging"}
        return point.backend, point.compute, str(options), point.placement, point.tokens, point.dispatch_format

    found = [kernels(point) for part in parts for point in part.points]
    assert len(found) == len(set(found))
    assert set(found) == {kernels(point) for point in plan.points}
    assert {point.regime for part in parts for point in part.points} == {Regime.STEADY}
    assert Plan.from_json(json.loads(json.dumps(parts[0].to_json()))) == parts[0]


def test_exchanges_that_compile_by_shape_are_warmed_at_the_points_of_their_sweep() -> None:
    plan = planned("sweep=baselines_nvlink")
    parts = warm.parts(plan, only=("deepep_v2", "deepep_v2_max", "nccl_ep_ht"))
    found = [point for part in parts for point in part.points]
    assert {point.backend for point in found} == {"deepep_v2", "deepep_v2_max", "nccl_ep_ht"}
    shapes = {(point.backend, point.tokens, point.dispatch_format) for point in found}
    assert shapes == {
        (point.backend, point.tokens, point.dispatch_format)
        for point in plan.points
        if point.backend in {p.backend for p in found}
    }
    assert len(found) == len(shapes)  # a regime has no kernels of its own


def test_parts_run_beside_each_other_with_locks_of_their_own(tmp_path: Path) -> None:
    plan = plan_of("sweep=smoke", "backend=plain,small", "ep_size=2", "tokens_per_rank=1", "timing=warm")
    told = list(warm.warmed(plan, 2, 60.0))
    assert len(told) == len(warm.parts(plan)) == 2
    assert all("exit 0\n  1 token: " in each for each in told), told  # what stands in for a backend does not run


def test_what_the_time_does_not_reach_is_said() -> None:
    plan = plan_of("sweep=smoke", "backend=plain", "ep_size=2", "tokens_per_rank=1", "timing=warm")
    (told,) = warm.warmed(plan, 1, -1.0)
    assert told.startswith("plain ")
    assert told.endswith(" points: left out, the time was over\n")
