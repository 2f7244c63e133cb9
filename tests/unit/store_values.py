"""Values that the tests of the store share."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from epcross.harness.point import Model, Placement, Point, Timing
from epcross.harness.record import Record, Samples, UnitResult
from epcross.harness.storing.rows import RunContext, base_record, planned_records
from epcross.harness.terms import BackendKind, Regime, Status

TINY = Model(name="tiny", num_experts=8, top_k=2, hidden=64, intermediate=32)
TIMING = Timing(
    launches=2,
    seeds=2,
    chains=2,
    chain_ms=1.0,
    min_pairs=2,
    max_pairs=10,
    iterations=5,
    warmup_pairs=1,
    sets=2,
    wall_limit_s=10.0,
)
CONTEXT = RunContext(
    run_id="run-a", measure_hash="cafe", machine="beef", allocation_id="run-a", git_sha="", git_dirty=False
)


def make_point(
    *, backend: str = "shm_fence", regime: Regime = Regime.STEADY, tokens: int = 4, ep_size: int = 2
) -> Point:
    return Point(
        backend=backend,
        model=TINY,
        ep_size=ep_size,
        tokens_per_rank=tokens,
        tokens=(tokens,) * ep_size,
        max_tokens_per_rank=tokens,
        placement=Placement(num_slots=8),
        regime=regime,
    )


PLAN = {"points": [make_point().to_json()]}
"""As much of a plan as a run folder needs."""


def ok(record: Record, latency_us: float) -> Record:
    return replace(
        record,
        status=Status.OK,
        latency_us=latency_us,
        latency_min_us=latency_us - 1,
        latency_max_us=latency_us + 1,
        estimator="median over ranks of the chain period",
        n_samples=1,
        pairs=10,
        error_share=None if record.kind in (None, BackendKind.EXCHANGE) else 0.5,
    )


def make_unit(point: Point, launch: int = 0, *, context: RunContext = CONTEXT, latency_us: float = 10.0) -> UnitResult:
    """A unit with ok rows, latencies rising with the repeat, and two ranks' samples for each."""
    records = tuple(
        ok(record, latency_us + record.repeat)
        for record in planned_records(base_record(point, context), TIMING, launch)
    )
    samples = tuple(
        Samples(phase=r.phase, repeat=r.repeat, values_us=[[r.latency_us or 0, 11.0], [9.5, 12.0]]) for r in records
    )
    return UnitResult(point_id=point.point_id, launch=launch, records=records, samples=samples)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(number: int) -> Callable[[int, bytes], int]:
    """An `os.write` of a disk that answers with this error."""

    def write(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    return write


def full_after(writes: int) -> Callable[[int, bytes], int]:
    """What stands for `os.write` on a disk that is full after so many writes."""
    real_write, left = os.write, writes

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data)

    return write
