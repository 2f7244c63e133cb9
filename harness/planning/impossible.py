"""Which points cannot run, and why: a limit of their backend, or something that this machine lacks."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from epcross.harness.backends import answers, loader
from epcross.harness.backends.answers import FAILURES, WrongBackend
from epcross.harness.backends.base import Backend
from epcross.harness.planning.plan import Impossible
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind, Domain, Regime, Scope, Status

_DEVICES = {
    Domain.CPU: ("cpu",),
    Domain.NVLINK: ("cuda",),
    Domain.SHARED_GPU: ("cuda_one_launch", "cuda_processes"),
}
"""What makes points of each domain: the files of conf/device."""

ONLY_ON_GPUS = "layers and expert stages are timed on GPUs only"
"""They are queues of kernels; on a CPU a check can still hold them to the contract."""

_ASKED_AT_ONCE = 8
"""Interpreters. Each imports torch and a library, seconds of it waiting for the disk."""


def impossible_points(
    points: Sequence[Point], configs: Mapping[str, BackendConfig], *, here: bool = True
) -> dict[Point, Impossible]:
    """Why points cannot run. A limit of the backend comes before a missing library: it holds on any machine. A backend
    that breaks the contract costs its own points.

    Unless they run `here`, what this machine lacks says nothing: the ranks will ask theirs.
    """
    found: dict[Point, Impossible] = {}
    instances: dict[tuple[Any, ...], Backend | WrongBackend | None] = {}
    possible: list[Point] = []
    for point in points:
        key = (point.backend, point.options, point.compute, point.compute_options)
        if key not in instances:
            try:
                instances[key] = loader.for_point(configs[point.backend], point)
                alike = [one for one in points if (one.backend, one.compute) == (point.backend, point.compute)]
                if ending := loader.fatal_answer(configs[point.backend], alike):
                    instances[key] = WrongBackend(ending)
            except loader.CannotImport:
                instances[key] = None  # `unavailable` says so
            except WrongBackend as error:
                instances[key] = error
        try:
            reason = _unsupported(instances[key], point)
        except WrongBackend as error:
            found[point] = Impossible(point=point, status=Status.ERROR, reason=str(error))
            continue
        if reason is not None:
            found[point] = Impossible(point=point, status=Status.UNSUPPORTED, reason=reason)
        elif here and point.scope is Scope.SCALE_OUT:
            reason = "this host is one domain, and scope=scale_out spans several; take launcher=slurm"
            found[point] = Impossible(point=point, status=Status.UNAVAILABLE, reason=reason)
        else:
            possible.append(point)
    absent = _absent(possible, configs) if here else {}
    for point in possible:
        why = absent.get(_asked(point))
        if why is not None:
            found[point] = Impossible(point=point, status=why[0], reason=why[1])
    return {point: found[point] for point in points if point in found}


def _asked(point: Point) -> tuple[Any, ...]:
    """What makes a machine's answer: an option may name a file that is not there."""
    return point.backend, point.options, point.compute


_Why = tuple[Status, str] | None


def _here(config: BackendConfig, compute: str) -> _Why:
    """What a backend says of this machine, and what that makes of its points."""
    try:
        reason = loader.unavailable(config, compute)
    except WrongBackend as error:
        return Status.ERROR, str(error)
    return None if reason is None else (Status.UNAVAILABLE, reason)


def _absent(points: Sequence[Point], configs: Mapping[str, BackendConfig]) -> dict[tuple[Any, ...], _Why]:
    """Why what `points` need cannot be used here, of each once. Other interpreters are asked at the same time: one
    after another takes longer than many a sweep. This one is asked after them, in its own thread: what a library does
    when it is imported need not bear company."""
    found: dict[tuple[Any, ...], _Why] = {}
    waiting: dict[tuple[Any, ...], Future[_Why]] = {}
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        for point in points:
            key = _asked(point)
            if key in found or key in waiting:
                continue
            config = replace(configs[point.backend], options=dict(point.options))
            if loader.asks_another(config):
                waiting[key] = pool.submit(_here, config, point.compute)
            else:
                found[key] = _here(config, point.compute)
        return found | {key: each.result() for key, each in waiting.items()}


def _devices(domains: Iterable[Domain]) -> str:
    """What to write for one of them."""
    return " or ".join(f"device={name}" for domain in sorted(domains) for name in _DEVICES.get(domain, ()))


def _needs_gpu(backend: Backend, point: Point) -> str | None:
    """Why `point` cannot be timed on a CPU, whatever its backend can do there."""
    devices = _devices(domain for domain in backend.domains if domain is not Domain.CPU)
    if point.kind is not BackendKind.EXCHANGE:
        return f"{point.backend} has kind={point.kind}: {ONLY_ON_GPUS}, not in domain {point.domain}; " + (
            f"take {devices}" if devices else "let its class declare domain nvlink or shared_gpu"
        )
    if point.regime is Regime.SPANS:
        return (
            f"regime=spans is what a profiler sees of a GPU's kernels, and domain {point.domain} has none; take "
            "regime=steady or regime=entry"
        )
    return None


def _unsupported(backend: Backend | WrongBackend | None, point: Point) -> str | None:
    """A limit of the backend. Raises `WrongBackend` where it breaks the contract."""
    if backend is None:
        return None
    if isinstance(backend, WrongBackend):
        raise backend
    if point.domain not in backend.domains:
        devices = _devices(backend.domains)
        domains = ", ".join(sorted(backend.domains))
        return f"{point.backend} runs in domain {domains}, not in {point.domain}" + (devices and f": take {devices}")
    if point.domain is Domain.CPU and (why := _needs_gpu(backend, point)):
        return why
    if point.scope not in backend.scopes:
        return f"{point.backend} needs all ranks in one domain; scope={point.scope} is for backends that span several"
    if point.scope is Scope.SCALE_OUT and point.domain is Domain.CPU and point.regime is Regime.ENTRY:
        return "regime=entry needs one clock, and nodes have each their own; regime=steady is timed across nodes"
    asked = "unsupported"
    try:
        if reason := answers.unsupported(backend, point):
            return reason
        asked = "workspace_bytes"
        answers.workspace_bytes(backend, point)  # what a point needs is asked later, where nobody can be blamed for it
    except WrongBackend:
        raise
    except FAILURES as error:  # one careless adapter must not end the plan
        raise WrongBackend(
            f"its check of the point failed: {asked}() raised {answers.failure(error)}; it must "
            f"return, as {answers.CONTRACT} says"
        ) from error
    return None
