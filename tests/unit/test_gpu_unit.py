"""A whole unit in the GPU domain, without a GPU: torch on the CPU, one process that holds all ranks."""

import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests._fake_device import FakeDevice
from tests._points import small_point
from tests.contract.threads import on_ranks

from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.measure import UnitSession, measure_unit
from epcross.harness.point import Timing, Unit
from epcross.harness.storing.rows import RunContext, check_record
from epcross.harness.terms import Domain, Regime, RowFormat, Sharing

torch = pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

CONFIG = Path(__file__).parents[1] / "gpu" / "config"
CONTEXT = RunContext(
    run_id="run", measure_hash="hash", machine="machine", allocation_id="here", git_sha="", git_dirty=False
)
TIMING = Timing(
    launches=5,
    seeds=2,
    chains=2,
    chain_ms=1.0,
    min_pairs=4,
    max_pairs=8,
    iterations=6,
    warmup_pairs=2,
    sets=2,
    wall_limit_s=30.0,
)


def backend_class():
    spec = importlib.util.spec_from_file_location("torch_one_launch", CONFIG / "torch_one_launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TorchOneLaunch


class CpuSession(UnitSession):
    def _make_timer(self):
        return CudaTimer(FakeDevice(time.perf_counter_ns), self.group, graph=self.backend.graph)


def measure(backend, regime=Regime.STEADY, **point):
    shared = replace(
        small_point((5, 3, 0, 7), **point), regime=regime, domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH
    )
    unit = Unit(point=shared, launch=0)
    (result,) = on_ranks(
        1,
        lambda group: measure_unit(backend, unit, TIMING, group, CONTEXT, lambda stage: None, session_type=CpuSession),
    )
    return result


@pytest.mark.parametrize("regime", list(Regime))
def test_all_ranks_of_one_process_are_verified_and_timed(regime):
    result = measure(backend_class()({}), regime)
    phases = {Regime.STEADY: 1, Regime.ENTRY: 3, Regime.SPANS: 2}[regime]
    assert len(result.records) == phases * TIMING.seeds * TIMING.chains
    for record in result.records:
        assert (record.status, record.reason) == ("ok", None)
        assert (record.ep_size, record.sharing, record.enqueued) == (4, "one_launch", "graph")
        assert record.verified_rounds == TIMING.seeds * (1 + TIMING.sets + 1)
        assert check_record(record) == []
    assert {len(samples.values_us) for samples in result.samples} == {1}  # one clock for all ranks of a launch


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_every_format(row_format):
    assert {r.status for r in measure(backend_class()({}), hidden=160, dispatch_format=row_format).records} == {"ok"}
