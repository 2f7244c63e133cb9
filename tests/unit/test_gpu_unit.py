"""A whole unit in the GPU domain, without a GPU: torch on the CPU, one process that holds all ranks."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests._fake_device import FakeDevice
from tests._points import CONTEXT, small_point
from tests._torch_one_launch import torch_one_launch
from tests.contract.threads import on_ranks

from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.gpu_processes import Listing
from epcross.harness.measuring.gpu_state import GpuState
from epcross.harness.measuring.gpu_watch import GpuWatch
from epcross.harness.measuring.link_count import LinkCount
from epcross.harness.measuring.link_counters import LinkCounters
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.measuring.unit_session import UnitSession
from epcross.harness.point import Timing, Unit
from epcross.harness.record import UnitResult
from epcross.harness.storing.rows import check_record
from epcross.harness.terms import Domain, Regime, RowFormat, Sharing

torch = pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

ROOT = Path(__file__).parents[2]
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


class CpuSession(UnitSession):
    """A unit on a queue that runs at once."""

    device: FakeDevice

    def _make_timer(self) -> CudaTimer:
        self.device = FakeDevice(time.perf_counter_ns)
        return CudaTimer(self.device, self.group, graph=self.backend.graph)


class Monitor:
    """A GPU that gets hot: the second reading says that it was slowed down."""

    def __init__(self) -> None:
        self.readings = 0

    def read(self) -> GpuState:
        self.readings += 1
        late = self.readings > 1
        return GpuState(
            sm_clock_mhz=1500 if late else 1980,
            memory_clock_mhz=3201,
            gpu_temperature_c=80 if late else 40,
            reasons=("sw_thermal_slowdown",) if late else ("gpu_idle",),
        )


class HotSession(CpuSession):
    def _prepare(self, timed: list) -> None:
        super()._prepare(timed)
        self.watch = GpuWatch(Monitor())


class Listed:
    """This process, and from the second reading on one that is none of the run's."""

    def __init__(self) -> None:
        self.readings = 0

    def read(self) -> Listing | None:
        self.readings += 1
        return Listing(host="here", own=7, sessions=(7, 7, 99) if self.readings > 1 else (7,))


class SharedSession(CpuSession):
    def _prepare(self, timed: list) -> None:
        super()._prepare(timed)
        self.watch = GpuWatch(processes=Listed())


class CountedSession(CpuSession):
    """Reads counters of links, as between GPUs."""

    def _prepare(self, timed: list) -> None:
        super()._prepare(timed)
        self.counters = LinkCounters("GPU-1")
        self.links = LinkCount(self.counters, self.group)

    def close(self) -> None:
        super().close()
        self.counters.close()


def measure(backend, regime=Regime.STEADY, session=CpuSession, **point) -> UnitResult:
    shared = replace(
        small_point((5, 3, 0, 7), **point), regime=regime, domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH
    )
    unit = Unit(point=shared, launch=0)
    (result,) = on_ranks(
        1,
        lambda group: measure_unit(backend, unit, TIMING, group, CONTEXT, lambda stage: None, session_type=session),
    )
    assert result is not None
    return result


@pytest.mark.parametrize("regime", list(Regime))
def test_all_ranks_of_one_process_are_verified_and_timed(regime):
    result = measure(torch_one_launch()({}), regime)
    enqueued = "eager" if regime is Regime.SPANS else "graph"
    phases = {Regime.STEADY: 1, Regime.ENTRY: 3, Regime.SPANS: 2}[regime]
    assert len(result.records) == phases * TIMING.seeds * TIMING.chains
    for record in result.records:
        assert (record.status, record.reason, record.flags) == ("ok", None, "")
        assert (record.ep_size, record.sharing, record.enqueued) == (4, "one_launch", enqueued)
        assert record.verified_rounds == TIMING.seeds * (1 + TIMING.sets + 1)
        assert (record.graph_pairs is None) == (regime is Regime.SPANS)
        assert check_record(record) == []
    assert {len(samples.values_us) for samples in result.samples} == {1}  # one clock for all ranks of a launch


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_every_format(row_format):
    assert {r.status for r in measure(torch_one_launch()({}), hidden=160, dispatch_format=row_format).records} == {"ok"}


