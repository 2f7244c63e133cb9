"""The contract suite on real processes with a torch group: `epcross check` for backends of a GPU, on the CPU."""

import faulthandler
import importlib
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import Empty
from typing import Any

import pytest

from epcross.harness.running.group import StoreGroup
from epcross.harness.running.rendezvous import Address, new_token
from epcross.harness.running.rendezvous_server import StoreServer
from epcross.harness.terms import Domain
from epcross.harness.verification.cases import cases
from epcross.harness.verification.contract import run_case
from epcross.harness.verification.gpu_contract import GpuVisit

STUCK_S = 120


def problems_on_ranks(visits: Sequence[tuple[str, str]], size: int) -> dict[str, list[str]]:
    """What goes wrong on some rank in visits of (target, case), by target; `*` stands for all cases.

    A target is a module:Class. One group of processes makes them all: starting it is most of the time.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    found: dict[str, list[str]] = {}
    with StoreServer(token=new_token()) as server:
        ranks = [
            context.Process(target=_rank, args=(visits, server.address, r, size, results), daemon=True)
            for r in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            for _ in ranks:
                rank, problems, failure = results.get(timeout=STUCK_S)
                assert failure is None, f"rank {rank}:\n{failure}"
                for target, texts in problems.items():
                    found.setdefault(target, []).extend(texts)
            for process in ranks:
                process.join(30)
                assert process.exitcode == 0
        except Empty:
            pytest.fail(f"a rank said nothing within {STUCK_S} s")
        finally:
            for process in ranks:
                process.kill()
    return found


def _rank(visits: Sequence[tuple[str, str]], address: Address, rank: int, size: int, results: Any) -> None:
    faulthandler.dump_traceback_later(STUCK_S - 5, exit=True)
    import torch

    torch.set_num_threads(1)
    problems: dict[str, list[str]] = {}
    try:
        with StoreGroup(address, scope="g", rank=rank, size=size, shared_name="contract", timeout_s=60) as group:
            for target, wanted in visits:
                for name, texts in _visit(target, wanted, group):
                    problems.setdefault(target, []).extend(f"{name}: {text}" for text in texts)
        results.put((rank, problems, None))
    except BaseException:
        results.put((rank, problems, traceback.format_exc()))


def _visit(target: str, wanted: str, group: StoreGroup) -> Iterator[tuple[str, list[str]]]:
    module, _, name = target.partition(":")
    backend = getattr(importlib.import_module(module), name)
    for case in cases(group.size, backend.name, backend.contract_shape):
        if wanted not in ("*", case.name):
            continue
        case = replace(case, point=replace(case.point, domain=Domain.NVLINK))
        if refused := backend(backend.option_defaults()).unsupported(case.point):
            yield case.name, [refused]
            continue
        yield case.name, run_case(lambda: backend(backend.option_defaults()), case, group, 30, visit_type=GpuVisit)
