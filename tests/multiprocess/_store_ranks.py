"""Run one function as the ranks of a torch group that meet at a store, each a process of its own, as workers do."""

import faulthandler
import multiprocessing
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest

from epcross.harness.running.group import StoreGroup
from epcross.harness.running.rendezvous import Address, new_token
from epcross.harness.running.rendezvous_server import StoreServer

TIMEOUT_S = 60  # of a wait in the group
MARGIN_S = 10.0  # for a rank that hangs to say where


def run_on_store(size: int, body: Callable[..., Any], *arguments: Any, limit_s: float) -> list[Any]:
    """`body(group, *arguments)` on each rank; returns what each returned. Fails with a rank's traceback, or if one says
    nothing within `limit_s`."""
    context = multiprocessing.get_context("spawn")  # a forked torch may hold locks of threads that were not forked
    results = context.Queue()
    returned: dict[int, Any] = {}
    with StoreServer(token=new_token()) as server:
        ranks = [
            context.Process(
                target=_rank, args=(server.address, rank, size, limit_s, results, body, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            for _ in ranks:
                rank, value, failure = results.get(timeout=limit_s)
                assert failure is None, f"rank {rank}:\n{failure}"
                returned[rank] = value
            for process in ranks:
                process.join(limit_s)
                assert process.exitcode == 0
        except Empty:
            pytest.fail(f"ranks {sorted(set(range(size)) - set(returned))} sent nothing within {limit_s:g} s")
        finally:
            for process in ranks:
                process.kill()
    return [returned[rank] for rank in range(size)]


def _rank(
    address: Address,
    rank: int,
    size: int,
    limit_s: float,
    results: Any,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(limit_s - MARGIN_S, exit=True)
    try:
        import torch

        torch.set_num_threads(1)
        with StoreGroup(
            address, scope="g", rank=rank, size=size, shared_name="epcross-test", timeout_s=TIMEOUT_S
        ) as group:
            value = body(group, *arguments)
            group.barrier()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
