"""One rank's supervisor: takes its workers through the turns of a job in step with the other ranks' supervisors.

Started by a launcher as `python -m epcross.harness.running.supervisor JOB_FILE RANK [PARENT]` on each rank; rank 0
hosts the store and writes rows. Imports no torch, CUDA, MPI or numpy: nothing a backend breaks can break it.

Each unit ends in a meeting at which every supervisor says how its worker fared. All judge the same outcomes, so all
agree on who failed first and on what comes next; nobody waits for a worker that will not come.
"""

import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from epcross.harness.errors import EpcrossError
from epcross.harness.running.core_watch import watch_cores
from epcross.harness.running.job import Job, Turn, TurnKind
from epcross.harness.running.processes import adopt_orphans, die_with_parent
from epcross.harness.running.rank_place import RankPlace, place
from epcross.harness.running.rank_worker import RankWorker
from epcross.harness.running.recorder import Recorder
from epcross.harness.running.rendezvous import Address, new_token
from epcross.harness.running.rendezvous_server import StoreServer
from epcross.harness.running.schedule import not_again
from epcross.harness.running.verdict import Ending, Outcome, Verdict, judge
from epcross.harness.running.watch import (
    CANCELLED,
    FAIL_FAST,
    OUT_OF_TIME,
    PREEMPTED,
    Stopped,
    Watch,
)
from epcross.harness.terms import Flag, Status

MEET_MARGIN_S = 30.0  # supervisors of a unit finish within its limits and this
RENDEZVOUS_LIMIT_S = 60.0
STARTS_IN_A_ROW = 2  # failed starts after which a turn is given up

EXIT_DONE, EXIT_ERROR, EXIT_LOST, EXIT_FAIL_FAST, EXIT_OUT_OF_TIME, EXIT_PREEMPTED, EXIT_CANCELLED = (
    0,
    1,
    3,
    4,
    5,
    6,
    130,
)
_EXITS = {
    CANCELLED: EXIT_CANCELLED,
    FAIL_FAST: EXIT_FAIL_FAST,
    OUT_OF_TIME: EXIT_OUT_OF_TIME,
    PREEMPTED: EXIT_PREEMPTED,
    "error": EXIT_ERROR,
}


