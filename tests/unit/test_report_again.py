"""A report gives the command that made a run, and says so where it would plan something else by now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import ENVIRONMENT, unit_of
from store_values import TIMING

from epcross.harness.analysis import material
from epcross.harness.analysis.material import Run
from epcross.harness.planning.build import build
from epcross.harness.report.again import changes, the_same_again
from epcross.harness.report.document import Code, Paragraph
from epcross.harness.storing.store import create_run, write_unit

SWEEP = """description: Two batches.
timing: smoke
grid: {{backend: shm_fence, model: tiny, tokens_per_rank: [{tokens}], regime: steady}}
"""
REPEATS = [f"timing.{name}={getattr(TIMING, name)}" for name in ("launches", "seeds", "chains")]
COMMAND = f"epcross run sweep=mine {' '.join(REPEATS)} --config-dir {{folder}}"


def write_sweep(folder: Path, tokens: str) -> None:
    (folder / "sweep").mkdir(parents=True, exist_ok=True)
    (folder / "sweep" / "mine.yaml").write_text(SWEEP.format(tokens=tokens))


def make(folder: Path, config: Path, commits: Sequence[Mapping[str, object]] = ({},)) -> Run:
    """A run of the sweep as it is, the points of these commits in turn."""
    plan = build(["sweep=mine", "output_dir=/somewhere", *REPEATS], [config])
    run = create_run(folder, "mine", plan.to_json(), ENVIRONMENT)
    for number, point in enumerate(plan.points):
        commit = commits[number % len(commits)]
        for launch in range(TIMING.launches):
            write_unit(run, unit_of(run, point, launch, lambda row, commit=commit: replace(row, **commit)))
    return material.load([run.path]).runs[0]


def told(run: Run) -> tuple[str, str]:
    words, code = the_same_again(run)
    assert isinstance(words, Paragraph)
    assert isinstance(code, Code)
    return words.text, code.text


def test_an_unchanged_sweep_is_run_again_by_its_command(tmp_path: Path) -> None:
    write_sweep(tmp_path / "c", "1, 4")
    run = make(tmp_path / "runs", tmp_path / "c")
    assert told(run) == ("The same again, on a machine of your own:", COMMAND.format(folder=tmp_path / "c"))


def test_of_a_changed_sweep_the_commit_is_named(tmp_path: Path) -> None:
    write_sweep(tmp_path / "c", "1, 4")
    clean = make(tmp_path / "clean", tmp_path / "c", [{"git_sha": "abc123"}])
    dirty = make(tmp_path / "dirty", tmp_path / "c", [{"git_sha": "abc123", "git_dirty": True}])
    several = make(tmp_path / "several", tmp_path / "c", [{"git_sha": "abc123"}, {"git_sha": "def456"}])
    nowhere = make(tmp_path / "nowhere", tmp_path / "c")
    write_sweep(tmp_path / "c", "4, 8, 16")
    command = COMMAND.format(folder=tmp_path / "c")
    changed = (
        "Since then the sweep, or what it names, has changed: the command would plan 3 points, 1 of the run's 2 among "
        "them. What the run planned is kept in plan.json."
    )
    words, code = told(clean)
    assert words == f"{changed} The same again, on a machine of your own, needs the sources of the run's commit."
    assert code == f"git checkout abc123\n{command}"
    words, code = told(dirty)
    assert words.endswith("They had uncommitted changes besides, so hold `epcross plan` against plan.json.")
    assert code == f"git checkout abc123\n{command}"
    for run, why in ((several, "rows are of several commits"), (nowhere, "it was not run from a checkout")):
        words, code = told(run)
        assert words == f"{changed} No one commit can be named that plans the same, since {why}. The command was:"
        assert code == command


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"launches": 7}, "timing.launches is 1, and was 7"),
        (
            {"launches": 7, "chain_ms": 3.5},
            "timing.launches is 1, and was 7; timing.chain_ms is 5.0, and was 3.5",
        ),
    ],
)
def test_other_repeats_are_a_change(own: dict[str, float], words: str) -> None:
    plan = build(["sweep=smoke"])
    assert changes(plan) == ""
    assert changes(replace(plan, timing=replace(plan.timing, **own))) == words


def test_a_command_that_is_refused_by_now_says_why(tmp_path: Path) -> None:
    write_sweep(tmp_path, "1, 4")
    plan = build(["sweep=mine"], [tmp_path])
    (tmp_path / "sweep" / "mine.yaml").unlink()
    assert changes(plan).startswith("the command is refused now (")
    assert "mine" in changes(plan)


def test_a_changed_soak_is_a_change() -> None:
    plan = build(["sweep=soak", "soak.seconds=60"])
    assert changes(plan) == ""
    assert plan.soak is not None
    longer = replace(plan, soak=replace(plan.soak, seconds=90.0))
    assert changes(longer) == "soak.seconds is 60, and was 90"
