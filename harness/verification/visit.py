"""One case of the contract on one rank's worker: what `epcross check` has every process do."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from epcross.harness.backends.base import Backend, ContractShape, Group
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.backends.layer import LayerBackend
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind, Domain, Sharing
from epcross.harness.verification.cases import Case
from epcross.harness.verification.contract import Visit, refusal, run_case
from epcross.harness.verification.gpu_contract import GpuVisit
from epcross.harness.verification.layer_contract import LayerVisit, suite


def visit_case(
    make_backend: Callable[[Point], Backend],
    request: Mapping[str, Any],
    group: Group,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Visit the case `request` names; collective. `{"refused": why}`, or `{"problems": [...]}`, empty if it passed.

    Args:
        make_backend: the backend with the options of a point.
        request: `name`, `seed`, `backend`, `options`, `ep_size`, `domain`, `sharing` and `timeout_s` (of a wait for
            peers); what kind of backend it is, with its expert stage if it has one. `group` is one of processes; on a
            GPU one of them may hold several ranks.
    """
    case = _case(request)
    case = _case(request, make_backend(case.point).contract_shape)

    def make() -> Backend:
        return make_backend(case.point)

    # asked together: a rank that goes on alone would wait for the others
    refusals = group.all_gather(json.dumps(refusal(make, case)).encode(), request["timeout_s"])
    if why := next((text for text in map(json.loads, refusals) if text), None):
        return {"refused": why}
    made = make()
    visit_type = LayerVisit if isinstance(made, LayerBackend) else GpuVisit if isinstance(made, GpuBackend) else Visit
    limit_s, seed = request["timeout_s"], request["seed"]
    problems = run_case(make, case, group, limit_s, seed=seed, report=report, visit_type=visit_type)
    return {"problems": problems}


def _case(request: Mapping[str, Any], shape: ContractShape | None = None) -> Case:
    """The case that is asked for, where and with what it runs."""
    case = next(
        case
        for case in suite(
            BackendKind(request["kind"]),
            request["ep_size"],
            request["backend"],
            compute=request["compute"],
            compute_options=[(name, value) for name, value in request["compute_options"].items()],
            shape=shape,
        )
        if case.name == request["name"]
    )
    # the suite is about what is moved; every domain gets the same points
    point = replace(
        case.point,
        options=tuple(sorted(request["options"].items())),
        domain=Domain(request["domain"]),
        sharing=Sharing(request["sharing"]),
    )
    return replace(case, point=point)
