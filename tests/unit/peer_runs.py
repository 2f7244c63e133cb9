"""Runs in which ours stand beside others with known times: what tests of documents are made of."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.analysis.evidence_run import EvidenceRun, read_run
from epcross.harness.storing.rows import failed_records
from epcross.harness.storing.store import create_run, open_run, release, write_unit
from epcross.harness.terms import RowFormat, Status
from epcross.kernels.experts.formats import WeightFormat

TIMES_US = {
    "onesided_sentinel": {1: 1000.0, 8: 2000.0, 64: 6000.0},
    "onesided_fence": {1: 1500.0, 8: 1800.0, 64: 2000.0},
    "deepep_v2": {1: 3000.0, 8: 3000.0, 64: 3000.0},
    "ag_rs": {1: 2500.0, 8: 4000.0},
}
BACKENDS = {
    "onesided_sentinel": {"label": "Sentinel", "color": "#111111"},
    "onesided_fence": {"label": "Fence", "color": "#222222"},
    "deepep_v2": {"label": "DeepEP V2", "color": "#333333"},
    "ag_rs": {"label": "AG/RS", "color": "#444444"},
    "deepep_ll": {"label": "DeepEP LL", "color": "#555555"},
}


# repeats 0 to 19, and 0 to 19 us on top of the first
def run_of(
    folder: Path,
    *,
    launches: int = 5,
    drift: float = 0.0,
    formats: tuple[RowFormat, ...] = (RowFormat.BF16,),
    weights: Mapping[str, WeightFormat] | None = None,
    ours: WeightFormat | None = None,
    call: Callable[[str, int], tuple[str, float]] = lambda backend, launch: ("first", 1.0),
) -> EvidenceRun:
    """All of `TIMES_US` in steady state, a launch `drift` slower than the one before; DeepEP LL refuses two sizes.
    `call` says in which call a backend's launch was taken, and by what its times are multiplied there."""
    machine = {"cpu": {"model": "Some CPU", "architecture": "x86_64", "cores_available": [0, 1]}}
    run = create_run(folder, "peers", {"backends": BACKENDS}, machine)
    context = replace(CONTEXT, run_id=run.run_id)
    for row_format, (backend, times) in itertools.product(formats, TIMES_US.items()):
        weight_format = (weights or {}).get(backend, ours)
        for tokens, launch in itertools.product(times, range(launches)):
            point = replace(make_point(backend=backend, tokens=tokens), dispatch_format=row_format)
            held, factor = call(backend, launch)
            taken = replace(context, allocation_id=held)
            latency_us = times[tokens] * (1 + drift * launch) * factor
            unit = make_unit(point, launch, context=taken, latency_us=latency_us)
            records = tuple(replace(row, weight_format=weight_format and str(weight_format)) for row in unit.records)
            write_unit(run, replace(unit, records=records))
    for tokens in (8, 64):
        point = make_point(backend="deepep_ll", tokens=tokens)
        unit = make_unit(point, context=context)
        rows = failed_records(point, TIMING, 0, context, Status.UNSUPPORTED, f"holds 4 tokens per rank, not {tokens}")
        write_unit(run, replace(unit, records=tuple(rows), samples=()))
    release(run.path)
    return read_run(run.path, open_run(run.path))
