"""Rows of a version that the backend's YAML warns of carry the flag, and whoever shows them says why."""

import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from report_runs import make_run, points
from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.analysis import material
from epcross.harness.analysis.known_issues import known_issue_lines
from epcross.harness.planning.known_issues import issues_of, version_in
from epcross.harness.planning.plan import Plan
from epcross.harness.planning.schema import BackendConfig, KnownIssue
from epcross.harness.record import Record
from epcross.harness.report.content import document
from epcross.harness.report.markdown import to_markdown
from epcross.harness.running.job import Job, Turn
from epcross.harness.running.recorder import Recorder
from epcross.harness.storing.store import create_run, read_units
from epcross.harness.terms import Flag, Regime

RACES = KnownIssue(versions="<1.3", reason="combine may race")
SLOW = KnownIssue(versions=">=1.2,<2", reason="dispatch waits for the host")


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ("flashinfer-python 0.7.4", "0.7.4"),
        ("triton 3.6.0", "3.6.0"),
        ("2.11.0+cu130", "2.11.0+cu130"),
        ("tokenspeed-deepep 1.2.1.post20251110", "1.2.1.post20251110"),
        ("v1.2", "1.2"),
        ("1", "1"),
        ("mine 20260131", "20260131"),
        ("2e30bf6fa500c0de", None),
        ("1234567890123456", None),  # a hash may be of digits alone,
        ("1234567c90123456", None),  # or read as the release candidate 1234567rc90123456
        ("unknown", None),
        ("1.2 (patched)", None),
        ("", None),
        (None, None),
    ],
)
def test_the_version_is_the_last_word_unless_it_is_a_hash(told: str | None, version: str | None) -> None:
    found = version_in(told)
    assert (None if found is None else str(found)) == version


@pytest.mark.parametrize(
    ("versions", "told", "concerned"),
    [
        ("<1.3", "lib 1.2.9", True),
        ("<1.3", "lib 1.3", False),
        ("<1.3", "lib 1.3.0", False),
        ("<1.3", "lib 1.3rc1", False),
        ("<=1.3", "lib 1.3.0", True),
        ("<=1.3", "lib 1.3.0.post1", False),
        (">1.3", "lib 1.3.1", True),
        (">=1.3", "lib 1.4.dev20260131", True),  # what ran counts, be it a pre-release
        ("<1.10", "lib 1.9", True),
        ("==2.0.*", "lib 2.0.7", True),
        ("==2.0.*", "lib 2.1.0", False),
        ("~=2.11.0", "2.11.4+cu130", True),
        ("==2.11.0", "2.11.0+cu130", True),
        ("<=2.11.0", "2.11.0+cu130", True),
        ("<2.11.0", "2.11.0+cu130", False),
        (">2.11.0", "2.11.0+cu130", False),
        ("==2.11.0+cu128", "2.11.0+cu130", False),
        (">=1.1,<1.3,!=1.2.4", "lib 1.2.3", True),
        (">=1.1,<1.3,!=1.2.4", "lib 1.2.4", False),
        (">=0", "1234567890123456", False),
        (">=0", None, False),
        ("of old", "lib 1.0", False),  # in the plan of a run from before specifiers were checked
    ],
)
def test_a_specifier_concerns_the_versions_that_pep_440_says(versions: str, told: str | None, concerned: bool) -> None:
    issue = KnownIssue(versions=versions, reason="races")
    assert issues_of(told, [issue]) == ((issue,) if concerned else ())


def test_each_of_several_issues_is_asked() -> None:
    found = {told: issues_of(told, [RACES, SLOW]) for told in ("1.1", "1.2", "1.3", "2.0")}
    assert found == {"1.1": (RACES,), "1.2": (RACES, SLOW), "1.3": (SLOW,), "2.0": ()}


