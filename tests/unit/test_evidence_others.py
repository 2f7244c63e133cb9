"""What documents say of a run beside the other committed runs of its sweep, from rows with known times."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_evidence_peers import run_of

from epcross.harness.analysis.evidence_others import ALONE, moved, moved_leads, others
from epcross.harness.analysis.evidence_run import EvidenceRun, committed_runs
from epcross.harness.record import Record
from epcross.harness.storing.store import merge
from epcross.harness.terms import Flag, Regime, Status

FACTORS = {"onesided_sentinel": 1.01, "onesided_fence": 1.0, "deepep_v2": 1.1, "ag_rs": 0.9}
"""What the other run takes over what the first takes; AG/RS 0.91 at 8 tokens."""


def changed(run: EvidenceRun, change: Callable[[Record], Record]) -> EvidenceRun:
    return replace(run, rows=tuple(change(row) if row.status == Status.OK else row for row in run.rows))


def on(run: EvidenceRun, *uuids: str) -> EvidenceRun:
    gpus: list[dict[str, Any]] = [{"name": "H200", "uuid": uuid, "driver_version": "1"} for uuid in uuids]
    return replace(run, run=replace(run.run, environment={**run.run.environment, "gpus": gpus}))


def other_time(row: Record) -> Record:
    assert row.latency_us is not None
    less = 0.01 if (row.backend, row.tokens_per_rank) == ("ag_rs", 8) else 0.0
    return replace(row, latency_us=row.latency_us * (FACTORS[row.backend] + less))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> EvidenceRun:
    """Of three launches: repeats 0 to 11 of each point add as many microseconds to `TIMES_US`."""
    return run_of(tmp_path_factory.mktemp("one"), launches=3)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> EvidenceRun:
    """The same points with other times."""
    return changed(run_of(tmp_path_factory.mktemp("two"), launches=3), other_time)


def test_points_beyond_the_margin_are_counted_by_series_with_the_largest(one: EvidenceRun, two: EvidenceRun) -> None:
    """Of 11 points DeepEP V2 is slower at 3, AG/RS faster at 2, by up to 1 / 0.9; Sentinel by 1 % at 3."""
    line, *_ = others(replace(on(one, "a", "b"), others=(on(two, "c", "d"),))).splitlines()
    name = two.run.run_id
    assert line == (
        f"- [{name}]({{root}}results/measured/{two.folder.name}), on other GPUs: at 11 points of the same versions"
        " medians differ by more than 3% at 5 (3 of DeepEP V2; 2 of AG/RS); half of all by less than 1.01%, and the"
        " largest difference is 11.1% (AG/RS, EP 2, steady, 1 token per rank: 2506 us here, 2255 us there)"
    )


def test_entry_is_counted_apart_and_other_measuring_code_is_told(one: EvidenceRun, two: EvidenceRun) -> None:
    def entry(run: EvidenceRun) -> EvidenceRun:
        return changed(run, lambda row: replace(row, regime=Regime.ENTRY) if row.backend == "ag_rs" else row)

    there = changed(entry(two), lambda row: replace(row, measure_hash="0123"))
    line, *_ = others(replace(entry(one), others=(there,))).splitlines()
    assert "by another state of the measuring code: at 11" in line
    assert "at 5, 2 of them in entry (3 of DeepEP V2; 2 of AG/RS)" in line


def test_leads_are_given_as_a_range_over_runs(one: EvidenceRun, two: EvidenceRun) -> None:
    """Here: 2505.5 / 1005.5, 3005.5 / 1805.5 and 3005.5 / 2005.5."""
    text = others(replace(one, others=(two, changed(two, lambda row: row))))
    lines = text.splitlines()
    assert lines[3] == "| other / ours, over 3 runs | tokens per rank | of | here | least | largest | runs |"
    assert lines[5:] == [
        "| EP 2, steady | 1 | AG/RS / Sentinel | 2.49 | 2.22 | 2.49 | 3 |",
        "| EP 2, steady | 8 | DeepEP V2 / Fence | 1.66 | 1.66 | 1.83 | 3 |",
        "| EP 2, steady | 64 | DeepEP V2 / Fence | 1.50 | 1.50 | 1.65 | 3 |",
    ]
    assert [lead.ratios[1] / lead.ratios[0] for lead in moved_leads(replace(one, others=(two,)))] == pytest.approx(
        [0.9 / 1.01, 1.1, 1.1]
    )


def test_a_sentence_says_how_far_leads_moved(one: EvidenceRun, two: EvidenceRun) -> None:
    assert moved(replace(on(one, "a", "b"), others=(on(two, "b", "a"),))) == (
        "Intervals are within one run. In 1 other committed run of the same versions, on the same GPUs, the same ratios"
        " are from -10.9% to +10.0% of these, at all 3; they differ most at EP 2, steady, 1 token per rank: from 2.22"
        " to 2.49"
    )
    assert moved(one) == f"Intervals are within one run: {ALONE}"


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("ab", "cd", "on other GPUs"),
        ("ab", "ba", "on the same GPUs"),
        ("ab", "ac", "on GPUs of which some are the same"),
        ("", "", "on GPUs or processors that no UUID tells apart"),
        ("ab", "", "on GPUs or processors that no UUID tells apart"),
    ],
)
def test_gpus_are_told_by_their_uuids(one: EvidenceRun, two: EvidenceRun, here: str, there: str, words: str) -> None:
    assert f"), {words}: at 11 points" in others(replace(on(one, *here), others=(on(two, *there),)))


@pytest.mark.parametrize("side", ["here", "there"])
def test_flagged_rows_count_on_neither_side(one: EvidenceRun, two: EvidenceRun, side: str) -> None:
    def flagged(row: Record) -> Record:
        return replace(row, flags=Flag.KNOWN_ISSUE) if row.backend == "ag_rs" else row

    pair = [changed(run, flagged) if name == side else run for name, run in (("here", one), ("there", two))]
    text = others(replace(pair[0], others=(pair[1],)))
    assert "at 9 points of the same versions medians differ by more than 3% at 3 (3 of DeepEP V2)" in text
    assert "AG/RS" not in text or side == "there"
    assert "AG/RS /" not in text  # the pair that leads here cannot be looked up there


@pytest.mark.parametrize(
    ("versions", "points"),
    [(("f00d", "f00d"), 11), (("2.11.0", "torch 2.11.0"), 11), (("a 2.1", "b 2.1"), 9), (("f00d", "f00e"), 9)],
)
def test_points_of_other_versions_are_left_out(
    one: EvidenceRun, two: EvidenceRun, versions: tuple[str, str], points: int
) -> None:
    pair = [
        changed(run, lambda row, own=own: replace(row, backend_version=own if row.backend == "ag_rs" else "1"))
        for run, own in zip((one, two), versions, strict=True)
    ]
    assert f"at {points} points" in others(replace(pair[0], others=(pair[1],)))


def test_expert_stages_of_other_versions_are_left_out(one: EvidenceRun, two: EvidenceRun) -> None:
    newer = changed(two, lambda row: replace(row, compute_version="2"))
    assert others(replace(one, others=(newer,))) == ALONE


def test_other_kinds_of_machines_and_the_same_run_are_not_compared(one: EvidenceRun, two: EvidenceRun) -> None:
    assert others(replace(one, others=(changed(two, lambda row: replace(row, machine="another")),))) == ALONE
    assert others(replace(one, others=(one,))) == ALONE
    assert others(one) == ALONE


def test_committed_runs_of_a_sweep_know_each_other(one: EvidenceRun, two: EvidenceRun, tmp_path: Path) -> None:
    for run in (one, two):
        merge(tmp_path / run.run.run_id, [run.folder])
    (newest,) = committed_runs(tmp_path).values()
    assert {newest.run.run_id, *(each.run.run_id for each in newest.others)} == {one.run.run_id, two.run.run_id}
    assert "at 11 points of the same versions medians differ by more than 3% at 0;" in others(newest)