class Supervisor:
    """The state of one rank in one job."""

    def __init__(self, job: Job, rank: int, address: Address, recorder: Recorder | None) -> None:
        self.job, self.rank, self.recorder = job, rank, recorder
        seat = job.seat(rank)
        self.place: RankPlace = place(seat.local_rank, seat.local_size, job.domain)
        if job.profile:
            self.place = replace(self.place, flags=(*self.place.flags, Flag.PROFILED))
        self.cores = watch_cores(seat, job.domain)
        self.watch = Watch(address, rank, in_batch=job.in_batch)
        self.failed = dict(job.failed)
        self.unavailable: dict[str, Verdict] = {}
        self.worker = RankWorker(job, rank, self.place, self.watch)
        self._meetings = 0
        self._never_ready = False  # whether the rank to blame for the last unit failed before it was ready

    def run(self) -> None:
        """All turns. Raises `Stopped`."""
        try:
            for turn in self.job.turns:
                self._run_turn(turn)
            self.worker.see_off()  # it may still need the store
            self._meet(b"")  # nobody leaves before all are done
        except EpcrossError as error:  # rows cannot be stored: measuring on would be for nothing
            # told before this rank leaves the store below: peers would take its leaving for the reason
            raise self.watch.stop_all("error", str(error)) from error
        finally:
            self.worker.close()
            self.cores.close()
            self.watch.close()

    def _run_turn(self, turn: Turn) -> None:
        if self.recorder:
            self.recorder.turn(turn)
        failed_starts = 0
        given_up: Verdict | None = self.unavailable.get(turn.backend)
        for point_id in turn.point_ids or ("",):
            if point_id in self.failed:
                if self.recorder:
                    self.recorder.skipped(turn, point_id, self.failed[point_id])
                continue
            if given_up is not None:
                self.worker.forget()  # nothing was tried
                self._record(turn, point_id, given_up, datetime.now(UTC), 0.0)
                if given_up.status is not Status.UNAVAILABLE:
                    self.failed[point_id] = not_again(turn.launch, given_up.rank, given_up.stage, given_up.reason)
                continue
            self._check_time()
            verdict = self._run_unit(turn, point_id)
            if verdict is not None and verdict.status in (Status.ERROR, Status.TIMEOUT):
                # every supervisor comes to the same verdict, so all skip the point in later launches
                self.failed[point_id] = not_again(turn.launch, verdict.rank, verdict.stage, verdict.reason)
            if verdict is None or verdict.status is Status.UNSUPPORTED:
                failed_starts = 0
            elif verdict.status is Status.UNAVAILABLE:
                given_up = self.unavailable[turn.backend] = verdict
            elif self._never_ready:
                failed_starts += 1
                if failed_starts == STARTS_IN_A_ROW:
                    reason = f"its workers failed to start {failed_starts} times in a row: {verdict.reason}"
                    given_up = replace(verdict, reason=reason)
            else:
                failed_starts = 0
        self.worker.leave()

    def _check_time(self) -> None:
        """End the job before a unit for which there is no time. Rank 0 decides, so that all stop at the same one."""
        stop_at_s = self.job.stop_at_s
        if self.recorder and stop_at_s is not None and time.monotonic() >= stop_at_s:
            raise self.watch.stop_all(OUT_OF_TIME, "its time is over")

    def _run_unit(self, turn: Turn, point_id: str) -> Verdict | None:
        begin, started_at = time.monotonic(), datetime.now(UTC)
        if self.recorder:
            self.recorder.start(turn, point_id)
        self.cores.begin()
        outcome, was_ready = self.worker.attempt(turn, point_id)
        if not self.cores.was_alone():
            outcome = replace(outcome, flags=(Flag.NOT_ALONE,))
        answers = self._meet(bytes([was_ready]) + outcome.encode())
        outcomes = [Outcome.decode(answer[1:]) for answer in answers]
        verdict = judge(outcomes)
        # a rank that was still starting when another failed in the unit is no failed start
        self._never_ready = verdict is not None and not answers[verdict.rank][0]
        if any(o.ending not in (Ending.OK, Ending.UNSUPPORTED) for o in outcomes):
            self.worker.discard()
        seen = {flag for outcome in outcomes for flag in outcome.flags}
        self._record(turn, point_id, verdict, started_at, time.monotonic() - begin, seen)
        return verdict

    def _meet(self, data: bytes) -> list[bytes]:
        self._meetings += 1
        limit_s = self.job.timing.wall_limit_s + self.job.start_limit_s + MEET_MARGIN_S
        return self.watch.meet(f"meeting {self._meetings}", self.job.processes, data, limit_s)

    def _record(
        self,
        turn: Turn,
        point_id: str,
        verdict: Verdict | None,
        started_at: datetime,
        wall_s: float,
        seen: Iterable[Flag] = (),
    ) -> None:
        if self.recorder is None:
            return
        if turn.kind is TurnKind.FLOOR:
            self.recorder.floor(self.worker.result, verdict)
            return
        stages_s = self.worker.stages.seconds()
        fine = self.recorder.unit(
            turn, point_id, self.worker.result, verdict, self.place.flags, started_at, wall_s, stages_s, seen
        )
        if self.job.fail_fast and not fine:
            raise self.watch.stop_all(FAIL_FAST, "stopped at the first failure, as --fail-fast asks")


def main(arguments: list[str]) -> int:
    """Run one rank of a job; the exit status says how it ended."""
    job_path, rank = Path(arguments[0]), int(arguments[1])
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the watch hears it: a scheduler may send it at any moment
    job = Job.read(job_path)
    if len(arguments) > 2:
        # in a batch job SIGTERM is the scheduler's word; the loss of a task has to be noticed as a loss
        die_with_parent(int(arguments[2]), signal.SIGKILL if job.in_batch else signal.SIGTERM)
    adopt_orphans()  # so that nothing a worker leaves behind escapes
    meeting_place = job_path.with_suffix(".address")
    server: StoreServer | None = None
    recorder: Recorder | None = None
    try:
        if rank == 0:
            recorder = Recorder(job)
            server = StoreServer(token=new_token(), host=job.listen)
            server.address.publish(meeting_place)
        address = Address.discover(meeting_place, RENDEZVOUS_LIMIT_S)
        Supervisor(job, rank, address, recorder).run()
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        if recorder:
            recorder.stopped(stopped.kind, str(stopped))
        return _EXITS.get(stopped.kind, EXIT_LOST)
    except EpcrossError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_ERROR
    finally:
        if server:
            server.close()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
