"""The contract for all ranks of one process, with the stand-in exchange in plain torch."""

import re
from dataclasses import replace

import pytest
from tests._torch_one_launch import torch_one_launch
from tests.contract.threads import on_ranks

from epcross.harness.terms import Domain, Sharing
from epcross.harness.verification.cases import cases
from epcross.harness.verification.contract import refusal, run_case
from epcross.harness.verification.gpu_contract import GpuVisit

pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")


def in_one_launch(ep_size):
    return [
        replace(case, point=replace(case.point, domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH))
        for case in cases(ep_size, "torch_one_launch")
    ]


def visit(backend_class, case):
    assert refusal(lambda: backend_class({}), case) is None
    (problems,) = on_ranks(1, lambda group: run_case(lambda: backend_class({}), case, group, 30, visit_type=GpuVisit))
    assert problems is not None
    return problems


@pytest.mark.parametrize("case", in_one_launch(3), ids=lambda case: case.name)
def test_one_launch_passes(case):
    assert visit(torch_one_launch(), case) == []


def test_a_rank_that_forgets_a_partial_is_named():
    base = torch_one_launch()

    def combine(self, set_index):
        self.partials[1] = 0
        base.combine(self, set_index)

    problems = visit(type("Forgets", (base,), {"combine": combine}), in_one_launch(4)[0])
    assert len(problems) == 1
    assert re.match(r"plain: combine of exact rows, set 0: rank \d: a wrong combined sum", problems[0])
    assert problems[0].endswith(
        "the first is as if the partial of rank 0 were missing or as if the partial of rank 1 were missing"
    )
