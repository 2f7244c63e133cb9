import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import pytest

from epcross.harness.storing.cpu_facts import clock_snapshot, cpu_list, throttled
from epcross.harness.storing.environment import VARIABLES, allocation_id, as_stored, collect, machine_facts
from epcross.harness.storing.probe import Probe

CPU = "/sys/devices/system/cpu"


class Fake(Probe):
    """A machine made of the files, commands and variables it is given."""

    def __init__(
        self, files: Mapping[str, str], *, commands: Mapping[str, str] | None = None, cores: Sequence[int] = (0,)
    ):
        self.files, self.commands, self.cores = files, commands or {}, list(cores)
        self.secrets: dict[str, str] = {}

    @property
    def variables(self) -> Mapping[str, str]:
        return self.secrets

    def hostname(self) -> str:
        return "node7"

    def architecture(self) -> str:
        return "aarch64"

    def affinity(self) -> list[int]:
        return self.cores

    def text(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    def exists(self, path: str) -> bool:
        return path in self.files

    def entries(self, folder: str) -> list[str]:
        names = sorted({path[len(folder) + 1 :].split("/")[0] for path in self.files if path.startswith(f"{folder}/")})
        if not names:
            raise FileNotFoundError(2, "No such file or directory", folder)
        return names

    def space(self, folder: str) -> tuple[int, int]:
        return 64 << 20, 60 << 20

    def output(self, command: Sequence[str], timeout_s: float) -> str:
        words = " ".join(command)
        for start, answer in self.commands.items():
            if words.startswith(start):
                return answer
        raise LookupError(f"{command[0]} is not installed")


def test_this_machine_is_described_as_json():
    record = collect()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["cpu"]["cores_available"] == Probe().affinity()
    assert record["memory"]["total_bytes"] > 1 << 28
    assert record["packages"]["numpy"].startswith("2.")
    assert record["libraries"]["libc.so.6"].endswith("libc.so.6")
    facts = machine_facts(record)
    assert facts == machine_facts(json.loads(json.dumps(collect())))


def test_a_machine_that_tells_nothing_gives_reasons():
    record = collect(Fake({}))
    assert record["cpu"]["model"] is None
    assert record["cpu"]["quota_cores"] is None
    assert record["gpus"] is None
    assert record["absent"]["cpu.model"] == "/proc/cpuinfo: No such file or directory"
    assert record["absent"]["cpu.last_cache_bytes"] == f"{CPU}/cpu0/cache: No such file or directory"
    assert record["absent"]["gpus"] == "nvidia-smi is not installed"
    assert record["absent"]["compiler"] == "c++ is not installed"
    assert machine_facts(record)["cores"] == 1
    assert clock_snapshot(Fake({})) == dict.fromkeys(
        ("mhz_min", "mhz_median", "mhz_max", "load_1min", "thermal_throttles", "quota_throttles")
    )


GRACE = {
    "/proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 2000\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
    "/proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:   1000 kB\n",
    f"{CPU}/online": "0-1,4\n",
    f"{CPU}/cpu1/cache/index0/level": "1\n",
    f"{CPU}/cpu1/cache/index0/size": "64K\n",
    f"{CPU}/cpu1/cache/index3/level": "3\n",
    f"{CPU}/cpu1/cache/index3/size": "114M\n",
    f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpu4/cpufreq/scaling_governor": "ondemand\n",
    f"{CPU}/cpufreq/boost": "1\n",
    "/sys/devices/system/node/online": "0,2\n",
    "/sys/devices/system/node/node0/cpulist": "0-1\n",
    "/sys/devices/system/node/node2/cpulist": "4\n",
    "/proc/self/cgroup": "0::/kubepods/pod1/main\n",
    "/sys/fs/cgroup/kubepods/pod1/cpu.max": "150000 100000\n",
    "/sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
}
SMI = "0, NVIDIA GB200, GPU-1, 570.1, 189471, 0001:01:00.0, 120, 3996, 1200.00, Disabled\n"


def test_a_machine_with_numbers_for_names_and_limits_from_above():
    record = collect(
        Fake(
            GRACE,
            commands={"nvidia-smi --query-gpu=": SMI, "nvidia-smi topo": "NV18", "c++": "g++ 13\nmore\n"},
            cores=[1, 4],
        )
    )
    cpu = record["cpu"]
    assert cpu["model"] == "implementer 0x41 part 0xd4f"
    assert cpu["cores_online"] == [0, 1, 4]
    assert cpu["cores_available"] == [1, 4]
    assert cpu["last_cache_bytes"] == 114 << 20
    assert cpu["governor"] == "ondemand performance"
    assert cpu["turbo"] is True
    assert cpu["numa_nodes"] == {"0": [0, 1], "2": [4]}
    assert cpu["quota_cores"] == 1.5
    assert record["memory"] == {"total_bytes": 1 << 20, "available_bytes": 1000 << 10}
    assert record["dev_shm"] == {"total_bytes": 64 << 20, "free_bytes": 60 << 20}
    assert record["container"] == "kubepods"
    assert record["compiler"] == {"command": "c++", "version": "g++ 13"}
    assert record["gpus"][0]["name"] == "NVIDIA GB200"
    assert record["gpus"][0]["mig.mode.current"] == "Disabled"
    assert record["gpus"][0]["power.limit"] == "1200.00"
    facts = machine_facts(record)
    assert facts["gpu_topology"] == "NV18"
    assert facts["gpus"] == [("NVIDIA GB200", "570.1", "189471")]
    assert "node7" not in json.dumps(facts)
    assert "GPU-1" not in json.dumps(facts)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{CPU}/cpu1/cache/index3/size", "big"),
        ("/proc/meminfo", "nothing"),
        (f"{CPU}/online", "0-x"),
        ("/sys/fs/cgroup/kubepods/pod1/cpu.max", "a b"),
        ("/proc/cpuinfo", "processor : 0\ncpu MHz : unknown\n"),
        ("/proc/self/cgroup", "nonsense"),
    ],
)
def test_garbage_costs_its_field_alone(name: str, text: str):
    record = collect(Fake({**GRACE, name: text}, cores=[1, 4]))
    expected = {
        f"{CPU}/cpu1/cache/index3/size": {"cpu.last_cache_bytes"},
        "/proc/meminfo": {"memory.total_bytes", "memory.available_bytes"},
        f"{CPU}/online": {"cpu.cores_online"},
        "/sys/fs/cgroup/kubepods/pod1/cpu.max": {"cpu.quota_cores"},
        "/proc/cpuinfo": {"cpu.model"},
        "/proc/self/cgroup": set(),  # no limit that could be found
    }[name]
    usual = set(collect(Fake(GRACE, cores=[1, 4]))["absent"])
    assert set(record["absent"]) - usual == expected


