"""The contract suite on real processes with a torch group: `epcross check` for backends of a GPU, on the CPU."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from _store_ranks import run_on_store

from epcross.harness.running.group import StoreGroup
from epcross.harness.terms import Domain
from epcross.harness.verification.cases import cases
from epcross.harness.verification.contract import run_case
from epcross.harness.verification.gpu_contract import GpuVisit

STUCK_S = 120


def problems_on_ranks(visits: Sequence[tuple[str, str]], size: int) -> dict[str, list[str]]:
    """What goes wrong on some rank in visits of (target, case), by target; `*` stands for all cases.

    A target is a module:Class. One group of processes makes them all: starting it is most of the time.
    """
    found: dict[str, list[str]] = {}
    for problems in run_on_store(size, _problems, visits, limit_s=STUCK_S):
        for target, texts in problems.items():
            found.setdefault(target, []).extend(texts)
    return found


def _problems(group: StoreGroup, visits: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for target, wanted in visits:
        for name, texts in _visit(target, wanted, group):
            problems.setdefault(target, []).extend(f"{name}: {text}" for text in texts)
    return problems


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