@pytest.mark.parametrize(
    ("told", "flags"),
    [
        ("lib 1.2.9", "known_issue within_launch"),
        ("lib 1.3", "within_launch"),
        ("1234567890123456", "within_launch"),
        (None, "within_launch"),
    ],
)
def test_a_measured_unit_is_stored_with_the_flag(tmp_path: Path, told: str | None, flags: str) -> None:
    run = create_run(tmp_path, "s", {}, {})
    point = make_point(backend="mine")
    turn = Turn(backend="mine", point_ids=(point.point_id,))
    config = BackendConfig(name="mine", target="a:B", label="M", color="#000000", known_issues=(RACES,))
    job = Job(
        name="ep2",
        run_dir=str(run.path),
        ep_size=2,
        timing=TIMING,
        context=replace(CONTEXT, run_id=run.run_id),
        backends={"mine": config},
        points={point.point_id: point},
        turns=(turn,),
    )
    unit = make_unit(point, context=job.context)
    rows = [asdict(replace(row, backend_version=told, flags="within_launch")) for row in unit.records]
    result = {"records": rows, "samples": [asdict(each) for each in unit.samples]}
    # as from the file that a supervisor reads
    recorder = Recorder(Job.from_json(job.to_json()))
    assert recorder.unit(turn, point.point_id, result, None, (), datetime.now(UTC), 1.0, {})
    (stored,), problems = read_units(run)
    assert problems == []
    assert {row.flags for row in stored.records} == {flags}
    assert len(stored.records) == len(unit.records)


def of_two_versions(row: Record) -> Record:
    """Sentinel is of a version with both issues at one token, and of one that has none at more."""
    if row.backend != "shm_sentinel" or row.tokens_per_rank > 1:
        return replace(row, backend_version="lib 2.0")
    return replace(row, backend_version="lib 1.2", flags=f"{Flag.KNOWN_ISSUE} within_launch")


@pytest.fixture
def run(tmp_path: Path) -> material.Run:
    """Two backends with two units of four repeats at two sizes, both with the same known issues."""
    path = make_run(tmp_path, points(("shm_sentinel", "shm_fence"), [Regime.STEADY], tokens=(1, 4)), of_two_versions)
    (run,) = material.open_runs([path])
    backends = {
        name: BackendConfig(name=name, target="a:B", label=name, color="#000000", known_issues=(RACES, SLOW))
        for name in ("shm_sentinel", "shm_fence")
    }
    return replace(run, plan=replace(run.plan, backends=backends))


LINES = [
    "shm_sentinel: known issue of <1.3: combine may race (8 rows of lib 1.2 flagged known_issue)",
    "shm_sentinel: known issue of >=1.2,<2: dispatch waits for the host (8 rows of lib 1.2 flagged known_issue)",
]


def test_every_reason_is_told_once_with_its_rows(run: material.Run) -> None:
    assert Plan.from_json(run.plan.to_json()).backends == run.plan.backends
    assert known_issue_lines(run.records, run.plan.backends) == LINES
    unflagged = [replace(row, flags="") for row in run.records]
    assert known_issue_lines(unflagged, run.plan.backends) == []  # of before the YAML said so
    one = next(row for row in run.records if Flag.KNOWN_ISSUE in row.flags)
    assert known_issue_lines([one], run.plan.backends)[0].endswith("(1 row of lib 1.2 flagged known_issue)")


def test_a_report_gives_the_reasons(run: material.Run) -> None:
    loaded = material.load([run.directory.path])
    plain = to_markdown(document(loaded))
    assert "known issue of" not in plain
    told = " ".join(to_markdown(document(replace(loaded, runs=(run,)))).split())
    assert all(line in told.replace("\\", "") for line in LINES)


def test_a_worker_needs_nothing_to_compare_versions_with() -> None:
    """Its interpreter may have numpy and ml_dtypes alone."""
    modules = "backends.loader", "running.worker", "measuring.measure", "measuring.soak", "verification.visit"
    source = "import sys; sys.modules['packaging'] = None; import "
    source += ", ".join(f"epcross.harness.{module}" for module in modules)
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
