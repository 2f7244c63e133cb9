"""The GPU's queue and clocks: graphs, stamps, events and the profiler agree on how long a kernel takes."""

import statistics
import subprocess
import sys

import pytest
from tests.gpu._alone import alone

from epcross.harness.measuring.cuda_device import open_device
from epcross.harness.measuring.cuda_floor import measure_gpu_floor
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.gpu_processes import GpuProcesses, strangers
from epcross.harness.measuring.gpu_state import GpuMonitor, nvml_here, uuid_here
from epcross.harness.measuring.link_counters import LinkBytes, LinkCounters
from epcross.harness.terms import GraphSupport, Phase, Regime

DISPATCH_US, COMBINE_US = 40.0, 60.0


class Known:
    """A pair that takes as long as it says: two kernels that spin."""

    def __init__(self, device) -> None:
        self.device = device

    def dispatch(self, set_index):
        self.device.hold(DISPATCH_US)

    def experts(self, set_index):
        pass

    def combine(self, set_index):
        self.device.hold(COMBINE_US)


@pytest.fixture
def group():
    return alone()


def test_stamps_follow_one_another(group):
    device = open_device(group, 10.0)

    def enqueue() -> None:
        device.line_up(0)
        device.hold(100.0)
        device.stamp(1)
        device.stamp(2)

    graph = device.capture(enqueue)
    graph.replay()
    graph.replay()
    start, middle, end = device.stamps_ns(3)
    assert 100_000 <= middle - start < 130_000
    assert 0 < end - middle < 20_000
    assert 1 <= device.timer_step_ns() <= 2000


@pytest.mark.parametrize("graph", [GraphSupport.YES, GraphSupport.NO])
def test_every_regime_sees_how_long_a_pair_takes(group, graph):
    device = open_device(group, 10.0)
    timer = CudaTimer(device, group, graph=graph)
    pair = Known(device)
    # the best of a few: other tests may have the GPU in between
    every = [timer.series(Regime.STEADY, pair, pairs=100, iterations=0, sets=2) for _ in range(6)]
    period_us = min(series.values_us[Phase.ROUND_TRIP][0] for series in every)
    assert DISPATCH_US + COMBINE_US <= period_us < 1.15 * (DISPATCH_US + COMBINE_US)
    entry = timer.series(Regime.ENTRY, pair, pairs=0, iterations=20, sets=2)
    assert len(entry.values_us[Phase.ROUND_TRIP]) == 20
    assert entry.graph_pairs == (20 if graph is GraphSupport.YES else None)  # kernels of one word
    for phase, expected in ((Phase.DISPATCH, DISPATCH_US), (Phase.COMBINE, COMBINE_US)):
        assert expected <= statistics.median(entry.values_us[phase]) < 1.3 * expected
    round_trip_us = statistics.median(entry.values_us[Phase.ROUND_TRIP])
    assert DISPATCH_US + COMBINE_US <= round_trip_us < 1.2 * (DISPATCH_US + COMBINE_US)
    assert 0 < timer.instrument_us(Regime.STEADY, sets=2) < 5
    assert 0 < timer.instrument_us(Regime.ENTRY, sets=2) < 20
    timer.close()


def test_spans_are_those_of_the_kernels(group):
    device = open_device(group, 10.0)
    timer = CudaTimer(device, group, graph=GraphSupport.YES)
    spans = timer.series(Regime.SPANS, Known(device), pairs=8, iterations=0, sets=2)
    if not spans.values_us[Phase.DISPATCH]:
        pytest.skip("the profiler sees no kernels on this GPU")
    assert len(spans.values_us[Phase.DISPATCH]) == 8
    assert DISPATCH_US <= statistics.median(spans.values_us[Phase.DISPATCH]) < 1.1 * DISPATCH_US
    assert COMBINE_US <= statistics.median(spans.values_us[Phase.COMBINE]) < 1.1 * COMBINE_US


def test_the_floor_is_plausible(group):
    floor = measure_gpu_floor(group)
    assert 0.5 < floor["empty_pair_us"] <= 1.1 * floor["empty_pair_plain_us"] < 20
    assert 0.1 < floor["flag_one_way_us"] < 10
    push = floor["push_gbps_by_blocks"]
    assert push["1"] < push["32"] < 10_000
    assert 100 < floor["copy_gbps"] < 10_000
    assert 1 < floor["host_to_device_gbps"] < 1000


def test_the_monitor_tells_clocks_that_a_gpu_can_have():
    found = nvml_here()
    if found is None:
        pytest.skip("NVML does not know this GPU, so rows have no clocks")
    state = GpuMonitor(*found).read()
    assert state is not None
    assert 100 <= state.sm_clock_mhz <= 5000
    assert 0 < state.gpu_temperature_c < 110


STRANGER = """
import torch
torch.zeros(1, device="cuda:0")
print("here", flush=True)
input()
"""


def test_a_process_that_comes_to_the_gpu_is_a_stranger_and_one_of_ours_is_not():
    import torch

    torch.zeros(1, device="cuda:0")  # only a process with a context is listed
    found = nvml_here()
    processes = GpuProcesses(*found) if found else None
    before = processes.read() if processes else None
    if processes is None or before is None:
        pytest.skip("NVML does not list this process on its GPU, so rows do not say who else is on it")
    already = strangers([[before]])
    assert already is not None
    for own_session, more in ((True, 1), (False, 0)):
        other = subprocess.Popen(
            [sys.executable, "-c", STRANGER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=own_session,
        )
        with other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"here\n"
            listing = processes.read()
            other.kill()
        assert listing is not None
        assert len(listing.sessions) == len(before.sessions) + 1
        assert strangers([[before, listing]]) == already + more
    after = processes.read()
    assert after is not None
    assert strangers([[after]]) == already


def test_counters_of_links_are_read_by_a_process_that_is_not_on_the_gpu():
    import torch

    torch.zeros(1, device="cuda:0")
    found, uuid = nvml_here(), uuid_here()
    if found is None or uuid is None:
        pytest.skip("NVML does not know this GPU, so rows have no counts")
    processes = GpuProcesses(*found)
    before = processes.read()
    counters = LinkCounters(uuid)
    try:
        first, second = counters.read(), counters.read()
        after = processes.read()
    finally:
        counters.close()
    assert before == after
    if isinstance(first, str):
        pytest.skip(f"no counts here: {first}")
    assert isinstance(second, LinkBytes)
    assert (second.links, second.tx_bytes >= first.tx_bytes) == (first.links, True)