def test_an_old_cgroup_limits_too():
    files = {
        "/proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/job_1\n3:cpuset:/\n",
        "/sys/fs/cgroup/cpu,cpuacct/job_1/cpu.cfs_quota_us": "400000\n",
        "/sys/fs/cgroup/cpu,cpuacct/job_1/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert collect(Fake(files))["cpu"]["quota_cores"] == 4.0


def test_only_allowed_variables_are_stored():
    probe = Fake({})
    # whatever a library is told by its own variables may move its numbers
    libraries = {"NCCL_GRAPH_REGISTER": "0", "NVSHMEM_DISABLE_NVLS": "1", "DG_JIT_DEBUG": "1", "TRITON_CACHE_DIR": "/x"}
    allowed = {"OMP_NUM_THREADS": "2", "SLURM_JOB_ID": "12", **libraries}
    hidden = {"AWS_SECRET_ACCESS_KEY": "hush", "NCCL_TOKEN": "hush", "TORCH_HUB_PASSWORD": "hush", "HOME": "hush"}
    probe.secrets = {**allowed, **hidden}
    record = collect(probe)
    assert record["variables"] == allowed
    assert "hush" not in json.dumps(record)
    assert not [name for name in VARIABLES if any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASS"))]
    assert allocation_id(probe) == "slurm-12"
    assert allocation_id(Fake({})) is None


def test_clocks_of_the_own_cores_and_throttling():
    files = {
        "/proc/cpuinfo": "".join(f"processor\t: {core}\ncpu MHz\t\t: {1000.0 + core}\n\n" for core in range(5)),
        "/proc/loadavg": "1.50 1.00 0.50 2/100 999\n",
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 3\n",
        **{f"{CPU}/cpu{core}/thermal_throttle/core_throttle_count": f"{core}\n" for core in range(5)},
    }
    before = clock_snapshot(Fake(files, cores=[1, 3, 4]))
    assert before == {
        "mhz_min": 1001.0,
        "mhz_median": 1003.0,
        "mhz_max": 1004.0,
        "load_1min": 1.5,
        "thermal_throttles": 8,
        "quota_throttles": 3,
    }
    assert not throttled(before, before)
    hot = {**files, f"{CPU}/cpu3/thermal_throttle/core_throttle_count": "4\n"}
    assert throttled(before, clock_snapshot(Fake(hot, cores=[1, 3, 4])))
    limited = {**files, "/sys/fs/cgroup/cpu.stat": "nr_throttled 4\n"}
    assert throttled(before, clock_snapshot(Fake(limited, cores=[1, 3, 4])))
    assert not throttled(before, clock_snapshot(Fake({}, cores=[1, 3, 4])))


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("", []), ("5", [5])])
def test_cpu_lists(text: str, numbers: list[int]):
    assert cpu_list(text) == numbers


def test_a_command_that_is_absent_fails_or_hangs_gives_its_reason():
    probe = Probe()
    assert probe.output([sys.executable, "-c", "print('x')"], 10) == "x\n"
    with pytest.raises(LookupError, match="no-such-program is not installed"):
        probe.output(["no-such-program"], 1)
    with pytest.raises(LookupError, match="exit status 3: driver gone"):
        probe.output([sys.executable, "-c", "import sys; sys.exit(print('driver gone', file=sys.stderr) or 3)"], 10)
    start = time.monotonic()
    with pytest.raises(LookupError, match=r"took more than 0.2 s"):
        probe.output([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert time.monotonic() - start < 10


def test_importing_reads_no_variable():
    code = "import os; os.environ.clear(); import epcross.harness.storing.environment"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_topology_is_stored_without_escapes_and_hashed_as_it_was_read():
    head = "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18"
    record = collect(Fake({}, commands={"nvidia-smi --query-gpu=": SMI, "nvidia-smi topo": head}))
    stored = as_stored(record)
    assert stored["gpu_topology"] == "\tGPU0\tGPU1\nGPU0\t X \tNV18"
    assert {**stored, "gpu_topology": head} == record
    assert machine_facts(record)["gpu_topology"] == head
    assert as_stored({"gpu_topology": None, "a": 1}) == {"gpu_topology": None, "a": 1}
    assert as_stored({"a": 1}) == {"a": 1}
