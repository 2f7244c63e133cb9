"""The way from statements to verdicts: doctor, plan, measure or submit; and later, collect."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from epcross.harness.analysis.unmeasured import why_unmeasured
from epcross.harness.commands import console, warnings_as_lines
from epcross.harness.commands.plan import duration
from epcross.harness.errors import NOTHING_SHOWN, ConfigError, EpcrossError
from epcross.harness.planning.build import build
from epcross.harness.planning.estimate import needs
from epcross.harness.planning.plan import SLURM, Plan
from epcross.harness.reproduction.statements import REHEARSAL, Task, newest_runs, tasks_for
from epcross.harness.reproduction.verdicts import judge_runs, table
from epcross.harness.storing.run_directory import RunDirectory
from epcross.harness.storing.run_owner import owner_of
from epcross.harness.storing.units import missing_rows, read_units

REHEARSAL_LIMIT_S = 300.0
REHEARSAL_FOLDER = Path("results/rehearsals")
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for."""

    names: tuple[str, ...]
    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...] = ()
    rehearse: bool = False
    plan_only: bool = False
    doctor: bool = True
    as_json: bool = False

    def words(self, sweep: str) -> list[str]:
        """The words of the plan for one sweep; what the user says comes before what we would."""
        given = {word.partition("=")[0] for word in self.overrides}
        added = [f"sweep={sweep}"]
        cluster = [word.partition("=")[2] for word in self.overrides if word.startswith("cluster=")]
        if cluster and cluster[0] != "local" and "launcher" not in given:
            added.append(f"launcher={SLURM}")
        if self.rehearse:
            added += [word for word in REHEARSAL if word.partition("=")[0] not in given]
            added += [] if "output_dir" in given else [f"output_dir={REHEARSAL_FOLDER}"]
        return [*added, *self.overrides]


def walk(request: Request, *, collect: bool) -> int:
    """Go the whole way, or only its last part. Returns the exit code.

    Raises:
        EpcrossError: a statement is unknown, the machine is not fit, or a job is refused.
    """
    if any(word.startswith("sweep=") for word in request.overrides):
        raise ConfigError("a statement brings its sweep; leave out sweep=, or use epcross run")
    tasks = tasks_for(request.names)
    if collect:
        return _collect(request, tasks)
    plans = _plans(request, tasks)
    if request.doctor and not request.plan_only and not _fit(request, plans):
        return 1
    shown = _show(request, plans)
    if request.plan_only:
        if request.as_json:
            click.echo(json.dumps({"sweeps": shown, "gpu_hours": sum(entry["gpu_hours"] for entry in shown.values())}))
        return 0
    runs = [_measure(plan, request) for plan in plans.values()]
    folder = next(iter(plans.values())).output_dir
    if not request.rehearse:
        if any(plan.launcher.name == SLURM for plan in plans.values()):
            again = " ".join(["epcross reproduce", *request.names, "--collect", f"output_dir={folder}"])
            _say(request, f"When the jobs have ended: {again}")
            if request.as_json:
                click.echo(json.dumps({"runs": {run.sweep: str(run.path) for run in runs}}))
            return 0
    elif any(plan.launcher.name == SLURM for plan in plans.values()):
        _await(runs)
    return _collect(request, tasks, folder)


def _plans(request: Request, tasks: Sequence[Task]) -> dict[str, Plan]:
    """The plan of each task's sweep. Sweeps about backends that nobody has are left out, if others are there."""
    plans: dict[str, Plan] = {}
    problems: list[str] = []
    for task in tasks:
        try:
            plans[task.sweep] = build(request.words(task.sweep), request.config_dirs)
        except ConfigError as error:
            problems += [f"{task.sweep}: {problem}" for problem in error.problems]
            continue
        if plans[task.sweep].launcher.name == SLURM:
            from epcross.harness.slurm.submit import problems as slurm_problems

            problems += [f"{task.sweep}: {problem}" for problem in slurm_problems(plans[task.sweep])]
    if problems:
        raise ConfigError(problems)
    return plans


def _fit(request: Request, plans: dict[str, Plan]) -> bool:
    """Whether the doctor lets the largest sweep through."""
    from epcross.harness.doctor.examination import examine_request
    from epcross.harness.doctor.view import document, is_ready, show

    with_jobs = {sweep: plan for sweep, plan in plans.items() if plan.jobs}
    if not with_jobs:
        _say(request, "No point of these statements can run here; the plan says why:")
        return True
    largest = max(with_jobs, key=lambda sweep: max(job.ep_size for job in with_jobs[sweep].jobs))
    words = request.words(largest)
    facts, found = examine_request(words, request.config_dirs, None, Path("results/doctor"), 1800.0)
    show(facts, found, console(stderr=request.as_json))
    if request.as_json and not is_ready(found):
        click.echo(json.dumps(document(facts, found)))
    return is_ready(found)


