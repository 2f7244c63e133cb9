"""Who else is on a GPU: NVML and processes are imitated, as a bare machine, MPS and containers show them."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.contract.threads import on_ranks

from epcross.harness.measuring.gpu_processes import GpuProcesses, Listing, System, strangers
from epcross.harness.measuring.gpu_watch import GpuWatch
from epcross.harness.terms import Flag


class NVMLError(Exception):
    pass


def nvml(listed: Sequence[int], clients: Sequence[int] | None = ()) -> SimpleNamespace:
    """As pynvml; without the call for clients of MPS if they are None."""

    def lists(pids: Sequence[int]):
        return lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]

    found = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetComputeRunningProcesses=lists(listed))
    if clients is not None:
        found.nvmlDeviceGetMPSComputeRunningProcesses = lists(clients)
    return found


class Processes(System):
    """`sessions[pid]` are those that live."""

    def __init__(self, own: int, sessions: Mapping[int, int], host: str = "h", **names: str) -> None:
        self.own, self.sessions, self.where = own, sessions, host
        self.names = {int(pid.removeprefix("p")): name for pid, name in names.items()}

    def pid(self) -> int:
        return self.own

    def host(self) -> str:
        return self.where

    def session(self, pid: int) -> int | None:
        return self.sessions.get(pid)

    def name(self, pid: int) -> str:
        return self.names.get(pid, "python")


def read(own: int, module: SimpleNamespace, sessions: Mapping[int, int], **names: str) -> Listing | None:
    return GpuProcesses(module, "handle", Processes(own, sessions, **names)).read()


RANKS = {10: 10, 11: 10, 20: 20}  # 11 is a child of rank 10


@pytest.mark.parametrize("clients", [None, ()])
def test_processes_of_ranks_are_no_strangers(clients):
    module = nvml([10, 11, 20], clients)
    told = [[read(10, module, RANKS)], [read(20, module, RANKS)]]
    assert strangers(told) == 0


def test_others_are_counted_at_the_worst_moment_of_the_worst_gpu():
    sessions = {**RANKS, 30: 30, 31: 30, 32: 32}
    one = [read(10, nvml(pids), sessions) for pids in ([10, 20], [10, 20, 30, 31], [10, 20, 32])]
    other = [read(20, nvml([20, 32]), sessions)]
    assert strangers([one, other]) == 2


def test_a_process_that_ended_is_none():
    assert strangers([[read(10, nvml([10, 40]), RANKS)]]) == 0


def test_under_mps_clients_count_and_servers_do_not():
    sessions = {**RANKS, 50: 50, 30: 30}
    server = {"p50": "nvidia-cuda-mps"}
    own = read(10, nvml([50], [10, 20]), sessions, **server)
    assert strangers([[own], [read(20, nvml([50], [10, 20]), sessions, **server)]]) == 0
    assert strangers([[read(10, nvml([50], [10, 11, 30]), sessions, **server)]]) == 1
    hidden = {"p50": ""}  # another user's, and /proc hides it: perhaps the server
    assert strangers([[read(10, nvml([50], [10]), sessions, **hidden)]]) == 0
    assert strangers([[read(10, nvml([10, 50]), sessions, **hidden)]]) == 1


@pytest.mark.parametrize(
    ("listed", "clients"),
    [
        ([], []),  # a container that is told nothing
        ([70_010, 70_011], []),  # or pids as its host counts them
        ([50], None),  # a client of MPS, and a binding that cannot ask for these
    ],
)
def test_lists_without_the_process_that_asks_say_nothing(listed, clients):
    assert read(10, nvml(listed, clients), {**RANKS, 50: 50}) is None


def test_where_some_ranks_are_told_nothing_nothing_is_said():
    told = read(10, nvml([10, 30]), {**RANKS, 30: 30})
    assert strangers([[told], [told]]) == 1
    assert strangers([[told], [None]]) is None
    assert strangers([[], []]) is None


def test_numbers_of_another_host_are_not_those_of_a_rank():
    here = GpuProcesses(nvml([10, 20]), "handle", Processes(10, RANKS, "one")).read()
    there = GpuProcesses(nvml([20]), "handle", Processes(20, RANKS, "two")).read()
    assert strangers([[here], [there]]) == 1


def test_nvml_that_refuses_one_list_is_asked_for_the_other():
    def refuse(handle):
        raise NVMLError("Not Supported")

    module = nvml([10, 30])
    module.nvmlDeviceGetMPSComputeRunningProcesses = refuse
    assert strangers([[read(10, module, {**RANKS, 30: 30})]]) == 1
    module.nvmlDeviceGetComputeRunningProcesses = refuse
    assert read(10, module, RANKS) is None


def test_the_kernel_knows_sessions_and_names_of_processes():
    system = System()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        assert system.session(other.pid) == other.pid
        assert system.name(system.pid()) == Path(f"/proc/{os.getpid()}/comm").read_text().strip()
        other.kill()
    assert system.session(other.pid) is None
    assert system.name(other.pid) == ""
    assert system.session(os.getpid()) == os.getsid(0)


class Always:
    def __init__(self, listing: Listing) -> None:
        self.listing = listing

    def read(self) -> Listing:
        return self.listing


@pytest.mark.parametrize(("sessions", "others", "flags"), [((1, 2), 0, set()), ((1, 3), 1, {Flag.NOT_ALONE})])
def test_all_ranks_hear_of_a_stranger_on_any_of_their_gpus(sessions, others, flags):
    def rank(group):
        own = group.rank + 1
        watch = GpuWatch(processes=Always(Listing(host="h", own=own, sessions=sessions if own == 1 else (2,))))
        watch.read()
        return watch.fields(group)

    assert on_ranks(2, rank) == [({"other_processes": others}, flags)] * 2


def test_a_watch_that_sees_nothing_says_nothing():
    def rank(group):
        watch = GpuWatch()
        watch.read()
        return watch.fields(group)

    assert on_ranks(1, rank) == [({"other_processes": None}, frozenset())]
