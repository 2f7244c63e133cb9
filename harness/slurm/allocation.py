"""Rank 0's part of a start: what the run folder says is left, and the job that all supervisors take from it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from epcross.harness.errors import EpcrossError, StoreError
from epcross.harness.planning.plan import Plan
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.record import UnitResult
from epcross.harness.running.gpu_lock import GpuLocks, gpus_here, gpus_of_ranks
from epcross.harness.running.prebuild import builds, prebuild
from epcross.harness.running.progress import ProgressReader, attempts
from epcross.harness.running.room import check_room
from epcross.harness.running.same_place import refuse_other_code_or_machine
from epcross.harness.running.seat import Seat, domains, ranks_in_words
from epcross.harness.running.session import Session, run_context
from epcross.harness.slurm.layout import Piece, narrowed, pieces
from epcross.harness.slurm.start import Start
from epcross.harness.storing import environment as environment_facts
from epcross.harness.storing.run_directory import open_run, replace_environment
from epcross.harness.storing.units import read_units
from epcross.harness.terms import Domain, Scope, Stage, Status
from epcross.kernels.shm.segment import remove_stale

TOLD_LATE_S = 2.0
"""Compilers that Slurm ends fail at once, perhaps before their rank is told; so long it is asked whether it was."""

MOST_STARTS = 5
"""Starts of one unit that an allocation may cut short before it is given up: it may be what ends the allocation."""


POLL_S = 0.1


class Allocation:
    """One start of one piece, as rank 0 sees it."""

    def __init__(
        self, run: Path, piece: str, start: Start, seats: Sequence[Seat], *, listen: str, fail_fast: bool
    ) -> None:
        self._start, self._seats, self._listen = start, tuple(seats), listen
        self._run = open_run(run)
        plan = Plan.from_json(self._run.plan)
        self._piece = find_piece(plan, piece)
        facts = environment_facts.collect()
        facts["slurm"] = {
            "job_id": start.job_id,
            "restart": start.restart,
            "piece": piece,
            "seats": [seat.to_json() for seat in seats],
        }
        allocation = f"slurm-{start.job_id}" + (f"+{start.restart}" if start.restart else "")
        self._session = Session(
            run=self._run,
            plan=narrowed(plan, self._piece),
            context=run_context(self._run, facts, allocation),
            fail_fast=fail_fast,
            notes=piece,
        )
        self._facts = facts
        self._builds = builds(self._piece.job.points, plan.backends)
        self._results: list[UnitResult] = []

    def orders(self) -> dict[str, Any]:
        """What each node has to prepare.

        Raises:
            EpcrossError: the seats are not those that were planned, or the piece cannot be resumed here.
        """
        if problems := seat_problems(self._seats, self._piece):
            raise EpcrossError("; ".join(problems))
        mine = {point.point_id for point in self._piece.job.points}
        self._results = [result for result in read_units(self._run)[0] if result.point_id in mine]
        refuse_other_code_or_machine(self._results, self._session.context, self._run.path)
        replace_environment(self._run, self._facts)
        self._session.log.note(
            "session",
            units=len(mine) * self._session.plan.timing.launches,
            done=len(self._results),
            job_id=self._start.job_id,
            restart=self._start.restart,
            nodes=list(dict.fromkeys(seat.node for seat in self._seats)),
        )
        done = self._done()
        launches = range(self._session.plan.timing.launches)
        left = [p for p in self._piece.job.points if any((p.point_id, n) not in done for n in launches)]
        if left:
            self._session.log.note("prebuild", backends=sorted({p.backend for p in left}))
        configs = {name: config.to_json() for name, config in (self._builds[p] for p in left)}
        return {
            "run": str(self._run.path),
            "piece": self._piece.name,
            "configs": dict(sorted(configs.items())),
        }

    def job_file(self, unbuilt: Mapping[str, str]) -> str | None:
        """The file of what is left to measure; None if nothing is."""
        done = self._done()
        refusal = domain_refusal(self._seats, self._piece)
        for point in self._piece.job.points:
            if refusal:
                self._session.give_up(point, Status.UNAVAILABLE, refusal, done)
            elif reason := unbuilt.get(self._builds[point][0]):
                self._session.give_up(point, Status.ERROR, reason, done, stage=Stage.START)
        self._give_up_what_never_ends(done)
        job = self._session.job(self._piece.job, done, self._results)
        if not job.turns:
            return None
        job = replace(
            job, name=self._piece.name, floor_name=job.name, seats=self._seats, listen=self._listen, in_batch=True
        )
        return str(job.write(self._start.name))

    def _done(self) -> set[tuple[str, int]]:
        return {(result.point_id, result.launch) for result in self._results}

    def _give_up_what_never_ends(self, done: set[tuple[str, int]]) -> None:
        """A unit that is longer than the time limit, or takes its node down, would be started for ever."""
        points = {point.point_id: point for point in self._piece.job.points}
        for key, count in attempts(ProgressReader(self._run.path, self._piece.name).read()).items():
            point_id, _, launch = key.rpartition(".")
            if count >= MOST_STARTS and (point_id, int(launch)) not in done and point_id in points:
                reason = f"started {count} times, and each time the job ended before it did; see {self._run.logs}"
                self._session.give_up(points[point_id], Status.ERROR, reason, done, stage=Stage.START)


def find_piece(plan: Plan, name: str) -> Piece:
    """The piece of that name.

    Raises:
        StoreError: the plan has none.
    """
    for piece in pieces(plan):
        if piece.name == name:
            return piece
    raise StoreError(f"the plan has no piece '{name}'; was plan.json changed?")


def seat_problems(seats: Sequence[Seat], piece: Piece) -> list[str]:
    """What is wrong with where Slurm put the ranks, as sentences."""
    planned, nodes = piece.layout, dict.fromkeys(seat.node for seat in seats)
    problems = []
    if len(seats) != planned.tasks:
        problems.append(f"Slurm started {len(seats)} tasks, and {planned.tasks} were planned")
    if len(nodes) != planned.nodes:
        problems.append(f"the ranks lie on {len(nodes)} nodes ({', '.join(nodes)}), and {planned.nodes} were planned")
    if piece.job.domain is Domain.CPU and piece.job.scope is Scope.SCALE_UP and len(nodes) > 1:
        problems.append("domain=cpu does not span nodes: its ranks share memory")
    if piece.job.domain is Domain.NVLINK:
        problems += [
            f"rank {seat.rank} on {seat.node} sees {len(seat.gpus)} GPU(s) (CUDA_VISIBLE_DEVICES="
            f"{','.join(seat.gpus)}), and {seat.local_size} ranks share the node: each must see its peers'. Ask "
            "for GPUs by node, without --gpus-per-task and --gpu-bind"
            for seat in seats
            if seat.gpus and len(seat.gpus) < seat.local_size
        ]
    return problems


def domain_refusal(seats: Sequence[Seat], piece: Piece) -> str | None:
    """Why the domains that the ranks lie in are not those that `scope` says; None if they are."""
    found = domains(seats)
    if piece.job.scope is Scope.SCALE_UP and len(found) > 1:
        where = "; ".join(f"ranks {ranks_in_words(ranks)} in {name}" for name, ranks in found.items())
        return (
            f"the ranks are spread over {len(found)} {piece.job.domain} domains ({where}); scope=scale_up needs one. "
            "Ask for nodes of one domain (cluster.segment, cluster.nodelist), or take scope=scale_out with a backend "
            "that spans domains"
        )
    if piece.job.scope is Scope.SCALE_OUT and len(found) == 1:
        return (
            f"all ranks are in one domain ({next(iter(found))}), so scope=scale_out would be wrong for these rows; "
            "ask for nodes of several domains (cluster.nodelist), or take scope=scale_up"
        )
    return None


def lock_node(orders: Mapping[str, Any], start: Start, seat: Seat) -> GpuLocks:
    """The locks of the GPUs that the ranks of this node use; once on each node.

    Raises:
        GpuInUse: somebody else uses one.
        LockUnusable: the node has no folder for locks.
    """
    run = open_run(Path(orders["run"]))
    domain = find_piece(Plan.from_json(run.plan), orders["piece"]).job.domain
    uuids = [] if domain is Domain.CPU else gpus_here(environment_facts.collect())
    return GpuLocks(gpus_of_ranks(domain, seat.local_size, uuids), f"run {run.path}, Slurm job {start.job_id}")


def prepare_node(
    orders: Mapping[str, Any], node: str, stop_asked: Callable[[], str | None] = lambda: None
) -> tuple[str | None, dict[str, str]]:
    """Once on each node: memory enough, nothing left of the dead, everything compiled.

    Args:
        stop_asked: why to end now; None to go on. What fails then says nothing of a backend.

    Returns:
        Why the node cannot be used, and for each backend that cannot be built, why.
    """
    remove_stale()
    run = open_run(Path(orders["run"]))
    plan = Plan.from_json(run.plan)
    try:
        check_room(narrowed(plan, find_piece(plan, orders["piece"])))
    except EpcrossError as error:
        return f"{node}: {error}", {}
    logs, scratch = run.logs / node, run.path / "jobs" / node
    for folder in (logs, scratch):
        folder.mkdir(parents=True, exist_ok=True)  # people tidy up
    configs = {name: BackendConfig.from_json(config) for name, config in orders["configs"].items()}
    failures = prebuild(configs, scratch, logs, stop_asked=stop_asked)
    deadline = time.monotonic() + TOLD_LATE_S
    while failures and stop_asked() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if stop_asked() is not None:
        return None, {}
    return None, {name: f"on {node}: {reason}" for name, reason in failures.items()}
