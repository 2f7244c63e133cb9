"""Two measurements on one GPU, started by mistake, as commands. The GPU is one that a false nvidia-smi lists."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from _spawn import PYTHONPATH, until
from epcross.harness.running.gpu_lock import gpu_holders
from epcross.harness.running.lock_file import FOLDER
from epcross.harness.storing.store import open_run, owner_of, read_units

START_LIMIT_S = 150
"""A command asks torch for GPUs before it takes a lock; the first import of a torch without bytecode takes a minute."""

OWN = """
import os, time
from pathlib import Path
from epcross.harness.terms import Domain
from tests.broken_backends import ReferenceBackend

class Slow(ReferenceBackend):
    domains = frozenset({Domain.SHARED_GPU})
    def prebuild(self):
        while not Path(os.environ["GO_ON"]).exists():
            time.sleep(0.05)
"""
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "0, NVIDIA H200, GPU-UUID, 580, 143771, 0, 1980, 3201, 700.00, Disabled";;
  *) exit 1;;
esac
"""
RUN = ("run", "sweep=one", "--config-dir", "own", "output_dir=runs")
SWEEP = """
description: one point
timing: smoke
grid: {backend: slow, ep_size: 2, model: tiny, tokens_per_rank: 1, regime: steady, device: cuda_one_launch}
"""


class Machine:
    """One with a GPU, on which `slow` is not built before `go_on` is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uuid, self.go_on = folder, f"test-{secrets.token_hex(8)}", folder / "go_on"
        self.processes: list[subprocess.Popen[str]] = []
        for name, text in {
            "bin/nvidia-smi": SMI.replace("UUID", self.uuid),
            "own/own.py": OWN,
            "own/backend/slow.yaml": 'target: own:Slow\nlabel: slow\ncolor: "#777777"\n',
            "own/sweep/one.yaml": SWEEP,
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "bin" / "nvidia-smi").chmod(0o755)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
            "GO_ON": str(self.go_on),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "epcross.harness.cli", *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def kill(self, process: "subprocess.Popen[str]") -> None:
        with process:
            process.kill()

    def refusal(self, *words: str) -> str:
        """What is said to a command that is refused."""
        process = self.start(*words)
        _, said = process.communicate(timeout=100)
        assert process.returncode == 1
        assert "Traceback" not in said
        return said

    def holders(self) -> list[str]:
        return [holder.who for holder in gpu_holders(self.uuid)]

    @property
    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob("*"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.go_on.touch()  # for what builds; its parent may be gone
    for process in machine.processes:
        machine.kill(process)
    (FOLDER / f"epcross-gpu-{machine.uuid}.lock").unlink(missing_ok=True)


def test_a_second_run_is_refused_and_the_first_can_be_killed_and_resumed(machine: Machine) -> None:
    first = machine.start(*RUN)
    (run,) = until(lambda: machine.runs, START_LIMIT_S, first)
    until(lambda: machine.holders() == [f"run {run}"], START_LIMIT_S, first)
    said = machine.refusal(*RUN)
    assert said.startswith(f"epcross: GPU {machine.uuid} is in use by run {run} (process {first.pid}, since 20")
    assert "Wait until it has ended and repeat the command" in said
    assert machine.runs == [run]  # nothing of the second one
    machine.kill(first)
    assert machine.holders() == []

    second = machine.start(*RUN)
    other = until(lambda: [path for path in machine.runs if path != run], START_LIMIT_S, second)[0]
    until(lambda: machine.holders() == [f"run {other}"], START_LIMIT_S, second)
    before = (run / "environment.json").read_bytes()
    assert f"in use by run {other} " in machine.refusal("run", "--resume", str(run))
    assert owner_of(run) is None
    assert (run / "environment.json").read_bytes() == before
    machine.kill(second)

    machine.go_on.touch()
    third = machine.start("run", "--resume", str(run), "--json")
    summary = json.loads(third.communicate(timeout=100)[0])
    assert (summary["units"], summary["planned_units"]) == (1, 1)
    # no GPU for the rank of this test, wherever it runs
    assert {record.status for unit in read_units(open_run(run))[0] for record in unit.records} != {"ok"}
    assert machine.holders() == []


def test_checks_go_beside_each_other_and_not_beside_a_run(machine: Machine) -> None:
    check = ("check", "backend=slow", "device=cuda_one_launch", "--config-dir", "own")
    first, second = machine.start(*check), machine.start(*check)
    until(lambda: machine.holders() == ["epcross check backend=slow"] * 2, START_LIMIT_S, second)
    assert f"GPU {machine.uuid} is in use by epcross check backend=slow (process" in machine.refusal(*RUN)
    assert machine.runs == []
    for process in (first, second):
        machine.kill(process)
    run = machine.start(*RUN)
    (path,) = until(lambda: machine.runs, START_LIMIT_S, run)
    until(lambda: machine.holders() == [f"run {path}"], START_LIMIT_S, run)
    begin = time.monotonic()
    assert f"in use by run {path} " in machine.refusal(*check)
    assert time.monotonic() - begin < 60
    machine.kill(run)
