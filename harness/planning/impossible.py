"""Which points cannot run, and why: a limit of their backend, or something that this machine lacks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from epcross.harness.backends import loader
from epcross.harness.backends.base import Backend
from epcross.harness.planning.plan import Impossible
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Point
from epcross.harness.terms import Domain, Regime, Scope, Status

_DEVICES = {
    Domain.CPU: ("cpu",),
    Domain.NVLINK: ("cuda",),
    Domain.SHARED_GPU: ("cuda_one_launch", "cuda_processes"),
}
"""What makes points of each domain: the files of conf/device."""


def impossible_points(
    points: Sequence[Point], configs: Mapping[str, BackendConfig], *, here: bool = True
) -> dict[Point, Impossible]:
    """Why points cannot run. A limit of the backend comes before a missing library: it holds on any machine.

    Unless they run `here`, what this machine lacks says nothing: the ranks will ask theirs.
    """
    found: dict[Point, Impossible] = {}
    absent: dict[tuple[Any, ...], str | None] = {}
    instances: dict[tuple[Any, ...], Backend | None] = {}
    for point in points:
        key = (point.backend, point.options, point.compute, point.compute_options)
        if key not in instances:
            try:
                instances[key] = loader.for_point(configs[point.backend], point)
            except loader.CannotImport:
                instances[key] = None  # `unavailable` says so
        reason = _unsupported(instances[key], point)
        if reason is not None:
            found[point] = Impossible(point=point, status=Status.UNSUPPORTED, reason=reason)
            continue
        if here and point.scope is Scope.SCALE_OUT:
            reason = "this host is one domain, and scope=scale_out spans several; take launcher=slurm"
            found[point] = Impossible(point=point, status=Status.UNAVAILABLE, reason=reason)
            continue
        asked = (point.backend, point.options, point.compute)  # an option may name a file that is not there
        if asked not in absent:
            config = replace(configs[point.backend], options=dict(point.options))
            absent[asked] = loader.unavailable(config, point.compute) if here else None
        reason = absent[asked]
        if reason is not None:
            found[point] = Impossible(point=point, status=Status.UNAVAILABLE, reason=reason)
    return found


def _unsupported(backend: Backend | None, point: Point) -> str | None:
    if backend is None:
        return None
    if point.domain not in backend.domains:
        devices = " or ".join(
            f"device={name}" for domain in sorted(backend.domains) for name in _DEVICES.get(domain, ())
        )
        domains = ", ".join(sorted(backend.domains))
        return f"{point.backend} runs in domain {domains}, not in {point.domain}" + (devices and f": take {devices}")
    if point.scope not in backend.scopes:
        return f"{point.backend} needs all ranks in one domain; scope={point.scope} is for backends that span several"
    if point.scope is Scope.SCALE_OUT and point.domain is Domain.CPU and point.regime is Regime.ENTRY:
        return "regime=entry needs one clock, and nodes have each their own; regime=steady is timed across nodes"
    try:
        return backend.unsupported(point)
    except Exception as error:  # one careless adapter must not end the plan
        return f"its check of the point failed with {type(error).__name__}: {error}"
