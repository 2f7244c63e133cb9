"""One rank's worker, from start to end: what it is told, and how it fares in a unit.

Imports no torch, CUDA, MPI or numpy, as its supervisor does.
"""

import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from epcross.harness.running import stuck
from epcross.harness.running.child import Child
from epcross.harness.running.job import Job, Turn, TurnKind
from epcross.harness.running.processes import remove_segments
from epcross.harness.running.rank_place import RankPlace, import_folder
from epcross.harness.running.rendezvous import Abort
from epcross.harness.running.stage_clock import StageClock
from epcross.harness.running.verdict import Ending, Outcome
from epcross.harness.running.watch import Aborted, Ended, Said, Watch
from epcross.harness.terms import Stage

OWN_END_S = 2.0  # for the reason of a worker whose connection is gone already
SILENCE_S = 1.0  # for a worker to say that it, too, waits in vain
LEAVE_S = 3.0


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A worker that has nothing more to do, and was told so."""

    child: Child
    shared_name: str
    until_s: float  # of the monotonic clock


class RankWorker:
    """The worker of one rank in one job; started by the first unit that finds none.

    The one before it may still be leaving: to give up a GPU takes a second, and to import torch another two. The new
    one comes near no GPU, and gets no unit, until that has ended.
    """

    def __init__(self, job: Job, rank: int, place: RankPlace, watch: Watch) -> None:
        self.job, self.rank, self.place, self.watch = job, rank, place, watch
        self.result: Any = None  # what it answered in the last unit
        self.stages = StageClock()  # of the last unit
        self._child: Child | None = None
        self._leaving: _Leaving | None = None
        self._scope = ""
        self._shared_name = ""
        self._generation = 0

    def forget(self) -> None:
        """Nothing has been tried in the unit that begins now."""
        self.result = None
        self.stages = StageClock()

    def attempt(self, turn: Turn, point_id: str) -> tuple[Outcome, bool]:
        """This rank's part of one unit, and whether its worker had become ready."""
        self.forget()
        ready = self._child is not None
        stage = Stage.START
        if not ready:
            try:
                self._start(turn)
            except OSError as error:
                python = self.job.backends[turn.backend].python if turn.backend else None
                reason = f"its interpreter {python or sys.executable} cannot be started: {error.strerror}"
                return self._failed(Ending.ERROR, stage, reason), ready
        child = self._child
        assert child is not None
        request = (
            {"floor": True}
            if turn.kind is TurnKind.FLOOR
            else {"unit": {"point": self.job.points[point_id].to_json(), "launch": turn.launch}}
        )
        limit_s = self.job.start_limit_s
        if ready:
            child.send(request)
            limit_s = self.job.timing.wall_limit_s
        deadline = time.monotonic() + limit_s
        while True:
            match self.watch.wait(deadline):
                case Said({"ready": _}):
                    ready = True
                    child.send(request)
                    limit_s = self.job.timing.wall_limit_s
                    deadline = time.monotonic() + limit_s
                case Said({"stage": word}):
                    stage = Stage(word)
                    self.stages.enter(stage)
                case Said({"done": result}):
                    self.result = result
                    return Outcome(ending=Ending.OK, stage=stage), ready
                case Said({"unsupported": reason}):
                    return Outcome(ending=Ending.UNSUPPORTED, stage=stage, reason=reason), ready
                case Said({"failed": word, "reason": reason}):
                    return self._failed(Ending(word), stage, reason), ready
                case Ended():
                    return self._failed(Ending.ERROR, stage, child.how_it_ended()), ready
                case Aborted(abort):
                    outcome = self._aborted(abort, stage)
                    place = self._place(ready=ready) if abort.kind == Ending.WALL else ""
                    return replace(outcome, place=place), ready
                case None:
                    what = "wall limit" if ready else "limit for starting"
                    reason = f"not done within the {what} of {limit_s:g} s"
                    abort = self.watch.abort_group(self._scope, reason, None, Ending.WALL)
                    place = self._place(ready=ready)
                    return Outcome(ending=Ending.WALL, stage=stage, reason=reason, abort=abort, place=place), ready

    def _failed(self, ending: Ending, stage: Stage, reason: str) -> Outcome:
        """This rank's worker failed: tell the others' workers, unless it only followed another rank."""
        abort = self.watch.abort_group(self._scope, reason, self.rank, ending)
        return Outcome(ending=ending, stage=stage, reason=reason, abort=abort)

    def _aborted(self, abort: Abort, stage: Stage) -> Outcome:
        """The process group ended. Give a worker that may know why a moment to say so."""
        child = self._child
        assert child is not None
        patience_s = OWN_END_S if abort.rank == self.rank else SILENCE_S if abort.kind == Ending.WAIT else 0.0
        deadline = time.monotonic() + patience_s
        outcome = Outcome(ending=Ending.BYSTANDER, stage=stage, reason=abort.reason, abort=abort, answered=False)
        if abort.rank == self.rank:
            ending = Ending.WALL if abort.kind == "late" else Ending.ERROR
            outcome = replace(outcome, ending=ending)
            if ending is Ending.WALL:
                return outcome
        while True:
            match self.watch.wait(deadline):
                case Said({"stage": word}):
                    outcome = replace(outcome, stage=Stage(word))
                case Said({"failed": word, "reason": reason}):
                    return replace(outcome, ending=Ending(word), reason=reason, answered=True)
                case Ended():
                    return replace(outcome, ending=Ending.ERROR, reason=child.how_it_ended())
                case None:
                    return outcome
                case _:
                    pass

    def _place(self, *, ready: bool) -> str:
        """Where in the backend this rank's worker stands, if it can be asked: under a wrapper the signal would be that
        program's, and before it is ready its end."""
        child = self._child
        if child is None or not ready or self.job.profile:
            return ""
        stuck.ask([child.pid])
        return stuck.place(child.log)

    def discard(self) -> None:
        """Kill the worker, if there is one, and what it left in shared memory."""
        if self._child is not None:
            self.watch.detach()
            self._child.kill()
            self._child = None
            remove_segments(self._shared_name)

    def leave(self) -> None:
        """Let the worker end in good order; see `see_off`."""
        if self._child is not None:
            self.see_off()
            self.watch.detach()
            self._child.hang_up()
            self._leaving = _Leaving(self._child, self._shared_name, time.monotonic() + LEAVE_S)
            self._child = None

    def see_off(self) -> None:
        """Wait until the worker that leaves has ended, or end it when its time is over."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.child.make_sure(leaving.until_s - time.monotonic())
            remove_segments(leaving.shared_name)

    def close(self) -> None:
        """No worker lives afterwards."""
        self.discard()
        self.see_off()

    def _start(self, turn: Turn) -> None:
        self._generation += 1
        self._scope = f"group {self._generation}"
        # fixed width, so that no name begins with another; letters and digits alone survive every naming rule
        self._shared_name = f"{self.watch.address.token[:12]}g{self._generation:05d}"
        config = self.job.backends.get(turn.backend)
        if config is not None and turn.point_ids:  # whether it can be used may depend on its options, such as a file
            config = replace(config, options=dict(self.job.points[turn.point_ids[0]].options))
        floor = turn.kind is TurnKind.FLOOR
        name = "floor" if floor else f"{turn.backend}.launch{turn.launch}"
        log = Path(self.job.run_dir) / "logs" / f"{self.job.name}.{name}.rank{self.rank}.log"
        wrapper = [] if floor else self._wrapper(log)
        hello = {
            "address": asdict(self.watch.address),
            "another_leaves": self._leaving is not None,
            "backend": None if config is None else config.to_json(),
            "context": asdict(self.job.context),
            "core": self.place.core,
            "gpu": self.place.gpu,
            "flags": [str(flag) for flag in self.place.flags],
            "in_batch": self.job.in_batch,
            "rank": self.rank,
            "scope": self._scope,
            "shared_name": self._shared_name,
            "size": self.job.processes,
            "supervisor": 0 if wrapper else os.getpid(),
            "timing": asdict(self.job.timing),
            "work": self.job.floor if floor else self.job.measure,
        }
        self._child = Child(
            hello,
            python=config.python if config else None,
            env={**self.job.env, **(config.env if config else {})},
            log=log,
            imports=import_folder(self.job.folder) if config and config.python else None,
            wrapper=wrapper,
        )
        self.watch.attach(self._child, self._scope)
        if self._leaving is not None:
            self.see_off()
            self._child.send({"alone": True})

    def _wrapper(self, log: Path) -> list[str]:
        """The words that this rank's worker is started under."""
        filled = {"{rank}": str(self.rank), "{log}": str(log.with_suffix(".profile"))}
        words = shlex.split(self.job.profile)
        for mark, text in filled.items():
            words = [word.replace(mark, text) for word in words]
        return words
