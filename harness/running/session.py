"""One session of a run: from a plan and a run folder to stored rows. A resumed run has several."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.planning.plan import Job as PlannedJob
from epcross.harness.planning.plan import Plan
from epcross.harness.point import Point
from epcross.harness.record import Record, UnitResult
from epcross.harness.running.gpu_lock import GpuLocks, gpus_of_plan
from epcross.harness.running.job import FLOOR, GPU_FLOOR, MEASURE, SOAK, Job
from epcross.harness.running.launch import End, JobEnd, run_job
from epcross.harness.running.mps import MpsRefused, mps_environment
from epcross.harness.running.prebuild import builds, prebuild
from epcross.harness.running.progress import ProgressLog, ProgressReader, attempts
from epcross.harness.running.room import check_room
from epcross.harness.running.same_place import (
    refuse_other_code_or_machine,
    refuse_other_units,
    refuse_packed,
    settle_gpus,
)
from epcross.harness.running.schedule import not_again, turns
from epcross.harness.running.time_budget import TimeBudget
from epcross.harness.storing import environment as environment_facts
from epcross.harness.storing.provenance import git_state, machine_hash, measure_hash, sources_of
from epcross.harness.storing.rows import RunContext, failed_records
from epcross.harness.storing.run_directory import RunDirectory, create_run, make_folder, open_run, read_floor
from epcross.harness.storing.run_owner import claim, release
from epcross.harness.storing.units import done_units, read_units, set_aside_damaged, write_unit
from epcross.harness.terms import Domain, Scope, Sharing, Stage, Status
from epcross.kernels.shm.segment import remove_stale

CANCEL_FILE = "cancel"
"""Its presence in the run folder asks the owner of the run to end."""


@dataclass(slots=True, kw_only=True)
class Session:
    """A run that this process owns, with what its new rows have in common."""

    run: RunDirectory
    plan: Plan
    context: RunContext
    fail_fast: bool = False
    profile: str = ""
    measure: str = MEASURE
    floor: str = FLOOR
    notes: str = ""  # which file of notes
    stop_asked: Callable[[], str | None] = lambda: None
    tick: Callable[[], Any] = lambda: None
    locks: GpuLocks | None = None  # of the GPUs that are measured on; None where others hold them
    log: ProgressLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = ProgressLog(self.run.path, self.notes)

    def execute(self) -> JobEnd:
        """Measure what is not stored yet. Afterwards no process of the run lives, and another may resume it."""
        cancel = self.run.path / CANCEL_FILE
        remove_stale()  # segments of runs that were killed

        def stop_asked() -> str | None:
            return self.stop_asked() or (f"cancelled by {cancel}" if cancel.exists() else None)

        results, _ = read_units(self.run)
        self.log.note("session", units=len(self.plan.points) * self.plan.timing.launches, done=len(results))
        try:
            end = self._execute(results, stop_asked)
            self.log.note("end", end=end.end, reason=end.reason)
            return end
        finally:
            cancel.unlink(missing_ok=True)
            if self.locks is not None:
                self.locks.close()
            release(self.run.path)

    def _execute(self, results: list[UnitResult], stop_asked: Callable[[], str | None]) -> JobEnd:
        done = {(result.point_id, result.launch) for result in results}
        for item in self.plan.impossible:
            self.give_up(item.point, item.status, item.reason, done)
        built = builds(self.plan.points, self.plan.backends)
        left = [p for job in self.plan.jobs for p in job.points if self._is_left(p, done)]
        scratch = self.run.path / "jobs"
        make_folder(scratch)
        configs = dict(sorted(dict(built[p] for p in left).items()))
        if configs:
            self.log.note("prebuild", backends=sorted({p.backend for p in left}))
        unbuilt = prebuild(configs, scratch, self.run.logs, tick=self.tick, stop_asked=stop_asked)
        budget = self._budget(done)
        for planned in self.plan.jobs:
            for point in planned.points:
                if reason := unbuilt.get(built[point][0]):
                    self.give_up(point, Status.ERROR, reason, done, stage=Stage.START)
            if reason := stop_asked():
                return JobEnd(end=End.CANCELLED, reason=reason)
            job = self.job(planned, done, results)
            if job.turns:
                end = self._run(job, budget, done, stop_asked)
                if end.end is not End.DONE:
                    return end
        return JobEnd(end=End.DONE)

    def _run(
        self, job: Job, budget: TimeBudget | None, done: set[tuple[str, int]], stop_asked: Callable[[], str | None]
    ) -> JobEnd:
        """One job, within what its domain needs around it."""
        with contextlib.ExitStack() as around:
            if job.sharing is Sharing.PROCESSES:
                try:
                    job = replace(job, env=around.enter_context(mps_environment()))
                except MpsRefused as error:
                    for point in job.points.values():
                        self.give_up(point, Status.UNAVAILABLE, str(error), done)
                    return JobEnd(end=End.DONE)
            if budget is not None:
                return self._soak(job, budget, done, stop_asked)
            return run_job(job, tick=self.tick, stop_asked=stop_asked)

    def _soak(
        self, job: Job, budget: TimeBudget, done: set[tuple[str, int]], stop_asked: Callable[[], str | None]
    ) -> JobEnd:
        """Each process group of `job` for its share of the time; the cases for which there was none leave rows, too."""
        for turn in job.turns:
            end = run_job(budget.allot(replace(job, turns=(turn,))), tick=self.tick, stop_asked=stop_asked)
            if end.end is End.OUT_OF_TIME:
                done |= done_units(self.run)
                for point_id in turn.point_ids:
                    reason = f"not reached within the {budget.seconds:g} s of the soak; give it more, soak.seconds=N"
                    self.give_up(job.points[point_id], Status.SKIPPED, reason, done)
            elif end.end is not End.DONE:
                return end
        return JobEnd(end=End.DONE)

    def _budget(self, done: set[tuple[str, int]]) -> TimeBudget | None:
        """The time of a soak. It begins once its backends are built."""
        if self.plan.soak is None:
            return None
        tried = [point for job in self.plan.jobs for point in job.points]
        launches = range(self.plan.timing.launches)
        left = [(p.domain, p.ep_size) for p in tried for launch in launches if (p.point_id, launch) not in done]
        return TimeBudget(self.plan.soak.seconds, left)

    def job(self, planned: PlannedJob, done: set[tuple[str, int]], results: list[UnitResult]) -> Job:
        """What is left of a planned job, as its supervisors take it."""
        return Job(
            name=planned.name,
            run_dir=str(self.run.path),
            ep_size=planned.ep_size,
            domain=planned.domain,
            sharing=planned.sharing,
            timing=self.plan.timing,
            context=self.context,
            backends={backend: self.plan.backends[backend] for backend in planned.backends},
            points={point.point_id: point for point in planned.points},
            turns=turns(
                planned.points,
                self.plan.timing.launches,
                done=done,
                # the floor is that of one domain
                floor=self.plan.soak is None
                and planned.scope is Scope.SCALE_UP
                and not _measured(read_floor(self.run), planned.name),
            ),
            failed=_failed(results),
            attempts=attempts(ProgressReader(self.run.path, self.notes).read()),
            notes=self.notes,
            fail_fast=self.fail_fast,
            profile=self.profile,
            measure=self.measure if self.plan.soak is None else SOAK,
            floor=self.floor if planned.domain is Domain.CPU else GPU_FLOOR,
        )

    def _is_left(self, point: Point, done: set[tuple[str, int]]) -> bool:
        return any((point.point_id, launch) not in done for launch in range(self.plan.timing.launches))

    def give_up(
        self, point: Point, status: Status, reason: str, done: set[tuple[str, int]], stage: Stage | None = None
    ) -> None:
        """Rows without a process, for every launch that has none."""
        for launch in range(self.plan.timing.launches):
            unit = (point.point_id, launch)
            if unit in done:
                continue
            records = failed_records(point, self.plan.timing, launch, self.context, status, reason, failed_stage=stage)
            write_unit(self.run, UnitResult(point_id=unit[0], launch=launch, records=records))
            done.add(unit)
            self.log.note(
                "unit",
                point_id=unit[0],
                launch=launch,
                backend=point.backend,
                statuses={str(status): len(records)},
                wall_s=0.0,
                reason=reason if status is Status.ERROR else None,
                failed_rank=None,
                failed_stage=stage,
            )


def start(plan: Plan) -> Session:
    """A new run of `plan`.

    Raises:
        EpcrossError: memory or shared memory is too small for it, somebody else uses its GPUs, locks cannot be held, or
            the folder cannot be made.
    """
    check_room(plan)
    facts = environment_facts.collect()
    locks = GpuLocks(gpus_of_plan(plan, facts), f"a run of sweep={plan.sweep} that begins")
    try:
        run = create_run(
            plan.output_dir, plan.sweep, plan.to_json(), facts, allocation_id=environment_facts.allocation_id()
        )
    except BaseException:
        locks.close()
        raise
    locks.say(f"run {run.path}")
    return Session(run=run, plan=plan, context=run_context(run, facts, run.allocation_id), locks=locks)


def resume(path: Path) -> Session:
    """The run at `path` again: what is stored stays, the rest is measured.

    Raises:
        StoreError: it is no run, is damaged, belongs to a process that lives, or has rows that other code, another
            machine or other GPUs measured.
        GpuInUse: somebody else uses its GPUs.
        LockUnusable: locks cannot be held.
    """
    run = open_run(path)
    refuse_packed(run)
    plan = Plan.from_json(run.plan)
    try:
        claim(run.path)
    except OSError as error:
        raise StoreError(f"cannot resume {path}: {error.strerror}; make it writable") from error
    with contextlib.ExitStack() as undo:
        undo.callback(release, run.path)
        (run.path / CANCEL_FILE).unlink(missing_ok=True)  # it was meant for an earlier session
        for folder in (run.units, run.attempts, run.logs):
            make_folder(folder)
        check_room(plan)
        set_aside_damaged(run)
        facts = environment_facts.collect()
        sessions = sum(note["event"] == "session" for note in ProgressReader(run.path).read())
        # rows of another session share no allocation with the first ones, and say so
        allocation = environment_facts.allocation_id() or f"{run.run_id}+{sessions}"
        context = run_context(run, facts, allocation)
        results, _ = read_units(run)
        refuse_other_units(results, plan, run)
        refuse_other_code_or_machine(results, context, run.path)
        locks = undo.enter_context(GpuLocks(gpus_of_plan(plan, facts), f"run {run.path}"))
        settle_gpus(results, facts, run)
        undo.pop_all()
    return Session(run=run, plan=plan, context=context, locks=locks)


def run_context(run: RunDirectory, facts: dict[str, Any], allocation_id: str) -> RunContext:
    """What all rows of a session have in common. `facts` are of the machine that the ranks run on."""
    git = git_state()
    return RunContext(
        run_id=run.run_id,
        measure_hash=measure_hash(besides=sources_of(run.plan.get("backends", {}))),
        machine=machine_hash(environment_facts.machine_facts(facts)),
        allocation_id=allocation_id,
        git_sha=git.sha,
        git_dirty=git.dirty,
    )


def _measured(floor: Mapping[str, Any] | None, name: str) -> bool:
    return floor is not None and name in floor and "error" not in floor[name]


def _failed(results: list[UnitResult]) -> dict[str, str]:
    """Points that failed in a stored launch, and why they are not tried again."""
    found: dict[str, str] = {}
    for result in sorted(results, key=lambda result: result.launch):
        record: Record = result.records[0]
        if record.status in (Status.ERROR, Status.TIMEOUT):
            reason = not_again(record.launch, record.failed_rank, record.failed_stage, record.reason)
            found.setdefault(result.point_id, reason)
    return found
