"""The command that made a run, and whether it would still plan what that run planned."""

import shlex
from dataclasses import asdict
from pathlib import Path

from epcross.harness.analysis.material import Run
from epcross.harness.errors import ConfigError
from epcross.harness.planning.build import planned_points
from epcross.harness.planning.config import resolve
from epcross.harness.planning.plan import Plan
from epcross.harness.report.document import Block, Code, Paragraph

_PLAN_FILE = "plan.json"


def the_same_again(run: Run) -> list[Block]:
    """The command; of a sweep that has changed since, how, and the commit whose sources plan the run's own points."""
    if not (changed := changes(run.plan)):
        return [Paragraph(text="The same again, on a machine of your own:"), Code(text=command(run.plan))]
    then = (
        f"Since then the sweep, or what it names, has changed: {changed}. What the run planned is kept in {_PLAN_FILE}."
    )
    commits = sorted({(row.git_sha, row.git_dirty) for row in run.records if row.git_sha})
    if len(commits) != 1:
        told = "rows are of several commits" if commits else "it was not run from a checkout"
        words = f"{then} No one commit can be named that plans the same, since {told}. The command was:"
        return [Paragraph(text=words), Code(text=command(run.plan))]
    ((sha, dirty),) = commits
    besides = f" They had uncommitted changes besides, so hold `epcross plan` against {_PLAN_FILE}." if dirty else ""
    words = f"{then} The same again, on a machine of your own, needs the sources of the run's commit.{besides}"
    return [Paragraph(text=words), Code(text=f"git checkout {sha}\n{command(run.plan)}")]


def command(plan: Plan) -> str:
    """The command line that made the run, without where it was to be stored."""
    folders = [part for folder in plan.config.get("config_dirs", []) for part in ("--config-dir", str(folder))]
    return shlex.join(["epcross", "run", *_words(plan), *folders])


def changes(plan: Plan) -> str:
    """In what the plan of the same command would differ today, in words; empty if in nothing that is measured."""
    try:
        config = resolve(_words(plan), [Path(folder) for folder in plan.config.get("config_dirs", [])])
        points, soak = planned_points(config)
    except ConfigError as error:
        return f"the command is refused now ({error.problems[0]})"
    told = []
    now, then = {point.point_id for point in points}, {point.point_id for point in plan.points}
    if now != then:
        told.append(f"the command would plan {len(now)} points, {len(now & then)} of the run's {len(then)} among them")
    theirs, own = asdict(config.timing), asdict(plan.timing)
    told += [f"timing.{name} is {theirs[name]}, and was {own[name]}" for name in own if theirs[name] != own[name]]
    if soak and plan.soak and soak.seconds != plan.soak.seconds:
        told.append(f"soak.seconds is {soak.seconds:g}, and was {plan.soak.seconds:g}")
    return "; ".join(told)


def _words(plan: Plan) -> list[str]:
    return [word for word in plan.config.get("overrides", []) if not word.startswith("output_dir=")]
