"""How far a Slurm run is: each piece judged from its files and from what Slurm says, or from its files alone."""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from epcross.harness.planning.plan import Plan
from epcross.harness.record import UnitResult
from epcross.harness.running.progress import Pace, ProgressReader
from epcross.harness.slurm.layout import Piece, pieces
from epcross.harness.slurm.state import ALIVE, GONE, PENDING, RUNNING, JobState, SlurmSilent, ask, queued
from epcross.harness.slurm.submit import Submitted, is_whole, read_jobs
from epcross.harness.storing.regular_file import open_regular
from epcross.harness.storing.run_directory import RunDirectory

_LOG_TAIL_BYTES = 8192
_SHOWN = 300  # characters of a line of a log
_COUNTS_TASKS = re.compile(r"srun: (error: .*: Exited with exit code|Terminating|Force Terminated|job )")

AFTER_LIMIT = timedelta(minutes=10)
"""From a job's time limit to when it must have ended: Slurm's checks, KillWait, and clocks that differ."""


class PieceState(StrEnum):
    """Where a piece stands."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"  # every unit is stored
    ENDED = "ended"  # and is not finished
    NOT_SUBMITTED = "not submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceView:
    """One piece of a run, for people."""

    piece: Piece
    job: Submitted | None
    state: PieceState
    slurm: str  # Slurm's word, and its reason
    starts: int
    done: int
    planned: int
    nodes: str
    pace: Pace
    why: str = ""  # how its last start ended, or what keeps it
    next_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """All pieces of a run, and why Slurm could not be asked, if so."""

    pieces: tuple[PieceView, ...]
    silent: str = ""

    @property
    def state(self) -> str:
        """One word for the run."""
        states = {view.state for view in self.pieces}
        if PieceState.RUNNING in states:
            return "running"
        if PieceState.PENDING in states:
            return "pending"
        return "finished" if states <= {PieceState.FINISHED} else "interrupted"


def view(run: RunDirectory, plan: Plan, results: list[UnitResult], now: datetime | None = None) -> RunView:
    """Every piece of a Slurm run as it stands now."""
    jobs = {job.piece: job for job in read_jobs(run)}
    planned = pieces(plan)
    silent, strays, states = "", "", {}
    try:
        states = ask([job.job_id for job in jobs.values()])
        if any(piece.name not in jobs for piece in planned):
            noted = {job.job_id for job in jobs.values()}
            found = {job_id: state for job_id, state in queued(run.run_id).items() if job_id not in noted}
            strays = ", ".join(f"{job_id} ({state.word})" for job_id, state in found.items() if state.word in ALIVE)
    except SlurmSilent as error:
        silent = str(error)
    done = {(result.point_id, result.launch) for result in results}
    now = now or datetime.now(UTC)
    return RunView(
        pieces=tuple(
            _piece_view(run, plan, piece, jobs.get(piece.name), states, strays, done, now) for piece in planned
        ),
        silent=silent,
    )


def _piece_view(
    run: RunDirectory,
    plan: Plan,
    piece: Piece,
    job: Submitted | None,
    states: dict[str, JobState],
    strays: str,
    done: set[tuple[str, int]],
    now: datetime,
) -> PieceView:
    notes = ProgressReader(run.path, piece.name).read()
    pace = Pace()
    for note in notes:
        pace.take(note)
    starts = [note for note in notes if note["event"] == "session"]
    last = next((note for note in reversed(notes) if note["event"] in ("end", "session")), None)
    ended = last if last is not None and last["event"] == "end" else None
    said = states.get(job.job_id) if job else None
    whole = is_whole(piece, plan, done) or (not piece.job.points and ended is not None and ended["end"] == "done")
    state, why, next_step = _judge(run, job, said, strays, ended, starts, whole, now)
    ids = {point.point_id for point in piece.job.points}
    return PieceView(
        piece=piece,
        job=job,
        state=state,
        slurm=""
        if said is None
        else f"{said.word} ({said.reason})"
        if said.reason and said.word in PENDING
        else said.word,
        starts=len(starts),
        done=sum(unit[0] in ids for unit in done),
        planned=len(ids) * plan.timing.launches,
        nodes=(said.nodes if said else "") or (" ".join(starts[-1].get("nodes", ())) if starts else ""),
        pace=pace,
        why=why,
        next_step=next_step,
    )


def _last_line(log: Path) -> str:
    """Of what a start said that left no word in the notes; empty if nothing."""
    try:
        with os.fdopen(open_regular(log, os.O_RDONLY), "rb") as file:
            file.seek(-min(_LOG_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    written = [words for line in lines if (words := " ".join(line.split()))]
    # srun only counts the tasks that ended; the line before says why
    telling = [line for line in written if not _COUNTS_TASKS.match(line)]
    return (telling or written or [""])[-1][:_SHOWN]


def _judge(
    run: RunDirectory,
    job: Submitted | None,
    said: JobState | None,
    strays: str,
    ended: dict[str, Any] | None,
    starts: list[dict[str, Any]],
    whole: bool,
    now: datetime,
) -> tuple[PieceState, str, str]:
    """State, why, and what to do next."""
    resume = f"epcross run --resume {run.path}"
    if whole:
        return PieceState.FINISHED, "", ""
    if job is None:
        if strays:
            why = f"its submission was cut short, and of this run there is job {strays} that was not noted"
            return PieceState.NOT_SUBMITTED, why, f"wait for it, or epcross cancel {run.path}; then {resume}"
        return PieceState.NOT_SUBMITTED, "", resume
    log_path = run.path / "slurm" / f"{job.job_id}_0_log.out"
    log = f"its log is {log_path}" + (f", which ends with: {words}" if (words := _last_line(log_path)) else "")
    why = (ended["reason"] or f"it ended: {ended['end']}") if ended else ""
    if said is None:  # Slurm is silent: judge by the files and our own deadline
        if ended is not None:
            return PieceState.ENDED, why, resume
        if not starts:
            return (
                PieceState.PENDING,
                "Slurm cannot be asked, and no rank has started yet",
                "ask again from a login host",
            )
        deadline = datetime.fromisoformat(starts[-1]["time"]) + timedelta(minutes=job.time_min) + AFTER_LIMIT
        if now < deadline:
            return PieceState.RUNNING, f"by its files; Slurm cannot be asked. It must end by {deadline:%H:%M} UTC", ""
        return PieceState.ENDED, f"its time was over at {deadline:%Y-%m-%d %H:%M} UTC", resume
    if said.word in PENDING:
        return PieceState.PENDING, said.reason, said.hint
    if said.word in RUNNING:
        return PieceState.RUNNING, "" if starts else f"its ranks have not met yet; {log}", ""
    if said.word == GONE:
        return (
            PieceState.ENDED,
            why or f"Slurm no longer knows job {job.job_id}, and its ranks left no word; {log}",
            resume,
        )
    return PieceState.ENDED, f"{said.word}" + (f": {why}" if why else f"; {log}"), resume
