"""One process of a group, run by test_processes.py with the words that `main` takes."""

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from epcross.kernels.errors import InvalidArguments, NotOneDomain, WaitExpired  # noqa: E402
from epcross.kernels.onesided import OneSidedAllToAll  # noqa: E402

from tests.gpu._rounds import Case, always, make_inputs, play, send  # noqa: E402  # isort: skip

ROUNDS = ([1], [8], [0], [33], [3, 0], [33, 1])
"""Tokens of the ranks, in turn."""


def rounds(case: Case, exchange: OneSidedAllToAll, seed: int = 0) -> None:
    """Several rounds, compared bit for bit."""
    for number, pattern in enumerate(ROUNDS):
        counts = [pattern[rank % len(pattern)] for rank in range(case.ep_size)]
        play(exchange, make_inputs(case, counts, seed + number, reserved=number % 2 == 1), case.linear())


def expect(error: type[Exception], words: str, case: Case, group: ProcessGroup, **options: Any) -> None:
    """The exchange cannot be made, and this rank hears why."""
    with pytest.raises(error, match=re.escape(words)):
        case.exchange(group=group, **options)


def main(name: str, rank: int, size: int, port: int, protocol: str, gpus: int, local_ranks: int) -> None:
    """Run the case; any exception ends the process with its traceback."""
    always(protocol)
    torch.cuda.set_device(rank % gpus)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        play_case(name, rank, size, protocol, gpus, local_ranks)
    finally:
        # while the interpreter lives: at its end torch's threads may still run, and end the process by std::terminate
        distributed.destroy_process_group()


def play_case(name: str, rank: int, size: int, protocol: str, gpus: int, local_ranks: int) -> None:
    """The case itself, in a group of processes that is there."""
    group = distributed.group.WORLD
    assert group is not None
    sharing = size // gpus
    ranks = size * local_ranks
    case = Case(ep_size=ranks, capacity=33, hidden=1024, num_slots=8 * ranks, protocol=protocol)
    match name:
        case "differ":
            differ(case, group, rank, sharing)
            return
        case "late" if rank == 1:
            time.sleep(30)
    exchange = case.exchange(group=group, ranks_per_gpu=sharing, timeout_s=3.0 if name == "absent" else 60.0)
    assert exchange.rank == rank * local_ranks
    rounds(case, exchange)
    if name == "absent":
        absent(case, exchange, rank)
    if name == "leave" and rank == 0:
        time.sleep(2)  # while the others leave
    exchange.close()
    exchange.close()


def differ(case: Case, group: ProcessGroup, rank: int, sharing: int) -> None:
    """Ranks that ask for different things, or for what cannot be: all of them hear of it, and none hangs."""
    last = group.size() - 1
    words = f"rank {last} has max_tokens_per_rank={33 + last} and rank 0 max_tokens_per_rank=33"
    expect(InvalidArguments, words, replace(case, capacity=33 + rank), group, ranks_per_gpu=sharing)
    words, timeout_s = f"rank {last}: timeout_s=0 must be", 0 if rank == last else 1
    expect(InvalidArguments, words, case, group, ranks_per_gpu=sharing, timeout_s=timeout_s)
    if sharing > 1:
        expect(NotOneDomain, "ranks_per_gpu=1: give each its own GPU", case, group)


def absent(case: Case, exchange: OneSidedAllToAll, rank: int) -> None:
    """Rank 1 stays away from a round; the others are told so, and after `rearm` all is well."""
    if rank != 1:
        send(exchange, make_inputs(case, [1] * case.ep_size, 1))
        torch.cuda.synchronize()
        with pytest.raises(WaitExpired, match="waited 3 s for rank 1 in dispatch of epoch 7"):
            exchange.check()
    exchange.rearm()
    rounds(case, exchange, seed=50)


if __name__ == "__main__":
    name, rank, size, port, protocol, gpus, local_ranks = sys.argv[1:]
    main(name, int(rank), int(size), int(port), protocol, int(gpus), int(local_ranks))
