"""Runs on disk with known numbers, for the tests of figures and reports."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.planning.build import build
from epcross.harness.planning.plan import Plan
from epcross.harness.point import Point
from epcross.harness.record import Record, UnitResult
from epcross.harness.storing.store import RunDirectory, create_run, write_floor, write_unit
from epcross.harness.terms import Regime

FIXED_US = {"shm_sentinel": 4.0, "shm_fence": 10.0, "shm_two_sided": 20.0}
PER_TOKEN_US = {"shm_sentinel": 2.0, "shm_fence": 1.0, "shm_two_sided": 3.0}
TOKENS = (1, 4, 16, 64)
FLOOR = {"cpu_ep2": {"domain": "cpu", "ep_size": 2, "empty_pair_us": 0.2, "flag_one_way_us": 0.1, "copy_gbps": 20.0}}
ENVIRONMENT = {"hostname": "here", "cpu": {"model": "A CPU", "cores_available": [0, 1]}, "epcross": "0.1.0"}

Change = Callable[[Record], Record]


def model_us(backend: str, tokens: int) -> float:
    """The latency that the first repeat of a point has."""
    return FIXED_US[backend] + PER_TOKEN_US[backend] * tokens


def points(
    backends: Sequence[str] = tuple(FIXED_US),
    regimes: Sequence[Regime] = (Regime.STEADY, Regime.ENTRY),
    ep_sizes: Sequence[int] = (2,),
    tokens: Sequence[int] = TOKENS,
) -> list[Point]:
    return [
        make_point(backend=backend, regime=regime, tokens=count, ep_size=ep_size)
        for ep_size in ep_sizes
        for backend in backends
        for regime in regimes
        for count in tokens
    ]


def plan_of(planned: Sequence[Point]) -> Plan:
    plan = build(["sweep=smoke"])
    config = {**plan.config, "overrides": ["sweep=smoke", "output_dir=/somewhere", "routing=uniform"]}
    return replace(plan, points=tuple(planned), impossible=(), jobs=(), timing=TIMING, config=config)


def unit_of(run: RunDirectory, point: Point, launch: int, change: Change | None) -> UnitResult:
    """A unit by the model: repeat r is 1 % per r slower; dispatch takes 40 % and combine 50 % of a round trip."""
    unit = make_unit(point, launch, context=replace(CONTEXT, run_id=run.run_id, allocation_id=run.run_id))
    share = {"round_trip": 1.0, "dispatch": 0.4, "combine": 0.5}

    def measured(row: Record) -> Record:
        value = model_us(row.backend, row.tokens_per_rank) * (1 + 0.01 * row.repeat) * share[row.phase]
        row = replace(
            row, latency_us=value, latency_min_us=value, latency_max_us=value, boundary="transfer",
            pairs_sum=4 * row.tokens_per_rank, pairs_remote_sum=2 * row.tokens_per_rank,
            selections_sum=4 * row.tokens_per_rank, flags="within_launch",
        )  # fmt: skip
        return change(row) if change else row

    return replace(unit, records=tuple(measured(row) for row in unit.records))


def make_run(
    folder: Path,
    planned: Sequence[Point] | None = None,
    change: Change | None = None,
    *,
    floor: bool = True,
    units: bool = True,
) -> Path:
    """A run under `folder`; `change` is applied to each row."""
    planned = points() if planned is None else planned
    run = create_run(folder, "smoke", plan_of(planned).to_json(), ENVIRONMENT)
    if floor:
        write_floor(run, FLOOR)
    for point in planned if units else []:
        for launch in range(TIMING.launches):
            write_unit(run, unit_of(run, point, launch, change))
    return run.path
