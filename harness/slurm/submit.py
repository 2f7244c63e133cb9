"""Hand a run to Slurm: check, submit each piece through submitit, remember the job ids in the run folder."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from epcross.harness.errors import ConfigError, EpcrossError, StoreError
from epcross.harness.planning.plan import Plan
from epcross.harness.planning.schema import Cluster
from epcross.harness.running.same_place import refuse_packed
from epcross.harness.running.session import CANCEL_FILE, Session, run_context
from epcross.harness.slurm import layout, script
from epcross.harness.slurm.layout import Layout, Piece
from epcross.harness.slurm.state import ALIVE, JobState, ask, queued
from epcross.harness.slurm.task import RankTask
from epcross.harness.slurm.variables import scrubbed
from epcross.harness.storing import environment as environment_facts
from epcross.harness.storing.run_directory import RunDirectory, create_run, make_folder, open_run
from epcross.harness.storing.run_owner import claim, release
from epcross.harness.storing.sealed import DamagedFile, read_sealed, seal, write_whole
from epcross.harness.storing.units import read_units, set_aside_damaged

JOBS_FILE = "jobs.json"
"""In the folder `slurm` of a run: every job that was submitted for it, in order."""

_NO_SEGMENT = (
    "--segment needs Slurm 23.11 or later and topology/block: elsewhere say cluster.segment=false and name nodes of "
    "one NVLink domain with cluster.nodelist."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """One Slurm job of a run."""

    piece: str
    job_id: str  # as Slurm writes it: 12, or 12_3 for a part of an array
    nodes: int
    ranks_per_node: int
    time_min: int
    submitted_at: str  # UTC, ISO 8601


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmWords:
    """What one submission asks for."""

    cluster: Cluster
    layout: Layout
    name: str
    time_min: int


def problems(plan: Plan) -> list[str]:
    """What keeps a plan from being run by Slurm, whichever machine submits it; sentences."""
    found = script.cluster_problems(plan.cluster)
    if plan.soak is not None:
        found.append("a soak runs on one host: leave out launcher=slurm")
    if not found:
        try:
            count = len(layout.pieces(plan))
        except ConfigError as error:
            return list(error.problems)
        if plan.cluster.max_jobs and count > plan.cluster.max_jobs:
            found.append(
                f"the sweep makes {count} jobs, and cluster={plan.cluster.name} takes cluster.max_jobs="
                f"{plan.cluster.max_jobs} of one user; name fewer EP sizes, or raise launcher.points_per_job"
            )
    return found


def start(plan: Plan, *, fail_fast: bool = False) -> tuple[RunDirectory, list[Submitted]]:
    """A new run of `plan`, submitted. Returns at once.

    Raises:
        EpcrossError: the plan cannot be run by Slurm, there is no Slurm here, or it refuses a job.
    """
    if found := problems(plan):
        raise ConfigError(found)
    need_slurm()
    facts = {**environment_facts.collect(), "submitted": "before any rank ran: this is the host that submitted the run"}
    run = create_run(plan.output_dir, plan.sweep, plan.to_json(), facts)
    try:
        session = Session(run=run, plan=plan, context=run_context(run, facts, run.allocation_id))
        done: set[tuple[str, int]] = set()
        for item in plan.impossible:
            session.give_up(item.point, item.status, item.reason, done)
        return run, _submit(run, plan, layout.pieces(plan), fail_fast)
    except EpcrossError:
        if not read_jobs(run):  # nobody will ever write there
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    finally:
        release(run.path)


def resume(path: Path, *, fail_fast: bool = False) -> tuple[RunDirectory, list[Submitted]]:
    """Submit again the pieces of a run that are not whole. Returns at once.

    Raises:
        EpcrossError: a job of the run is still in the queue, or as `start`.
    """
    run = open_run(path)
    plan = Plan.from_json(run.plan)
    refuse_packed(run)
    need_slurm()
    claim(path)  # before the queue is looked at: of two that resume, the second finds the jobs of the first
    try:
        alive = [f"{job_id} is {state.word}" for job_id, state in alive_jobs(run).items()]
        if alive:
            raise StoreError(
                f"cannot resume {path}: its job {'; '.join(alive)}. Wait for it (epcross status {path}) or end it "
                f"(epcross cancel {path})"
            )
        (path / CANCEL_FILE).unlink(missing_ok=True)  # it was meant for an earlier session
        for folder in (run.units, run.attempts, run.logs):
            make_folder(folder)
        set_aside_damaged(run)
        left = tuple(piece for piece in layout.pieces(plan) if not is_whole(piece, plan, _done(run)))
        return run, _submit(run, plan, left, fail_fast)
    finally:
        release(path)


def is_whole(piece: Piece, plan: Plan, done: set[tuple[str, int]]) -> bool:
    """Whether every unit of a piece is stored."""
    if not piece.job.points:  # a floor alone; it is measured again
        return False
    return all((point.point_id, launch) in done for point in piece.job.points for launch in range(plan.timing.launches))


def read_jobs(run: RunDirectory) -> list[Submitted]:
    """The jobs that were submitted for a run, the last of each piece, in order of the pieces.

    Raises:
        StoreError: the file is damaged.
    """
    path = run.path / script.FOLDER / JOBS_FILE
    if not path.exists():
        return []
    try:
        last = {entry["piece"]: Submitted(**entry) for entry in read_sealed(path)}
    except (DamagedFile, KeyError, TypeError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({error}); find the jobs with squeue --me, and restore it") from error
    return list(last.values())


def alive_jobs(run: RunDirectory) -> dict[str, JobState]:
    """The jobs of a run that Slurm will go on with, also those that nobody noted.

    Raises:
        EpcrossError: Slurm cannot be asked, or the notes are damaged.
    """
    states = ask([job.job_id for job in read_jobs(run)]) | queued(run.run_id)
    return {job_id: state for job_id, state in states.items() if state.word in ALIVE}


def job_label(run_id: str, parts: Sequence[Piece]) -> str:
    """The name of a job in the queue."""
    name = parts[0].name if len(parts) == 1 else parts[0].job.name
    return f"epcross-{name}-{run_id.rpartition('-')[2]}"


def need_slurm() -> None:
    """Raise `EpcrossError` if no job can be submitted from here."""
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise EpcrossError(
            f"{' and '.join(missing)} are not on PATH, so no job can be submitted from here. Log in to a host of the "
            "cluster, or measure on this one with launcher=local"
        )


def _submit(run: RunDirectory, plan: Plan, left: tuple[Piece, ...], fail_fast: bool) -> list[Submitted]:
    folder = run.path / script.FOLDER
    make_folder(run.path / "jobs")
    make_folder(folder)
    submitted: list[Submitted] = []
    for parts in layout.arrays(left, plan.cluster.max_array_size):
        tasks = [RankTask(run=str(run.path), piece=piece.name, fail_fast=fail_fast) for piece in parts]
        words = SlurmWords(
            cluster=plan.cluster,
            layout=parts[0].layout,
            name=job_label(run.run_id, parts),
            time_min=plan.cluster.time_min,
        )
        try:
            ids = submit_tasks(words, folder, tasks)
        except EpcrossError as error:
            if not submitted:
                raise
            ids = ", ".join(job.job_id for job in submitted)
            raise EpcrossError(
                f"{error} Submitted before it: {ids}, of the run {run.path}; epcross cancel {run.path} ends them"
            ) from error
        now = datetime.now(UTC).isoformat(timespec="seconds")
        submitted += [
            Submitted(
                piece=piece.name,
                job_id=job_id,
                nodes=piece.layout.nodes,
                ranks_per_node=piece.layout.ranks_per_node,
                time_min=plan.cluster.time_min,
                submitted_at=now,
            )
            for piece, job_id in zip(parts, ids, strict=True)
        ]
        _remember(run, submitted[-len(parts) :])
    return submitted


def submit_tasks(words: SlurmWords, folder: Path, tasks: Sequence[Callable[[], Any]]) -> list[str]:
    """Submit one job, or an array if there are several tasks; every rank of a job calls its task. Returns the job ids.

    Raises:
        EpcrossError: there is no Slurm here, or it refuses the job.
    """
    import submitit

    need_slurm()
    cluster = words.cluster
    try:
        with scrubbed():
            executor = submitit.SlurmExecutor(
                folder=folder, max_num_timeout=cluster.max_requeues, python=script.python_command(cluster)
            )
            executor.update_parameters(
                **{**script.parameters(cluster, words.layout, words.name, folder), "time": words.time_min}
            )
            if len(tasks) == 1:
                return [executor.submit(tasks[0]).job_id]
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
            return [job.job_id for job in jobs]
    except Exception as error:  # submitit has its own, and lets those of subprocess through
        raise EpcrossError(
            f"Slurm does not take the job {words.name}: {_reason(error)}. Correct cluster={cluster.name}"
            + (f"; {_NO_SEGMENT}" if cluster.segment and "segment" in _reason(error) else ".")
        ) from error


def _remember(run: RunDirectory, jobs: Sequence[Submitted]) -> None:
    path = run.path / script.FOLDER / JOBS_FILE
    known: list[Any] = read_sealed(path) if path.exists() else []
    write_whole(path, seal(json.loads(json.dumps([*known, *map(asdict, jobs)])), indent=1))


def _done(run: RunDirectory) -> set[tuple[str, int]]:
    return {(result.point_id, result.launch) for result in read_units(run)[0]}


def _reason(error: Exception) -> str:
    """What sbatch said, without the words around it."""
    lines = [line.strip() for line in str(error).splitlines() if "sbatch: error" in line or "error:" in line.lower()]
    words = "; ".join(lines) or " ".join(str(error).split()) or type(error).__name__
    return words.replace("sbatch: error: ", "")
