"""Numbers and figures of the documents: made from rows, and the documents of this repository are up to date."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from store_values import CONTEXT, make_point, make_unit

from epcross.harness.analysis import evidence
from epcross.harness.analysis.evidence_run import committed_runs
from epcross.harness.analysis.evidence_text import caption, versions
from epcross.harness.analysis.evidence_versions import elsewhere
from epcross.harness.errors import EpcrossError, StoreError
from epcross.harness.record import Record
from epcross.harness.storing.checksums import read_sums
from epcross.harness.storing.store import create_run, load_rows, load_samples, release, write_floor, write_unit
from epcross.harness.terms import Flag, Regime

ROOT = Path(__file__).parents[2]
PAGE = """# Page
<!-- evidence: quickstart.figure --><!-- /evidence -->

<!-- evidence: quickstart.table -->old<!-- /evidence -->

On <!-- evidence: quickstart.machine --><!-- /evidence -->: <!-- evidence: quickstart.rows --><!-- /evidence -->,
<!-- evidence: quickstart.floor --><!-- /evidence -->, in <!-- evidence: quickstart.wall --><!-- /evidence -->.
"""
MACHINE = {"cpu": {"model": "Some CPU", "architecture": "x86_64", "cores_available": [0, 1]}}
BACKENDS = {
    "shm_sentinel": {"label": "Sentinel", "color": "#D55E00"},
    "shm_fence": {"label": "Fence", "color": "#0072B2"},
}


def new_run(
    folder: Path,
    *,
    sweep: str = "quickstart",
    first_us: float = 10.0,
    flag: str = "",
    ep_size: int = 2,
    change: Callable[[Record], Record] = lambda row: row,
) -> Path:
    """A run with known times: `first_us` and seven more, each 1 us later; ten times that for 8 tokens; Fence twice.
    `change` is applied to each row."""
    run = create_run(folder, sweep, {"backends": BACKENDS}, MACHINE)
    context = replace(CONTEXT, run_id=run.run_id)
    for regime in (Regime.STEADY, Regime.ENTRY):
        for tokens in (1, 8):
            for backend, factor in (("shm_sentinel", 1), ("shm_fence", 2)):
                for launch in (0, 1):
                    point = make_point(backend=backend, tokens=tokens, regime=regime, ep_size=ep_size)
                    latency_us = first_us * factor * (10 if tokens == 8 else 1)
                    unit = make_unit(point, launch, context=context, latency_us=latency_us)
                    common = {"started_at": run.created, "wall_s": 2.0, "flags": flag}
                    write_unit(run, replace(unit, records=tuple(change(replace(r, **common)) for r in unit.records)))
    entry = {"ep_size": 2, "flag_one_way_us": 0.05, "copy_gbps": 26.0, "empty_pair_us": 0.2}
    write_floor(run, {"cpu_ep2": entry, "cpu_ep4": {"error": "it broke"}})
    release(run.path)
    return run.path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text(PAGE)
    (root / "sweeps").mkdir()
    (root / "sweeps" / "quickstart.yaml").touch()
    (root / "docs" / "more.md").write_text("<!-- evidence: quickstart.run --><!-- /evidence -->\n")
    return root


def test_the_documents_of_this_repository_are_made_from_the_committed_rows() -> None:
    assert evidence.stale(ROOT) == [], "run `make evidence`"


def test_a_page_says_what_the_rows_say(root: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    committed = evidence.commit(root, run)
    changed = evidence.write(root)
    assert {str(path.relative_to(root)) for path in changed} == {
        "README.md",
        "docs/more.md",
        "docs/figures/quickstart.svg",
    }
    page = (root / "README.md").read_text()
    # repeats 0 to 7, and 0 to 7 us on top of the first
    assert "| tokens per rank, EP 2, steady | Sentinel (us) | Fence (us) |" in page
    assert "| 1 | 13.5 [10.0..17.0] | 23.5 [20.0..27.0] |" in page
    assert "| 8 | 104 [100..107] | 204 [200..207] |" in page
    assert "![Round trip against tokens per rank](docs/figures/quickstart.svg)" in page
    assert "n = 8 repeats (2 launches x 2 seeds x 2 chains); fewer than 5 launches" in page
    assert "EP 2; no repeat was flagged; run" in page
    assert "On <!-- evidence: quickstart.machine -->Some CPU (x86_64, 2 cores)<!-- /evidence -->" in page
    assert "128 rows: 128 ok" in page
    assert "at EP 2 a flag crosses in 0.05 us, all ranks together copy 26 GB/s, and an empty pair costs 0.2 us" in page
    assert "in <!-- evidence: quickstart.wall -->32 s<!-- /evidence -->" in page
    assert f"[{run.name}](../results/measured/{run.name})" in (root / "docs" / "more.md").read_text()
    assert evidence.stale(root) == []
    assert evidence.write(root) == []
    assert not (committed / "units").exists()
    assert len(load_rows(committed)) == len(load_rows(run)) == 128
    assert len(load_samples(committed)) == len(load_samples(run)) > 0
    assert (read_sums(committed) or {}).keys() == {"rows.parquet", "samples.parquet"}


@pytest.mark.parametrize("change", ["number", "figure", "row"])
def test_whatever_is_changed_by_hand_is_stale(root: Path, tmp_path: Path, change: str) -> None:
    evidence.commit(root, new_run(tmp_path / "runs"))
    evidence.write(root)
    readme, figure = root / "README.md", root / "docs/figures/quickstart.svg"
    if change == "number":
        readme.write_text(readme.read_text().replace("13.5", "12.5"))
        assert evidence.stale(root) == [readme]
    elif change == "figure":
        figure.write_bytes(figure.read_bytes().replace(b"#0072b2", b"#0072b3"))
        assert evidence.stale(root) == [figure]
    else:
        evidence.commit(root, new_run(tmp_path / "later", first_us=11.0))
        assert set(evidence.stale(root)) >= {readme, figure}


def test_the_newest_run_of_a_sweep_counts(root: Path, tmp_path: Path) -> None:
    first = new_run(tmp_path / "runs")
    other = new_run(tmp_path / "runs", sweep="crossover")
    newest = new_run(tmp_path / "runs", first_us=20.0)
    for number, path in enumerate((newest, first, other)):
        # run ids begin with the second, and these three were made within one
        committed = evidence.commit(root, path)
        committed.rename(committed.with_name(f"{3 - number}-{path.name}"))
    runs = committed_runs(root / evidence.MEASURED)
    assert set(runs) == {"quickstart", "crossover"}
    assert runs["quickstart"].run.run_id == newest.name


def test_ep_sizes_that_the_newest_run_lacks_come_from_an_older_one(root: Path, tmp_path: Path) -> None:
    older = new_run(tmp_path / "runs", first_us=30.0)  # of an EP size that a newer run has
    wide = new_run(tmp_path / "runs", ep_size=4)
    narrow = new_run(tmp_path / "runs", first_us=20.0)
    for path in (narrow, older, wide):
        evidence.commit(root, path)
    run = committed_runs(root / evidence.MEASURED)["quickstart"]
    assert run.ep_sizes() == [2, 4]
    assert [(one.run_id, sizes) for one, sizes in run.sources()] == [(narrow.name, [2]), (wide.name, [4])]
    assert min(run.times_us(Regime.STEADY, run.panels()[0])["shm_sentinel", 1]) == 20.0
    text = caption(run)
    assert f"{narrow.name} (EP 2) on Some CPU" in text
    assert f"{wide.name} (EP 4) on Some CPU" in text
    assert older.name not in text


def test_captions_count_the_repeats_that_are_drawn(root: Path, tmp_path: Path) -> None:
    """At 8 tokens a launch is flagged, and one repeat of the other: 3 of 8 are drawn, of one launch."""

    def beside(row: Record) -> Record:
        flagged = row.tokens_per_rank == 8 and (row.launch == 1 or row.repeat == 0)
        return replace(row, flags=Flag.NOT_ALONE if flagged else "")

    evidence.commit(root, new_run(tmp_path / "runs", change=beside))
    run = committed_runs(root / evidence.MEASURED)["quickstart"]
    drawn = {len(times) for panel in run.panels() for times in run.times_us(Regime.STEADY, panel).values()}
    assert drawn == {3, 8}
    text = caption(run)
    assert "n = 3 to 8 repeats (1 to 2 launches x 2 seeds x 2 chains)" in text
    assert "20 repeats flagged not_alone left out" in text


def slower(row: Record, factor: float) -> Record:
    times = ("latency_us", "latency_min_us", "latency_max_us")
    return replace(row, **{name: factor * getattr(row, name) for name in times})


def two_sweeps(root: Path, tmp_path: Path, change: Callable[[Record], Record]) -> None:
    """Two runs of the same points, each on a page of its own; the later one is changed."""
    (root / "sweeps" / "smoke.yaml").touch()
    (root / "docs" / "more.md").write_text("<!-- evidence: smoke.medians --><!-- /evidence -->\n")
    evidence.commit(root, new_run(tmp_path / "first"))
    evidence.commit(root, new_run(tmp_path / "later", sweep="smoke", change=change))


def test_pages_that_show_a_point_from_two_kernels_must_say_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def newer(row: Record) -> Record:
        fence = row.backend == "shm_fence"
        return replace(row, backend_version="c0ffee") if fence else slower(row, 2.0)

    two_sweeps(root, tmp_path, newer)
    monkeypatch.chdir(root)
    assert evidence.main([]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("epcross: README.md shows numbers of sweep quickstart, and other versions")
    assert "stand in docs/more.md (sweep smoke); say so with <!-- evidence: quickstart.elsewhere -->" in told[0]
    assert told[1].startswith("epcross: docs/more.md shows numbers of sweep smoke")
    for page, sweep in ((root / "README.md", "quickstart"), (root / "docs" / "more.md", "smoke")):
        page.write_text(f"{page.read_text()}\n<!-- evidence: {sweep}.elsewhere --><!-- /evidence -->\n")
    assert evidence.main([]) == 0
    page = (root / "README.md").read_text()
    assert (
        "[docs/more.md](docs/more.md) shows 4 of these points from newer kernels and another call (c0ffee in run"
        in page
    )
    assert "medians differ by more than 3% at 0 of them, and most at Fence, EP 2, bf16 out, " in page  # not Sentinel
    assert "[README.md](../README.md) shows 4 of these points from older kernels" in (root / "docs/more.md").read_text()


def test_how_far_the_same_points_are_apart_is_listed(root: Path, tmp_path: Path) -> None:
    def newer(row: Record) -> Record:
        factor = 2.0 if (row.backend, row.tokens_per_rank, row.regime) == ("shm_fence", 8, "steady") else 1.0
        return replace(slower(row, factor), backend_version="c0ffee")

    two_sweeps(root, tmp_path, newer)
    runs = committed_runs(root / evidence.MEASURED)
    shown = evidence.marked(root, {"figure", "table", "medians"})
    assert shown == {"README.md": {"quickstart"}, "docs/more.md": {"smoke"}}
    text = elsewhere(runs["quickstart"], runs, shown)
    assert "shows 8 of these points" in text
    assert "by more than 3% at 1 of them (Fence, EP 2, bf16 out, steady, 8 tokens per rank)" in text
    assert text.endswith("and most at Fence, EP 2, bf16 out, steady, 8 tokens per rank: 204 us here, 407 us there")


@pytest.mark.parametrize("other", [{}, {"backend_version": "c0ffee", "machine": "another"}])
def test_other_machines_and_equal_kernels_need_no_word(root: Path, tmp_path: Path, other: dict[str, str]) -> None:
    two_sweeps(root, tmp_path, lambda row: replace(row, **other))
    assert evidence.contradictions(root) == []
    runs = committed_runs(root / evidence.MEASURED)
    shown = evidence.marked(root, {"table", "medians"})
    assert elsewhere(runs["smoke"], runs, shown).startswith("no other run whose numbers")


def test_the_documents_of_this_repository_say_where_kernels_differ() -> None:
    assert evidence.contradictions(ROOT) == []


def test_a_shared_gpu_is_one_of_those_of_its_machine_and_versions_are_told(root: Path, tmp_path: Path) -> None:
    evidence.commit(root, new_run(tmp_path / "runs"))
    run = committed_runs(root / evidence.MEASURED)["quickstart"]
    gpus = [{"name": "NVIDIA H200", "driver_version": "580"}] * 2
    run = replace(run, run=replace(run.run, environment={**MACHINE, "gpus": gpus}))
    assert f"{run.run.run_id} on 2 x NVIDIA H200 (driver 580)." in caption(run)
    shared = replace(run, rows=tuple(replace(row, domain="shared_gpu") for row in run.rows))
    assert f"{run.run.run_id} on one of 2 x NVIDIA H200 (driver 580)." in caption(shared)
    newer = {"shm_fence": "c0ffee"}
    mixed = tuple(replace(row, backend_version=newer.get(row.backend, "f00d")) for row in run.rows)
    assert versions(replace(run, rows=mixed)) == "f00d (Sentinel), c0ffee (Fence)"


def test_figures_are_valid_and_the_same_each_time(root: Path, tmp_path: Path) -> None:
    evidence.commit(root, new_run(tmp_path / "runs"))
    first, second = (evidence.make(root)[root / "docs/figures/quickstart.svg"] for _ in range(2))
    assert first == second
    text = " ".join(ET.fromstring(first).itertext())
    for words in ("Sentinel", "Fence", "EP 2, steady", "EP 2, entry", "tokens per rank", "round trip (us)"):
        assert words in text
    assert b"dc:date" not in first


def test_a_flagged_run_carries_no_number(root: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs", flag=Flag.OVERSUBSCRIBED)
    with pytest.raises(StoreError, match="no round trip that is ok and without flags"):
        evidence.commit(root, run)
    assert not (root / evidence.MEASURED).exists()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- evidence: quickstart.tabel --><!-- /evidence -->", "there is no evidence 'quickstart.tabel'"),
        ("<!-- evidence: quickstart.table -->", "1 evidence marks are opened, 0 are closed"),
        ("<!-- evidence: quickstart.table --><!-- evidence: a.rows --><!-- /evidence -->", "2 evidence marks"),
        ("<!-- evidence: quickstart --><!-- /evidence -->", "1 are closed, 0 are pairs"),
        ("<!-- evidence: quikstart.table --><!-- /evidence -->", "no sweep 'quikstart' .*; there are quickstart"),
    ],
)
def test_wrong_marks_are_refused(page: str, words: str) -> None:
    with pytest.raises(EpcrossError, match=words):
        evidence.filled(page, {}, {"quickstart"})


def test_without_a_run_a_page_says_so_and_text_outside_marks_stays() -> None:
    page = "a <!-- evidence: quickstart.table -->3 us<!-- /evidence --> b"
    filled = evidence.filled(page, {}, {"quickstart"})
    assert filled == f"a <!-- evidence: quickstart.table -->{evidence.NOTHING}<!-- /evidence --> b"


def test_the_command_commits_makes_and_says_what_changed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "runs")
    monkeypatch.chdir(root)
    assert evidence.main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"results/measured/{run.name}",
        "README.md",
        "docs/more.md",
        "docs/figures/quickstart.svg",
    ]
    assert evidence.main([]) == 0
    assert capsys.readouterr().out == "Nothing changed.\n"
    assert evidence.main([str(tmp_path)]) == 1
    assert "is not a run directory" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert evidence.main([]) == 1
    assert "Go to its root" in capsys.readouterr().err
    documents = root / "results/measured" / run.name / "runs" / run.name
    assert json.loads((documents / "run.json").read_text())["content"]["run_id"] == run.name


def test_a_soak_is_told_by_its_rounds_and_has_no_curve(root: Path, tmp_path: Path) -> None:
    (root / "README.md").write_text("<!-- evidence: soak.soak --><!-- /evidence -->\n")
    run = create_run(tmp_path / "runs", "soak", {"backends": BACKENDS, "soak": {"seconds": 60}}, MACHINE)
    context = replace(CONTEXT, run_id=run.run_id)
    for tokens, rounds in ((1, 1000), (8, 2500)):
        unit = make_unit(make_point(tokens=tokens), context=context)
        facts = {"verified_rounds": rounds, "wall_s": 90.0}
        write_unit(run, replace(unit, records=tuple(replace(row, **facts) for row in unit.records)))
    release(run.path)
    evidence.commit(root, run.path)
    assert {path.name for path in evidence.write(root)} == {"README.md", "more.md"}
    text = (root / "README.md").read_text()
    assert "3,500 rounds in 3.0 minutes, every output of each compared, which moved about 0 TB; 2 cases: 2 ok<" in text
    assert not (root / "docs" / "figures").exists()
