"""Jobs of Slurm on nodes that they share: each node's GPUs are locked, and all ranks hear of one that is in use."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.contract.threads import on_ranks

from epcross.harness.errors import EpcrossError
from epcross.harness.planning.build import build
from epcross.harness.running.gpu_lock import GpuLocks, gpu_holders
from epcross.harness.running.seat import Seat
from epcross.harness.slurm import allocation
from epcross.harness.slurm.layout import pieces
from epcross.harness.slurm.start import Start
from epcross.harness.slurm.task import _agree  # pyright: ignore[reportPrivateUsage]
from epcross.harness.storing.run_directory import RunDirectory, create_run
from epcross.harness.storing.run_owner import release

NODES = ("n1", "n2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run on two nodes, whose GPUs are `0` to `3` and locked in `tmp_path`."""
    words = "sweep=onesided_nvlink ep_size=4 tokens_per_rank=1 launcher=slurm cluster=gb200_nvl72"
    plan = build([*words.split(), "cluster.gpus_per_node=2", f"output_dir={tmp_path}"])
    run = create_run(tmp_path, plan.sweep, plan.to_json(), {})
    release(run.path)
    facts = {"gpus": [{"uuid": f"GPU-{number}"} for number in range(4)], "gpu_software": None}
    monkeypatch.setattr(allocation.environment_facts, "collect", lambda: facts)
    monkeypatch.setattr(allocation, "GpuLocks", partial(GpuLocks, folder=tmp_path))
    return run


def start_of(rank: int) -> Start:
    return Start(
        job_id="7", restart=0, rank=rank, size=2, local_rank=0, nodes=NODES, node=NODES[rank], gpus=("0", "1", "2", "3")
    )


def seat_of(rank: int, local_size: int = 2) -> Seat:
    return Seat(rank=rank, node=NODES[rank], local_rank=0, local_size=local_size)


def orders_of(run: RunDirectory) -> dict[str, Any]:
    plan = allocation.Plan.from_json(run.plan)
    return {"run": str(run.path), "piece": pieces(plan)[0].name, "configs": {}}


def test_a_node_locks_the_gpus_of_its_ranks(run: RunDirectory, tmp_path: Path) -> None:
    with allocation.lock_node(orders_of(run), start_of(0), seat_of(0)):
        held = {number: [holder.who for holder in gpu_holders(str(number), tmp_path)] for number in range(4)}
    assert held == {0: [f"run {run.path}, Slurm job 7"], 1: [f"run {run.path}, Slurm job 7"], 2: [], 3: []}


def test_all_ranks_hear_of_a_gpu_that_is_in_use_on_one_node(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, seats = orders_of(run), [seat_of(rank) for rank in range(2)]
    prepared: list[str] = []
    lock_node = allocation.lock_node

    class Rank0:
        def orders(self) -> dict[str, Any]:
            return orders

        def job_file(self, unbuilt: dict[str, str]) -> str:
            return "job.json"

    def node_of_its_own(orders: dict[str, Any], start: Start, seat: Seat) -> GpuLocks:
        if start.node == "n2":  # here all nodes are one, and the second one's GPUs would be the first one's
            with GpuLocks(["3"], "run of somebody else", folder=run.path.parent):
                return GpuLocks(["3"], "run", folder=run.path.parent)
        return lock_node(orders, start, seat)

    def prepare(orders: dict[str, Any], node: str, stop_asked: Any) -> tuple[None, dict[str, str]]:
        prepared.append(node)
        return None, {}

    monkeypatch.setattr(allocation, "lock_node", node_of_its_own)
    monkeypatch.setattr(allocation, "prepare_node", prepare)
    said: dict[int, str] = {}

    def rank(group: Any) -> None:
        with contextlib.ExitStack() as stack:
            given = Rank0() if group.rank == 0 else None
            try:
                _agree(stack, group, start_of(group.rank), seats, given, lambda: None)
            except EpcrossError as error:
                said[group.rank] = str(error)

    on_ranks(2, rank)
    assert said[0] == said[1]
    assert said[0].startswith("n2: GPU 3 is in use by run of somebody else (process")
    assert prepared == ["n1"]
    assert gpu_holders("0", run.path.parent) == []  # given up with the start


def test_ranks_on_the_cpu_lock_nothing(tmp_path: Path) -> None:
    plan = build(["sweep=smoke", "launcher=slurm", "cluster=local", f"output_dir={tmp_path}"])
    run = create_run(tmp_path, plan.sweep, plan.to_json(), {})
    release(run.path)
    allocation.lock_node(orders_of(run), start_of(0), seat_of(0)).close()
    assert list(tmp_path.glob("*.lock")) == []
