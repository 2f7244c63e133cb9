"""Pages and committed runs whose numbers turned out to be wrong, all of them or some."""

import json
from pathlib import Path

import pytest
from test_evidence import BACKENDS, new_run

from epcross.harness.analysis import evidence
from epcross.harness.analysis.evidence_run import committed_runs, read_run
from epcross.harness.errors import StoreError
from epcross.harness.storing.store import open_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone with two pages and one sweep."""
    root = tmp_path / "clone"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("<!-- evidence: quickstart.table --><!-- /evidence -->\n")
    (root / "docs" / "more.md").write_text("<!-- evidence: quickstart.run --><!-- /evidence -->\n")
    (root / "sweeps").mkdir()
    (root / "sweeps" / "quickstart.yaml").touch()
    return root


def withdraw_all(root: Path, run: Path) -> None:
    entries = [
        {"run_id": run.name, "backend": backend, "regime": regime, "reason": "the clock was wrong"}
        for backend in BACKENDS
        for regime in ("steady", "entry")
    ]
    (root / evidence.MEASURED / run.name / "withdrawn.json").write_text(json.dumps(entries))


def test_a_run_of_which_nothing_is_left_makes_room_for_an_older_one(root: Path, tmp_path: Path) -> None:
    old, new = (new_run(tmp_path / "runs", first_us=first_us) for first_us in (10.0, 30.0))
    for run in (old, new):
        evidence.commit(root, run)
    assert committed_runs(root / evidence.MEASURED)["quickstart"].run.run_id == new.name
    withdraw_all(root, new)
    assert committed_runs(root / evidence.MEASURED)["quickstart"].run.run_id == old.name
    evidence.write(root)
    assert new.name not in (root / "docs" / "more.md").read_text()


def test_where_nothing_is_left_of_any_run_pages_say_why(root: Path, tmp_path: Path) -> None:
    run, other = new_run(tmp_path / "runs"), new_run(tmp_path / "runs", sweep="other")
    (root / "sweeps" / "other.yaml").touch()
    for each in (run, other):
        evidence.commit(root, each)
    evidence.write(root)
    figure = root / "docs" / "figures" / "quickstart.svg"
    assert figure.exists()
    withdraw_all(root, run)
    assert figure in evidence.stale(root)
    evidence.write(root)
    assert not figure.exists()
    assert (root / "docs" / "figures" / "other.svg").exists()
    why = "steady of Sentinel; Fence (the clock was wrong); entry of Sentinel; Fence (the clock was wrong)"
    words = f"*All numbers of this sweep are withdrawn (run {run.name}: {why}).*"
    assert (root / "docs" / "more.md").read_text() == f"<!-- evidence: quickstart.run -->{words}<!-- /evidence -->\n"
    assert (root / "README.md").read_text() == f"<!-- evidence: quickstart.table -->{words}<!-- /evidence -->\n"
    assert evidence.stale(root) == []
    with pytest.raises(StoreError, match=f"nothing is left of run {run.name}, whose numbers are withdrawn"):
        read_run(root / evidence.MEASURED / run.name, open_run(run))


def test_what_is_withdrawn_of_a_run_is_committed_with_it(root: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    entry = {"run_id": run.name, "backend": "shm_fence", "regime": "entry", "reason": "the clock was wrong"}
    (run / "withdrawn.json").write_text(json.dumps([entry]))
    target = evidence.commit(root, run)
    assert json.loads((target / "withdrawn.json").read_text()) == [entry]
    (read,) = committed_runs(root / evidence.MEASURED).values()
    assert sum("known_issue" in row.flags for row in read.rows) == 48  # two sizes, two launches, twelve rows
    evidence.commit(root, run)  # twice changes nothing
    assert json.loads((target / "withdrawn.json").read_text()) == [entry]
