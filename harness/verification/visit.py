"""One case of the contract on one rank's worker: what `epcross check` has every process do."""

import faulthandler
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from epcross.harness.backends.base import Backend, Group
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.point import Point
from epcross.harness.terms import Domain, Sharing
from epcross.harness.verification.contract import Visit, cases, refusal, run_case
from epcross.harness.verification.gpu_contract import GpuVisit

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker write where each of its threads is to its log, whatever it is stuck in."""


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
            peers). `group` is one of processes; on a GPU one of them may hold several ranks.
    """
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    case = next(case for case in cases(request["ep_size"], request["backend"]) if case.name == request["name"])
    # the suite is about what is moved; every domain gets the same points
    point = replace(
        case.point,
        options=tuple(sorted(request["options"].items())),
        domain=Domain(request["domain"]),
        sharing=Sharing(request["sharing"]),
    )
    case = replace(case, point=point)

    def make() -> Backend:
        return make_backend(point)

    # asked together: a rank that goes on alone would wait for the others
    refusals = group.all_gather(json.dumps(refusal(make, case)).encode(), request["timeout_s"])
    if why := next((text for text in map(json.loads, refusals) if text), None):
        return {"refused": why}
    visit_type = GpuVisit if isinstance(make(), GpuBackend) else Visit
    limit_s, seed = request["timeout_s"], request["seed"]
    problems = run_case(make, case, group, limit_s, seed=seed, report=report, visit_type=visit_type)
    return {"problems": problems}
