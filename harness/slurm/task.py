"""What submitit runs on each rank of an allocation: find the other ranks, agree on what is left, run a supervisor.

Everything that a start needs to know is in the run folder, so a job that Slurm requeues, after a time limit, a
preemption or the loss of a node, simply starts again: units that are stored are kept, the one in flight is redone.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR2
from types import FrameType
from typing import Any

from epcross.harness.errors import EpcrossError, GroupError
from epcross.harness.running.group import StoreGroup
from epcross.harness.running.job import Job
from epcross.harness.running.launch import End, RankProcess
from epcross.harness.running.progress import ProgressLog
from epcross.harness.running.rendezvous import Address, new_token
from epcross.harness.running.rendezvous_server import StoreServer
from epcross.harness.running.seat import Seat
from epcross.harness.running.session import CANCEL_FILE
from epcross.harness.running.supervisor import EXIT_CANCELLED, EXIT_DONE, EXIT_FAIL_FAST, EXIT_PREEMPTED
from epcross.harness.slurm.start import Start, own_address, own_seat, seated, slurm_start

START_LIMIT_S = 900.0  # from the first task to the last: a node may have to fetch its container
PREBUILD_LIMIT_S = 1000.0
CANCEL_LIMIT_S = 10.0
LEAVE_S = 2.0
REQUEUE_LIMIT_S = 300.0  # a start that was told to end waits so long for its end
POLL_S = 0.5


@dataclass(slots=True, kw_only=True)
class RankTask:
    """One rank of one piece of a run; a plain value, since submitit pickles it."""

    run: str
    piece: str
    fail_fast: bool = False

    def __call__(self) -> str:
        """Take part until the piece is done; returns how it ended."""
        return take_part(self, slurm_start())

    def checkpoint(self) -> Any:
        """What submitit queues again when Slurm warns of the end: the same, since all state is in the run folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def take_part(task: RankTask, start: Start) -> str:
    """One rank from its first to its last moment.

    Raises:
        EpcrossError: the piece cannot go on; the reason is in its notes as well.
    """

    run = Path(task.run)
    log = ProgressLog(run, task.piece) if start.rank == 0 else None
    try:
        end = _meet_and_run(task, start, run)
    except Exception as error:
        if log:
            log.note("end", end=End.FAILED, reason=str(error), job_id=start.job_id, restart=start.restart)
        raise
    if log:
        log.note("end", end=end, reason="", job_id=start.job_id, restart=start.restart)
    return str(end)


def _meet_and_run(task: RankTask, start: Start, run: Path) -> End:
    from epcross.harness.slurm.allocation import Allocation  # reads results, hence numpy

    with contextlib.ExitStack() as stack:
        address = _meeting(stack, start, run / "jobs" / f"{task.piece}-{start.name}.meeting")
        group = stack.enter_context(
            StoreGroup(
                address,
                scope="tasks",
                rank=start.rank,
                size=start.size,
                shared_name="tasks",
                timeout_s=START_LIMIT_S,
            )
        )
        seats = seated(_gathered(group, own_seat(start).to_json()))
        allocation = (
            Allocation(run, task.piece, start, seats, listen=address.host, fail_fast=task.fail_fast)
            if start.rank == 0
            else None
        )
        cancel = run / CANCEL_FILE
        with told_to_end() as told:

            def stop_asked() -> str | None:
                return told() or ("cancelled" if cancel.exists() else None)

            job_file, stopped = _agree(stack, group, start, seats, allocation, stop_asked)
        if stopped:
            if not cancel.exists():
                _await_the_end(cancel)
            return End.CANCELLED
        return End.DONE if job_file is None else _supervise(run, start, Path(job_file))


def _meeting(stack: contextlib.ExitStack, start: Start, place: Path) -> Address:
    """Where the ranks meet: rank 0 says it, or says why there is no such place, lest the others wait for it."""
    failure = place.with_suffix(".failed")
    if start.rank == 0:
        try:
            server = stack.enter_context(StoreServer(token=new_token(), host=own_address(start)))
        except EpcrossError as error:
            failure.write_text(str(error))
            raise
        server.address.publish(place)
        return server.address
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return Address.discover(place, min(1.0, START_LIMIT_S))
        except GroupError:
            if failure.exists():
                raise EpcrossError(failure.read_text()) from None
            if time.monotonic() > deadline:
                raise


