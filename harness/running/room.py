"""Whether this machine has room for the processes of a run or a check: refused in words before any of them starts."""

import resource
from pathlib import Path

from epcross.harness.backends import answers, loader
from epcross.harness.errors import EpcrossError
from epcross.harness.planning.estimate import free_shm_bytes, inputs_bytes, needs
from epcross.harness.planning.plan import Plan
from epcross.harness.point import Point, Timing, processes
from epcross.harness.running.check_request import CheckRequest
from epcross.harness.terms import Domain
from epcross.harness.verification.layer_contract import suite

WORKER_BYTES = 40 * 10**6
"""What a worker has to itself before it holds a row; the code of its libraries is shared. Measured, and the least."""

_FILES, _FILES_OF_RANK = 64, 3  # descriptors that a check has open: a channel, its end and a connection for each rank


def check_room(plan: Plan) -> None:
    """Refuse a plan that memory or /dev/shm cannot hold, before any process starts. Raises `EpcrossError`."""
    for job, need in zip(plan.jobs, needs(plan), strict=True):
        size = processes(job.ep_size, job.sharing)
        on_cpu = [point for point in job.points if point.domain is Domain.CPU]
        inputs = max(on_cpu, key=lambda point: inputs_bytes(point, plan.timing), default=None)
        _refuse(
            [
                _too_little_shm(need.shm_bytes, job.ep_size, "sweep"),
                _too_little_memory(size, job.ep_size)
                or ("" if inputs is None else _too_large_inputs(inputs, plan.timing)),
            ]
        )


def room_for_check(request: CheckRequest) -> None:
    """As `check_room`, of a check, which also has every rank's files open itself. Raises `EpcrossError`."""
    size = processes(request.ep_size, request.device.sharing)
    shm_bytes = _largest_workspace_bytes(request) * request.ep_size
    _refuse(
        [
            _too_little_shm(shm_bytes, request.ep_size, "check"),
            _too_little_memory(size, request.ep_size),
            _too_few_files(size, request.ep_size),
        ]
    )


def free_memory_bytes(facts: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes can still have, as the kernel estimates it; None where it does not say."""
    try:
        lines = facts.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _refuse(problems: list[str]) -> None:
    if text := "; ".join(filter(None, problems)):
        raise EpcrossError(text)


def _too_little_shm(wanted_bytes: int, ep_size: int, what: str) -> str:
    free = free_shm_bytes()
    if free is None or wanted_bytes <= free:
        return ""
    lower = "lower max_tokens_per_rank or ep_size" if what == "sweep" else "lower ep_size"
    return (
        f"/dev/shm has {free} bytes free and EP {ep_size} of this {what} needs {wanted_bytes}: {lower}, or enlarge it "
        "(docker run --shm-size, mount -o remount,size=)"
    )


def _too_little_memory(size: int, ep_size: int) -> str:
    free = free_memory_bytes()
    if free is None or size * WORKER_BYTES <= free:
        return ""
    return (
        f"this machine has {free} bytes of memory free and the {size} processes of EP {ep_size} take at least "
        f"{size * WORKER_BYTES}: lower ep_size"
    )


def _too_large_inputs(point: Point, timing: Timing) -> str:
    free, wanted = free_memory_bytes(), inputs_bytes(point, timing)
    if free is None or wanted <= free:
        return ""
    return (
        f"this machine has {free} bytes of memory free and the inputs of EP {point.ep_size} alone take {wanted} "
        f"(timing.sets={timing.sets} x {sum(point.tokens)} tokens of hidden={point.model.hidden}, "
        f"top_k={point.model.top_k}): lower tokens_per_rank, or the others"
    )


def _too_few_files(size: int, ep_size: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES + _FILES_OF_RANK * size
    if limit == resource.RLIM_INFINITY or wanted <= limit:
        return ""
    return (
        f"a process may open {limit} files here and EP {ep_size} needs {wanted}: lower ep_size, or ulimit -n {wanted}"
    )


def _largest_workspace_bytes(request: CheckRequest) -> int:
    """Of one rank in shared memory, over the cases; 0 where only the backend's own interpreter could tell."""
    if request.device.domain is not Domain.CPU:
        return 0
    names = {case.name for case in request.cases}
    try:
        backend = loader.load(request.config)
        shape = backend.contract_shape
        cases = suite(request.kind, request.ep_size, request.config.name, compute=request.compute, shape=shape)
        points = [case.point for case in cases if case.name in names]
        if loader.fatal_answer(request.config, points):
            return 0
        taken = [point for point in points if not answers.unsupported(backend, point)]
        return max((answers.workspace_bytes(backend, point) for point in taken), default=0)
    except answers.FAILURES:  # what is wrong with a backend is for its cases to tell
        return 0
