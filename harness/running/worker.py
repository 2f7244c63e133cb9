"""The process that holds a backend: told by its supervisor what to measure, it answers with stages and results.

Started as `python -m epcross.harness.running.worker FD`, where FD is a socket of JSON lines:

    supervisor -> worker   {hello: who you are}, {alone: true} if that said `another_leaves`,
                           then {unit: ...} | {floor: true} | {case: ...}, ...; end of file: leave
    worker -> supervisor   {ready: flags}; per request any number of {stage: ...}, then {done: result}
                           or {failed: ending, reason: ...} after which it waits to be killed

Until the hello is read only the standard library is imported, so that the process is bound to its core before numpy
counts the cores.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from epcross.harness.running import stuck
from epcross.harness.running.processes import die_with_parent


def main() -> None:
    """Serve the supervisor until it closes the socket."""
    faulthandler.enable()
    stuck.listen()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # a compiler started here must not keep the supervisor waiting
    lines = _lines(channel)
    hello = next(lines)
    # under a wrapper the parent is that wrapper, which the supervisor kills with us
    die_with_parent(hello["supervisor"] or os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    if hello.get("in_batch"):
        for number in (signal.SIGTERM, signal.SIGUSR2):  # meant for the supervisor; a scheduler sends them to all
            signal.signal(number, signal.SIG_IGN)
    flags = _bind(hello["core"])

    def send(**message: Any) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    from epcross.harness.terms import Stage  # after binding, as is everything that may import numpy

    def report_stage(stage: Stage) -> None:
        send(stage=stage)

    try:
        _serve(hello, lines, send, report_stage, flags)
    except (Exception, SystemExit) as error:  # a library that leaves would look like a crash, without a reason
        traceback.print_exc()
        sys.stderr.flush()
        ending, reason = _explain(error, hello["rank"])
        send(failed=ending, reason=reason)
        while channel.recv(4096):  # leaving would look like a death to the peers, before the reason is known
            pass


def _serve(
    hello: dict[str, Any],
    lines: Iterable[dict[str, Any]],
    send: Callable[..., None],
    report_stage: Callable[[Any], None],
    flags: list[str],
) -> None:
    from epcross.harness.backends import answers
    from epcross.harness.point import Point, Timing, Unit
    from epcross.harness.running.group import StoreGroup
    from epcross.harness.running.rendezvous import Address
    from epcross.harness.terms import Flag, Stage
    from epcross.kernels.errors import DoesNotFit, NoCrossover

    if hello.get("another_leaves"):
        _import_ahead(hello["gpu"])
        next(iter(lines), None)  # that it has gone
    if (reason := _use_gpu(hello["gpu"])) is not None:
        return send(failed="unavailable", reason=reason)
    make_backend = None
    if hello["backend"]:
        make_backend, reason = _backend_factory(hello["backend"])
        if reason:
            return send(failed="unavailable", reason=reason)
    work = _resolve(hello["work"])  # imported before the peers wait for it
    timing = Timing(**hello["timing"])
    group = StoreGroup(
        Address(**hello["address"]),
        scope=hello["scope"],
        rank=hello["rank"],
        size=hello["size"],
        shared_name=hello["shared_name"],
        timeout_s=timing.wall_limit_s,
    )
    marks = frozenset(Flag(flag) for flag in [*hello["flags"], *flags])
    send(ready=True)
    for request in lines:
        if make_backend is None:
            send(done=work(group))
            continue
        if "case" in request:  # of the contract suite; see check_ranks.py
            send(done=work(make_backend, request["case"], group, report_stage))
            continue
        report_stage(Stage.START)
        unit = Unit(point=Point.from_json(request["unit"]["point"]), launch=request["unit"]["launch"])
        backend = make_backend(unit.point)
        # asked together: a rank that goes on alone would wait for the others
        refused = answers.unsupported(backend, unit.point) or answers.refused_here(backend, unit.point)
        refusals = group.all_gather((refused or "").encode())
        refusal = next((r.decode() for r in refusals if r), None)
        if refusal:
            send(unsupported=refusal)
            continue
        try:
            result = work(backend, unit, timing, group, _context(hello), report_stage, marks)
        except (DoesNotFit, NoCrossover) as error:  # raised on every rank alike, before anything was allocated
            backend.close()
            send(unsupported=str(error))
            continue
        send(done=None if result is None else asdict(result))
    backend = None  # which may hold torch's group: it and its store end with the last that does
    group.close()  # not after an error: a goodbye would hide the reason from the peers
    return None


def _context(hello: dict[str, Any]) -> Any:
    from epcross.harness.storing.rows import RunContext

    return RunContext(**hello["context"])


def _backend_factory(config: dict[str, Any]) -> tuple[Callable[[Any], Any], str | None]:
    """What makes the backend of a point, and why it cannot be used here, if so."""
    from epcross.harness.backends import answers, loader, trial
    from epcross.harness.planning.schema import BackendConfig

    trial.expendable()
    parsed = BackendConfig.from_json(config)
    try:
        reason = answers.unavailable(loader.load(parsed))
    except loader.CannotImport as error:
        reason = str(error)
    return (lambda point: loader.for_point(parsed, point)), reason


def _import_ahead(gpu: int | None) -> None:
    """What takes longest and comes near no GPU."""
    if gpu is not None:
        with contextlib.suppress(Exception):  # whoever needs it says what is wrong with it
            importlib.import_module("torch")


def _use_gpu(index: int | None) -> str | None:
    """Make GPU `index` the current device, before anything makes a context on another; why that fails, if so."""
    if index is None:
        return None
    from epcross.harness.running.gpu_place import use_gpu

    return use_gpu(index)


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _explain(error: BaseException, rank: int) -> tuple[str, str]:
    from epcross.harness.backends.answers import failure
    from epcross.harness.errors import EpcrossError, GroupError, WaitExpired

    if isinstance(error, GroupError):
        return ("error" if error.rank == rank else "bystander"), str(error)
    if isinstance(error, WaitExpired):
        return "wait", str(error)
    if isinstance(error, EpcrossError):
        return "error", str(error)
    return "error", failure(error)


def _bind(core: int | None) -> list[str]:
    """Run on `core` alone; the flags that say it did not work."""
    if core is None:
        return []
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return ["unpinned"]
    return []


def _lines(channel: socket.socket) -> Iterator[dict[str, Any]]:
    pending = b""
    while data := channel.recv(1 << 16):
        *whole, pending = (pending + data).split(b"\n")
        yield from map(json.loads, whole)


if __name__ == "__main__":
    main()