def test_clocks_are_the_worst_that_was_read_and_a_throttled_unit_is_flagged():
    record = measure(torch_one_launch()({}), session=HotSession).records[0]
    assert (record.sm_clock_mhz, record.memory_clock_mhz, record.gpu_temperature_c) == (1500, 3201, 80)
    assert (record.throttle_reasons, record.flags) == ("sw_thermal_slowdown", "throttled")


def test_a_unit_beside_which_another_process_came_is_flagged_and_says_how_many():
    record = measure(torch_one_launch()({}), session=SharedSession).records[0]
    assert (record.status, record.other_processes, record.flags) == ("ok", 1, "not_alone")
    assert measure(torch_one_launch()({})).records[0].other_processes is None  # nobody told


@pytest.mark.parametrize("dies", [False, True])
def test_a_reader_of_counters_that_dies_costs_its_counts_and_no_number(tmp_path, monkeypatch, dies):
    nvml = f"Nvml(before=lambda: {'os.abort()' if dies else None})"
    source = f"import os, sys\nfrom tests.fakes.nvml import Nvml\nsys.modules[__name__] = {nvml}\n"
    (tmp_path / "pynvml.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT))))
    result = measure(torch_one_launch()({}), session=CountedSession)
    assert len(result.records) == TIMING.seeds * TIMING.chains
    for record in result.records:
        assert (record.status, record.nvlink_tx_bytes) == ("ok", None if dies else 0)  # these counters stand still
        if not dies:
            row_bytes, pairs = record.padded_bytes + record.combine_row_bytes, record.pairs_remote_sum
            assert pairs
            assert record.nvlink_wire_bytes
            assert abs(record.nvlink_wire_bytes / row_bytes - pairs) <= 0.5  # which is rounded
            assert record.nvlink_wire_bytes * TIMING.seeds * TIMING.sets % row_bytes == 0
        told = "rank 0: the process that reads counters of links was killed by SIGABRT" in str(record.nvlink_note)
        assert told == dies
        assert check_record(record) == []


def test_a_row_that_arrives_wrong_names_its_rank():
    def dispatch(self, set_index):
        base.dispatch(self, set_index)
        self.landed[2] ^= 1

    base = torch_one_launch()
    record = measure(type("Wrong", (base,), {"dispatch": dispatch})({})).records[0]
    assert (record.status, record.failed_rank, record.failed_stage) == ("incorrect", 2, "verify_before")
    assert record.reason is not None
    assert "rank 2: wrong bytes in a row" in record.reason


def test_a_timed_pair_that_does_nothing_is_incorrect():
    """Right while it is checked, idle while it is timed: what a kernel that is missing from a graph looks like."""
    base = torch_one_launch()

    def combine(self, set_index):
        if not getattr(self, "timed", False):
            base.combine(self, set_index)

    class Idle(CpuSession):
        def _time(self, seed, timed):
            self.ranks.stage_timed(timed)
            assert self.timer is not None
            steady = self.timer.series

            def series(*given, **named):
                self.backend.timed = True  # type: ignore[attr-defined]
                return steady(*given, **named)

            self.timer.series = series  # type: ignore[method-assign]
            return super()._time(seed, timed)

    record = measure(type("Wrong", (base,), {"combine": combine})({}), session=Idle).records[0]
    assert (record.status, record.failed_stage) == ("incorrect", "time")
    assert record.reason is not None
    assert "in a timed series" in record.reason


def test_a_timed_sum_of_another_set_is_incorrect():
    """A combine that always writes the first set's sums would pass if both sets were expected to be alike."""
    base = torch_one_launch()

    def combine(self, set_index):
        base.combine(self, 0 if getattr(self, "first_only", False) else set_index)

    class FirstOnly(CpuSession):
        def _time(self, seed, timed):
            self.backend.first_only = seed == 1  # type: ignore[attr-defined]
            return super()._time(seed, timed)

    records = measure(type("Wrong", (base,), {"combine": combine})({}), session=FirstOnly).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "time")}


def test_an_empty_profile_is_no_timing():
    class Blind(CpuSession):
        def _make_timer(self):
            timer = super()._make_timer()
            self.device.kernel_spans = lambda run: run() or []  # type: ignore[method-assign]
            return timer

    for record in measure(torch_one_launch()({}), Regime.SPANS, session=Blind).records:
        assert (record.status, record.latency_us) == ("no_timing", None)
        assert record.reason == f"the profiler gave no kernels of some {record.phase}: rank 0 has no samples"