@contextlib.contextmanager
def told_to_end() -> Iterator[Callable[[], str | None]]:
    """Tells which signal of Slurm's has come, None until then; submitit's own handlers go on as before."""
    came: list[str] = []

    def noting(before: Any) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            came.append(signal.Signals(number).name)
            if callable(before):
                before(number, frame)

        return note

    before = {number: signal.getsignal(number) for number in (SIGTERM, SIGUSR2)}
    for number, handler in before.items():
        signal.signal(number, noting(handler))
    try:
        yield lambda: f"told to end by {came[0]}" if came else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agree(
    stack: contextlib.ExitStack,
    group: StoreGroup,
    start: Start,
    seats: Sequence[Seat],
    allocation: Any,
    stop_asked: Callable[[], str | None],
) -> tuple[str | None, str | None]:
    """The file of the job that all ranks run, None if nothing is left; and why to end instead, if so.

    Compilers run once on each node. Slurm signals them as it does the ranks: of a start that is told to end, what they
    failed at is no result. GPUs stay locked until `stack` is left.
    """
    from epcross.harness.slurm.allocation import lock_node, prepare_node

    orders = _told(group, (lambda: allocation.orders()) if allocation else None)
    leads = seats[start.rank].local_rank == 0
    problem, unbuilt = None, {}
    if leads:
        try:
            stack.enter_context(lock_node(orders, start, seats[start.rank]))
            problem, unbuilt = prepare_node(orders, start.node, stop_asked)
        except EpcrossError as error:  # told to all, below: the others wait for this answer
            problem = f"{start.node}: {error}"
    answer = {"problem": problem, "unbuilt": unbuilt, "stopped": stop_asked()}
    answers = _gathered(group, answer, PREBUILD_LIMIT_S)
    if stopped := next((answer["stopped"] for answer in answers if answer["stopped"]), None):
        return None, stopped
    problems = list(dict.fromkeys(answer["problem"] for answer in answers if answer["problem"]))
    if problems:
        raise EpcrossError("; ".join(problems))
    failures = {name: reason for answer in answers for name, reason in answer["unbuilt"].items()}
    return _told(group, (lambda: allocation.job_file(failures)) if allocation else None), None


def _supervise(run: Path, start: Start, job_file: Path) -> End:
    """Run this rank's supervisor to its end."""
    job = Job.read(job_file)
    cancel = run / CANCEL_FILE
    process = RankProcess(job, job_file, start.rank)
    kill_at = float("inf")
    try:
        while process.alive and time.monotonic() < kill_at:
            process.wait(POLL_S)
            if start.rank == 0 and kill_at == float("inf") and cancel.exists():
                process.signal(SIGINT)  # ends it on all ranks, in order
                kill_at = time.monotonic() + CANCEL_LIMIT_S
    finally:
        if process.alive:  # submitit leaves here once it has queued the job again; the supervisor has a word to note
            process.wait(LEAVE_S)
        process.end()
    match process.code:
        case code if code == EXIT_DONE:
            return End.DONE
        case code if code == EXIT_FAIL_FAST:
            return End.FAIL_FAST
        case code if code == EXIT_CANCELLED or kill_at < float("inf"):
            return End.CANCELLED
        case code if code in (EXIT_PREEMPTED, -SIGTERM, -SIGUSR2):  # a signal may find it after its handlers are gone
            _await_the_end(cancel)
            return End.CANCELLED
    raise EpcrossError(process.last_words())


def _await_the_end(cancel: Path) -> None:
    """Slurm has said that it ends this start. To end first would be to end the job, and Slurm would not requeue it."""
    deadline = time.monotonic() + REQUEUE_LIMIT_S
    while time.monotonic() < deadline:
        if cancel.exists():
            return
        time.sleep(POLL_S)
    raise EpcrossError(f"told to end by a signal, and nobody ended or requeued the job within {REQUEUE_LIMIT_S:g} s")


def _gathered(group: StoreGroup, value: Any, timeout_s: float | None = None) -> list[Any]:
    """Every rank's value, in rank order."""
    return [json.loads(data) for data in group.all_gather(json.dumps(value).encode(), timeout_s)]


def _told(group: StoreGroup, make: Any) -> Any:
    """What rank 0 makes, on all ranks; what keeps it from making it ends all of them with the same words."""
    message: dict[str, Any] = {}
    if make is not None:
        try:
            message = {"value": make()}
        except EpcrossError as error:
            message = {"error": str(error)}
    message = _gathered(group, message)[0]
    if "error" in message:
        raise EpcrossError(message["error"])
    return message["value"]
