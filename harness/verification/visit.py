"""One case of the contract on one rank's worker: what `epcross check` has every process do."""

import faulthandler
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from epcross.harness.backends.base import Backend, Group
from epcross.harness.point import Point
from epcross.harness.terms import Domain
from epcross.harness.verification.contract import cases, refusal, run_case

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
        request: `name`, `seed`, `backend`, `options` and `timeout_s` (of a wait for peers).
    """
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    case = next(case for case in cases(group.size, request["backend"]) if case.name == request["name"])
    point = replace(case.point, options=tuple(sorted(request["options"].items())))
    # the suite is about what is moved; a backend without processes on a host gets the same points where it does run
    domains = make_backend(point).domains
    point = replace(point, domain=Domain.CPU if Domain.CPU in domains else min(domains))
    case = replace(case, point=point)

    def make() -> Backend:
        return make_backend(point)

    # asked together: a rank that goes on alone would wait for the others
    refusals = group.all_gather(json.dumps(refusal(make, case)).encode(), request["timeout_s"])
    if why := next((text for text in map(json.loads, refusals) if text), None):
        return {"refused": why}
    return {"problems": run_case(make, case, group, request["timeout_s"], seed=request["seed"], report=report)}
