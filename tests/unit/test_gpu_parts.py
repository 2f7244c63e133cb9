"""The small parts of the GPU domain: where workers run, what NVML says, ranges for a profiler, what torch loaded."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests._points import CONTEXT, small_point

from epcross.harness.errors import ConfigError
from epcross.harness.measuring.cuda_device import without_collection
from epcross.harness.measuring.gpu_state import GpuMonitor, GpuState, reason_words, slowed, summary
from epcross.harness.measuring.nvtx import StageRanges
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Timing, processes
from epcross.harness.running.check_request import read_request
from epcross.harness.running.job import Job
from epcross.harness.running.rank_place import place
from epcross.harness.storing.gpu_software import loaded_libraries
from epcross.harness.terms import Domain, Flag, Sharing, Stage


def state(**changes):
    known = {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "gpu_temperature_c": 40, "reasons": ("gpu_idle",)}
    return GpuState(**{**known, **changes})


def test_a_rank_has_a_gpu_of_its_own_or_shares_the_first_and_is_bound_to_no_core():
    assert [place(rank, 4, Domain.NVLINK).gpu for rank in range(4)] == [0, 1, 2, 3]
    assert [place(rank, 4, Domain.SHARED_GPU).gpu for rank in range(4)] == [0, 0, 0, 0]
    assert place(100, 101, Domain.NVLINK).core is None
    assert place(100, 101, Domain.NVLINK).flags == ()
    assert place(0, 2).gpu is None
    assert place(0, 10_000).flags == (Flag.OVERSUBSCRIBED,)


def test_one_launch_is_one_process():
    assert [processes(8, sharing) for sharing in Sharing] == [8, 1, 8]


def test_a_job_keeps_its_domain_and_what_workers_need(tmp_path: Path):
    zeros = dict.fromkeys(("launches", "seeds", "chains", "min_pairs", "max_pairs", "iterations", "sets"), 1)
    job = Job(
        name="shared_gpu_one_launch_ep8",
        run_dir=str(tmp_path),
        ep_size=8,
        domain=Domain.SHARED_GPU,
        sharing=Sharing.ONE_LAUNCH,
        env={"A": "b"},
        timing=Timing(**zeros, chain_ms=1.0, warmup_pairs=0, wall_limit_s=1.0),
        context=CONTEXT,
        backends={"b": BackendConfig(name="b", target="a:B", label="B", color="#000000")},
        points={"p": small_point()},
        turns=(),
    )
    assert job.processes == 1
    assert Job.read(job.write()) == job


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, ()),
        (0x1, ("gpu_idle",)),
        (0x4 | 0x40, ("hw_thermal_slowdown", "sw_power_cap")),
        (0x2 | 0x1000, ("applications_clocks_setting", "bits_0x1000")),
    ],
)
def test_reasons_are_words(bits, words):
    assert reason_words(bits) == words


@pytest.mark.parametrize(
    ("reasons", "flag"),
    [
        ((), None),
        (("gpu_idle", "applications_clocks_setting", "display_clock_setting"), None),
        (("sw_power_cap",), Flag.POWER_CAPPED),
        (("gpu_idle", "sw_power_cap"), Flag.POWER_CAPPED),
        (("hw_power_brake_slowdown", "sw_power_cap"), Flag.THROTTLED),
        (("sw_thermal_slowdown",), Flag.THROTTLED),
        (("bits_0x1000",), Flag.THROTTLED),
    ],
)
def test_what_held_a_clock_down_is_a_flag(reasons, flag):
    assert slowed(reasons) is flag


def test_a_unit_is_at_the_worst_of_its_readings():
    seen = [state(), state(sm_clock_mhz=1200, gpu_temperature_c=71, reasons=("sw_power_cap", "gpu_idle"))]
    assert summary(seen) == {
        "sm_clock_mhz": 1200,
        "memory_clock_mhz": 3201,
        "gpu_temperature_c": 71,
        "throttle_reasons": "sw_power_cap",
    }
    assert summary([state()])["throttle_reasons"] == ""
    assert summary([]) == {}


class Nvml(SimpleNamespace):
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    @staticmethod
    def nvmlDeviceGetClockInfo(handle, which):
        return {1: 1755, 2: 3201}[which]

    @staticmethod
    def nvmlDeviceGetTemperature(handle, which):
        return 55


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
)
def test_nvml_of_either_age_is_read(name):
    reading = GpuMonitor(Nvml(**{name: lambda handle: 0x4}), "handle").read()
    assert reading == state(sm_clock_mhz=1755, gpu_temperature_c=55, reasons=("sw_power_cap",))


def test_nvml_that_does_not_tell_is_no_error():
    def refuse(handle):
        raise Nvml.NVMLError("not supported")

    assert GpuMonitor(Nvml(nvmlDeviceGetCurrentClocksEventReasons=refuse), "handle").read() is None


def test_stages_are_ranges_that_follow_one_another():
    log = []
    nvtx = SimpleNamespace(range_push=lambda name: log.append(name), range_pop=lambda: log.append("pop"))
    ranges = StageRanges(lambda stage: log.append(("told", str(stage))), nvtx)
    ranges(Stage.PREPARE)
    ranges(Stage.TIME)
    ranges.close()
    ranges.close()
    assert log == [("told", "prepare"), "epcross prepare", "pop", ("told", "time"), "epcross time", "pop"]


MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2
7f0000002000-7f0000003000 r--p 00000000 08:01 43                         /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03
7f0000004000-7f0000005000 rw-p 00000000 00:00 0                          [heap]
7f0000006000-7f0000007000 r--p 00000000 08:01 44                         /usr/lib/x86_64-linux-gnu/libc.so.6
"""


def test_the_loaded_gpu_libraries_are_named_with_their_paths():
    assert loaded_libraries(MAPS) == {
        "libnccl.so.2": "/opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "libcuda.so.580.159.03": "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03",
    }


def test_a_check_runs_where_the_backend_does():
    assert read_request(["backend=shm_fence"]).device.domain is Domain.CPU
    one = read_request(["backend=onesided_fence", "ep_size=4"])
    assert (one.device.domain, one.device.sharing) == (Domain.SHARED_GPU, Sharing.ONE_LAUNCH)
    across = read_request(["backend=onesided_fence", "device=cuda"])
    assert across.device.domain is Domain.NVLINK
    assert "device=cuda" in across.again("plain", 0)
    with pytest.raises(ConfigError, match="cuda_one_launch"):
        read_request(["backend=onesided_fence", "device=cuda_one_lunch"])


def test_nothing_is_collected_while_a_graph_is_captured():
    freed = []

    class Mapped:
        def __init__(self):
            self.itself = self  # a cycle: only the collector frees it

        def __del__(self):
            freed.append("mapped")

    Mapped()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with without_collection():
            assert freed == ["mapped"]  # what was garbage before went before
            Mapped()
            kept = [[] for _ in range(1000)]
            assert len(kept) == 1000
            assert freed == ["mapped"]
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert freed == ["mapped", "mapped"]


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
