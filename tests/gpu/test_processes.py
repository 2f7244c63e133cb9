"""The one-sided exchange between processes, over torch symmetric memory."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch for CUDA and a GPU")

CASE = Path(__file__).with_name("_group_case.py")
PROTOCOLS = ("fence", "fence_row", "sentinel")
LIMIT_S = 150.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(name: str, *, size: int, gpus: int, protocol: str = "sentinel", local_ranks: int = 1) -> None:
    """`size` processes on `gpus` GPUs; raises with what the first that failed wrote."""
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="epcross-group-") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(size)]
        processes = []
        for rank, log in enumerate(logs):
            words = (name, rank, size, port, protocol, gpus, local_ranks)
            with log.open("wb") as file:
                command = [sys.executable, str(CASE), *map(str, words)]
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(process.poll() is None for process in processes):
                failed = next((r for r, process in enumerate(processes) if process.poll()), None)
                assert failed is None, f"rank {failed} failed:\n{logs[failed].read_text()[-4000:]}"
                slow = [rank for rank, process in enumerate(processes) if process.poll() is None]
                assert time.monotonic() < deadline, f"ranks {slow} did not end:\n{logs[slow[0]].read_text()[-4000:]}"
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank} failed:\n{logs[rank].read_text()[-4000:]}"


@pytest.mark.gpu(2)
@pytest.mark.parametrize("local_ranks", [1, 2, 4])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_gpu_a_process(protocol: str, local_ranks: int) -> None:
    run("exact", size=2, gpus=2, protocol=protocol, local_ranks=local_ranks)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_processes_that_share_a_gpu(protocol: str, size: int) -> None:
    """Without MPS they take turns of milliseconds: slow, but right."""
    run("exact", size=size, gpus=1, protocol=protocol)


@pytest.mark.gpu(1)
def test_ranks_that_differ_all_hear_of_it() -> None:
    run("differ", size=2, gpus=1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_absent_peer_is_named_and_the_workspaces_can_be_armed_again(protocol: str) -> None:
    run("absent", size=2, gpus=1, protocol=protocol)


@pytest.mark.gpu(1)
def test_a_rank_may_come_thirty_seconds_late() -> None:
    run("late", size=2, gpus=1)


@pytest.mark.gpu(1)
def test_a_rank_may_leave_first() -> None:
    run("leave", size=2, gpus=1)