def _show(request: Request, plans: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    """Say what every sweep would take; the same for machines."""
    total = 0.0
    shown: dict[str, dict[str, Any]] = {}
    for sweep, plan in plans.items():
        entry: dict[str, Any] = {"points": len(plan.points), "impossible": len(plan.impossible), "gpu_hours": 0.0}
        shown[sweep] = entry
        count = f"{len(plan.points)} points, {len(plan.impossible)} of them impossible here"
        if plan.launcher.name == SLURM:
            from epcross.harness.slurm.layout import pieces
            from epcross.harness.slurm.plan_view import cost_of, total_line

            costs = {piece.name: cost_of(piece, plan) for piece in pieces(plan)}
            entry["gpu_hours"] = sum(cost.gpu_hours for cost in costs.values())
            entry["jobs"] = {name: {"time_s": cost.time_s, "gpu_hours": cost.gpu_hours} for name, cost in costs.items()}
            total += entry["gpu_hours"]
            _say(request, f"{sweep}: {count}; {total_line(plan, costs)}")
        else:
            entry["time_s"] = sum(need.time_s for need in needs(plan))
            _say(request, f"{sweep}: {count}; about {duration(entry['time_s'])} on this host")
    if total:
        _say(request, f"In all {total:.3g} GPU-hours.")
    return shown


def _measure(plan: Plan, request: Request) -> RunDirectory:
    if plan.launcher.name == SLURM:
        from epcross.harness.slurm import submit

        run, jobs = submit.start(plan)
        ids = ", ".join(job.job_id for job in jobs) or "nothing to submit"
        _say(request, f"{plan.sweep}: jobs {ids}; epcross status {run.path}")
        return run
    from epcross.harness.running import session as sessions
    from epcross.harness.running.launch import End

    session = sessions.start(plan)
    _say(request, f"{plan.sweep}: measuring into {session.run.path}")
    end = session.execute()
    if end.end is not End.DONE:
        raise EpcrossError(
            f"{plan.sweep} ended early: {end.reason}. Go on with: epcross run --resume {session.run.path}"
        )
    return session.run


def _await(runs: Sequence[RunDirectory]) -> None:
    """Until the jobs of a rehearsal have ended, within its limit."""
    from epcross.harness.slurm.follow import view

    deadline = time.monotonic() + REHEARSAL_LIMIT_S
    for run in runs:
        plan = Plan.from_json(run.plan)
        while (seen := view(run, plan, read_units(run)[0])).state in ("pending", "running"):
            if time.monotonic() > deadline:
                waits = "; ".join(f"{p.piece.name} is {p.state} {p.why}".strip() for p in seen.pieces)
                raise EpcrossError(
                    f"the rehearsal is not over after {REHEARSAL_LIMIT_S:g} s ({waits}); see epcross status {run.path}"
                )
            time.sleep(POLL_S)


def _collect(request: Request, tasks: Sequence[Task], folder: Path | None = None) -> int:
    """Judge the statements by the newest runs of their sweeps."""
    if folder is None:
        named = [word.partition("=")[2] for word in request.overrides if word.startswith("output_dir=")]
        folder = Path(named[0]) if named else REHEARSAL_FOLDER if request.rehearse else Path("results/runs")
    folder = folder.absolute()
    runs = newest_runs(tasks, folder)
    if not runs:
        sweeps = ", ".join(task.sweep for task in tasks)
        raise ConfigError(
            f"{folder} has no run of {sweeps}; measure first: epcross reproduce {' '.join(request.names)}".rstrip()
            + ", or name the folder of the runs: output_dir=DIR"
        )
    states = [_state(run) for run in runs.values()]
    with warnings_as_lines():
        rows, note, code = judge_runs(tasks, [run.path for run in runs.values()])
    if request.rehearse:  # which judges the path, and has not walked it where nothing was measured
        code = NOTHING_SHOWN if all(state["unmeasured"] for state in states) else 0
    if request.as_json:
        document: dict[str, Any] = {"runs": states, "verdicts": [row.to_json() for row in rows], "note": note}
        click.echo(json.dumps(document))
        return code
    for state in states:
        _say(request, f"{state['sweep']}: {state['words']}")
    console().print(table(rows))
    for row in rows:
        if row.reason:
            _say(request, f"{row.claim} ({row.way}): {row.reason}")
    _say(request, note)
    if request.rehearse:
        _say(request, "A rehearsal walks the path; rows of domain cpu say nothing about statements on NVLink.")
    return code


def _state(run: RunDirectory) -> dict[str, Any]:
    plan = Plan.from_json(run.plan)
    units, _ = read_units(run)
    missing = len(missing_rows(units, plan.points, plan.timing))
    rows = [row for unit in units for row in unit.records]
    statuses = Counter(str(row.status) for row in rows)
    unmeasured = None if missing else why_unmeasured(rows)
    words = ", ".join(f"{count} {status}" for status, count in statuses.items()) or "no rows yet"
    if missing:
        words += f", {missing} rows missing" + (f", in use by {owner}" if (owner := owner_of(run.path)) else "")
    if unmeasured:
        words += f"; {unmeasured}"
    return {
        "sweep": run.sweep,
        "path": str(run.path),
        "missing_rows": missing,
        "unmeasured": unmeasured,
        "words": f"{words}; {run.path}",
    }


def _say(request: Request, text: str) -> None:
    console(stderr=request.as_json).print(Text(text), soft_wrap=True)
