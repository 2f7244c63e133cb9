"""What documents say of ours beside others: medians, leads, changes of lead and starts, from rows with known times."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from peer_runs import BACKENDS, TIMES_US, run_of

from epcross.harness.analysis.evidence_again import again
from epcross.harness.analysis.evidence_figure import round_trip_figure
from epcross.harness.analysis.evidence_leads import PAIRED, leads
from epcross.harness.analysis.evidence_links import links
from epcross.harness.analysis.evidence_peers import crossing, crossings, medians
from epcross.harness.analysis.evidence_rates import rates
from epcross.harness.analysis.evidence_run import EvidenceRun
from epcross.harness.analysis.looks import looks
from epcross.harness.measuring.link_bytes import wire_bytes
from epcross.harness.record import Record
from epcross.harness.terms import Regime, RowFormat, Status
from epcross.kernels.experts.formats import WeightFormat


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> EvidenceRun:
    return run_of(tmp_path_factory.mktemp("usual"))


def test_medians_have_a_line_for_each_series_and_say_why_others_have_none(usual: EvidenceRun) -> None:
    text = medians(usual)
    assert "| EP 2, steady: median (us) at tokens per rank | 1 | 8 | 64 |" in text
    assert "| Sentinel | 1010 | 2010 | 6010 |" in text
    assert "| AG/RS | 2510 | 4010 | - |" in text
    told = [f"1 point unsupported (holds 4 tokens per rank, not {tokens})" for tokens in (8, 64)]
    assert f"DeepEP LL: {'; '.join(told)}." in text
    assert "DeepEP LL |" not in text


def test_leads_set_the_better_of_ours_beside_the_best_other(usual: EvidenceRun) -> None:
    text = leads(usual)
    assert "| 1 | Sentinel 1010 | AG/RS 2510 | 2.49 [2.47..2.50] |" in text
    assert "| 8 | Fence 1810 | DeepEP V2 3010 | 1.66 [1.66..1.67] |" in text
    assert "| 64 | Fence 2010 | DeepEP V2 3010 | 1.50 [1.49..1.50] |" in text


def test_a_lead_is_a_ratio_within_a_call(tmp_path: Path) -> None:
    """In the second call everything takes twice as long, and the exchange of AG/RS was measured in that one alone."""

    def call(backend: str, launch: int) -> tuple[str, float]:
        second = launch > 1 or backend == "ag_rs"
        return ("second", 2.0) if second else ("first", 1.0)

    text = leads(run_of(tmp_path, launches=4, call=call))
    # of the two launches that both had in one call: about 5011.5 / 2011.5; with ours of both calls it were 3.3
    assert "| 1 | Sentinel 2012 | AG/RS 5012 | 2.49 [2.49..2.49] |" in text
    # both were in both calls: from 3000 / 2001 to 6015 / 4014
    assert "| 64 | Fence 3008 | DeepEP V2 4508 | 1.50 [1.50..1.50] |" in text


def test_seeds_are_not_set_against_each_other(usual: EvidenceRun) -> None:
    """Of the second seed's routing everything takes twice as long: no ratio is of one seed above the other."""
    rows = [replace(row, latency_us=(row.latency_us or 0) * (1 + row.seed)) for row in usual.rows]
    lines = leads(replace(usual, rows=tuple(rows))).splitlines()
    assert lines[2].endswith("| 2.49 [2.47..2.50] |")


def test_a_launch_that_one_of_two_has_not_counts_for_neither(usual: EvidenceRun) -> None:
    rows = [row for row in usual.rows if row.launch < 2 or row.backend.startswith("onesided")]
    text = leads(replace(usual, rows=tuple(rows)))
    assert "| 1 | Sentinel 1004 | AG/RS 2504 | 2.49 [2.49..2.50] |" in text
    assert "n = 8 repeats. " in text


def test_what_was_never_in_one_call_with_ours_is_not_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, launches=3, call=lambda backend, launch: (f"{backend.startswith('onesided')}", 1.0))
    assert leads(run) == "nothing of ours stands beside another backend"
    assert crossings(run) == "Whether any lead changes cannot be told: the two were never measured in one call."


def test_what_cannot_be_told_of_some_others_shares_a_line(tmp_path: Path) -> None:
    run = run_of(tmp_path, launches=3, call=lambda backend, _: ("one" if backend != "onesided_fence" else "other", 1.0))
    lines = crossings(run).splitlines()
    assert [line for line in lines if line.startswith("| Fence |")] == [
        "| Fence | DeepEP V2; AG/RS | EP 2 | cannot be told: the two were never measured in one call |"
    ]
    assert sum(line.startswith("| Sentinel |") for line in lines) == 2


def test_crossings_name_who_leads_where_and_the_interval(usual: EvidenceRun) -> None:
    lines = crossings(usual).splitlines()
    of_pair = {tuple(line.split(" | ")[:2]): line for line in lines[2:]}
    assert len(of_pair) == 4
    assert "at 17 [17..17]: Sentinel below, DeepEP V2 above" in of_pair["| Sentinel", "DeepEP V2"]
    assert "EP 2, steady" in of_pair["| Sentinel", "DeepEP V2"]
    assert "never from 1 to 64: Fence leads" in of_pair["| Fence", "DeepEP V2"]
    assert "never from 1 to 8: Sentinel leads" in of_pair["| Sentinel", "AG/RS"]


def test_what_is_not_surely_beyond_the_margin_is_not_called_equal(tmp_path: Path) -> None:
    """At 64 tokens DeepEP V2 is 4 % behind in the median, by less in some launches: the interval reaches below 3 %."""

    def call(backend: str, launch: int) -> tuple[str, float]:
        return "first", {0: 0.68, 1: 0.686, 2: 0.694, 3: 0.701, 4: 0.71}[launch] if backend == "deepep_v2" else 1.0

    (line,) = [line for line in crossings(run_of(tmp_path, call=call)).splitlines() if "| Fence | DeepEP V2 |" in line]
    assert "never from 1 to 64: Fence leads at 1 to 8, not surely more than 3% apart elsewhere" in line


@pytest.mark.parametrize(
    ("leader", "words"),
    [
        ("equal", "never, not surely more than 3% apart from 1 to 64"),
        ("b", "never from 1 to 64: B leads at 8 to 64, not surely more than 3% apart elsewhere"),
    ],
)
def test_a_lead_that_changes_nowhere_is_told_with_its_places(leader: str, words: str) -> None:
    line = {
        "state": "none in range", "reason": "", "tokens_low": 1, "tokens_high": 64,
        "faster_below": "equal", "faster_above": leader, "leads_from": 8.0, "leads_to": 64.0,
    }  # fmt: skip
    assert crossing(line, {"b": "B"}) == words


@pytest.mark.parametrize(
    ("a_leads", "b_leads", "words"),
    [
        ("", "", ""),
        ("1..8 64", "", "; A leads at 1 to 8, 64; not surely more than 3% apart elsewhere"),
        ("1", "64", "; A leads at 1; B leads at 64; not surely more than 3% apart elsewhere"),
    ],
)
def test_sure_leads_are_told_where_a_change_cannot_be(a_leads: str, b_leads: str, words: str) -> None:
    line = {
        "state": "ambiguous", "reason": "only 87.2% are", "tokens_low": 1, "tokens_high": 64, "a": "a", "b": "b",
        "a_leads": a_leads, "b_leads": b_leads,
    }  # fmt: skip
    assert crossing(line, {"a": "A", "b": "B"}) == f"cannot be told: only 87.2% are{words}"


def test_one_launch_tells_no_crossing_and_no_second_start(tmp_path: Path) -> None:
    run = run_of(tmp_path, launches=1)
    assert "cannot be told: one launch" in crossings(run)
    assert again(run) == "each series was started once, so nothing can be said of what a second start changes"


def test_starts_that_differ_are_counted_with_the_worst(usual: EvidenceRun, tmp_path: Path) -> None:
    text = again(usual)
    assert text.startswith(
        "4 of the 4 series (Sentinel; Fence; DeepEP V2; AG/RS) have points with more than one start: "
    )
    assert (
        "the first and the last of 5 starts, compared at 11 points by the medians of n = 4 repeats each, differ" in text
    )
    assert "by more than 3% at 0" in text
    assert "started once" not in text
    text = again(run_of(tmp_path / "drift", launches=3, drift=0.05))
    assert "differ by more than 3% at 11" in text
    assert "the largest difference is 10.8% (Sentinel, EP 2, steady, 1 token per rank)" in text


def test_series_that_were_started_once_are_told_from_those_that_were_compared(usual: EvidenceRun) -> None:
    """DeepEP V2 alone has a second start, of some of its points with fewer repeats."""
    rows = [row for row in usual.rows if row.launch == 0 or (row.backend == "deepep_v2" and row.launch == 1)]
    rows = [row for row in rows if row.launch == 0 or row.tokens_per_rank > 1]
    rows = [row for row in rows if row.launch == 0 or row.tokens_per_rank < 64 or row.seed == 0]
    text = again(replace(usual, rows=tuple(rows)))
    assert text.startswith(
        "1 of the 4 series (DeepEP V2) have points with more than one start: the first and the last of 2"
    )
    assert "compared at 2 points by the medians of n = 2 to 4 repeats each" in text
    assert text.endswith("; the other 3 series, started once, tell nothing of it")


def test_tables_say_of_how_many_repeats_they_are(usual: EvidenceRun) -> None:
    assert "Each median is of n = 20 repeats (5 launches x 2 seeds x 2 chains)." in medians(usual)
    assert f"Each median is of n = 20 repeats. {PAIRED}" in leads(usual)
    fewer = replace(usual, rows=tuple(row for row in usual.rows if row.tokens_per_rank > 1 or row.launch < 2))
    assert "Each median is of n = 8 to 20 repeats (2 to 5 launches x 2 seeds x 2 chains)." in medians(fewer)
    assert f"Each median is of n = 8 to 20 repeats. {PAIRED}" in leads(fewer)


def test_formats_stand_in_tables_and_panels_of_their_own(tmp_path: Path) -> None:
    run = run_of(tmp_path, launches=3, formats=(RowFormat.FP8, RowFormat.BF16))
    bf16, fp8 = run.panels()
    assert (bf16.dispatch_format, fp8.dispatch_format) == ("bf16", "fp8")
    assert [run.words(panel) for panel in (bf16, fp8)] == ["EP 2, bf16 out", "EP 2, fp8 out"]
    assert set(run.series()) == set(TIMES_US)  # no series is named by its format
    assert medians(run).count("| Sentinel |") == 2
    figure = round_trip_figure(run).decode()
    assert "EP 2, bf16 out, steady" in figure
    assert "EP 2, fp8 out, steady" in figure
    assert run.times_us(Regime.STEADY, fp8).keys() == run.times_us(Regime.STEADY, bf16).keys()
    assert crossings(run).count("Sentinel below, DeepEP V2 above") == 2


def test_the_figure_has_the_colours_that_reports_have(usual: EvidenceRun) -> None:
    """Of conf/backend, whatever the run recorded: runs of two days look alike."""
    figure = round_trip_figure(usual).decode().lower()
    looks_of = looks([(backend, "") for backend in TIMES_US], {})
    assert len({look.marker for look in looks_of.values()}) == len(TIMES_US)
    for (backend, _), look in looks_of.items():
        assert f"stroke: {look.color.lower()}" in figure
        assert f"stroke: {BACKENDS[backend]['color']}" not in figure


def test_other_expert_weights_are_set_beside_ours_with_a_word(tmp_path: Path) -> None:
    run = run_of(tmp_path, weights={"deepep_v2": WeightFormat.FP4, "ag_rs": WeightFormat.FP8}, ours=WeightFormat.FP8)
    text = crossings(run)
    assert "| Sentinel | DeepEP V2 | EP 2, fp8 weights, against fp4 weights, steady | at 17" in text
    assert "| Sentinel | AG/RS | EP 2, fp8 weights, steady | never" in text
    assert "DeepEP V2" not in leads(run)  # equal formats only


def with_counts(run: EvidenceRun, counted: Mapping[str, tuple[float, float, float]], *, exact: bool) -> EvidenceRun:
    """10 pairs a token cross, and 40 selections; counted are so many times that at 1, 8 and 64 tokens."""

    def told(row: Record) -> Record:
        if row.backend not in counted or row.status != Status.OK:
            return row
        share = counted[row.backend][(1, 8, 64).index(row.tokens_per_rank)]
        tokens = row.tokens_per_rank
        row = replace(row, pairs_remote_sum=10 * tokens, selections_remote_sum=40 * tokens, nvlink_pairs=1)
        size = round(wire_bytes(row) * share)
        row = replace(row, nvlink_tx_bytes=size, nvlink_rx_bytes=size)
        return replace(row, nvlink_wire_bytes=float(wire_bytes(row))) if exact else row

    return replace(run, rows=tuple(map(told, run.rows)))


def test_counted_bytes_are_set_beside_those_that_must_cross(usual: EvidenceRun) -> None:
    assert links(usual) == "nothing was counted on the links of this run"
    counted = {"onesided_sentinel": (1.0, 1.02, 1.02), "deepep_v2": (2.01, 1.99, 1.99), "ag_rs": (1.0, 1.5, 1.5)}
    lines = links(with_counts(usual, counted, exact=True)).splitlines()
    assert lines[0] == "| counted over what must cross, steady | EP 2 | where they differ by more than 3%, most often |"
    assert lines[2:] == [
        "| Sentinel | 1.00 to 1.02 | - |",
        "| DeepEP V2 | 1.99 to 2.01 | about twice the rows, as of a protocol with a flag beside every word |",
        "| AG/RS | 1.00 to 1.50 | more than rows, such as small stores, or other traffic |",
        "",
        "Each range is over n = 10 to 15 counts, one of each launch at each number of tokens.",
    ]


def test_what_is_near_copies_of_the_same_bytes_is_told_by_how_much_longer_it_takes(usual: EvidenceRun) -> None:
    """At 64 tokens: 5000 us of 2000 sent and 3000 back; Sentinel takes 6009.5 us and moves no more, DeepEP twice it."""
    counted = {"onesided_sentinel": (1.0, 1.02, 1.02), "deepep_v2": (2.01, 1.99, 1.99), "ag_rs": (1.0, 1.0, 1.0)}
    run = with_counts(usual, counted, exact=True)
    assert rates(run) == "no pair here is so large that copies bound it"  # no rates were measured
    row = run.rows[0]
    rows = tuple(replace(row, pairs_sent_remote_max=100, pairs_received_remote_max=150) for row in run.rows)
    push, pull = 100 * row.padded_bytes / 2000e3, 150 * row.combine_row_bytes / 3000e3
    both = 2000 + 150 * row.combine_row_bytes / push / 1e3
    floor = {"push_gbps_by_blocks": {"1": 0.0, "8": push}, "pull_gbps_by_blocks": {"1": pull}, "ep_size": row.ep_size}
    lines = rates(replace(run, rows=rows, floor={"here": floor})).splitlines()
    assert lines[-3] == f"| 64, EP 2 | 5000 | {both:.0f} | Sentinel 20%, {6009.5 / both - 1:.0%} |"
    assert lines[-1].startswith("Copies at the fastest rates of the floor")


def test_counted_bytes_near_a_known_count_are_given_as_times_that(usual: EvidenceRun) -> None:
    lines = links(with_counts(usual, {"deepep_v2": (4.0, 4.16, 4.2)}, exact=True)).splitlines()
    assert lines[2] == "| DeepEP V2 | 4.00 to 4.20 | 1.00 to 1.05 times a row for each selection, not for each rank |"


def test_counts_beside_a_rounded_mean_of_few_pairs_are_left_out_and_counted(usual: EvidenceRun) -> None:
    """As rows before schema version 7 have them: 10 pairs may be 9.5, and 80 are at most 0.6 % off."""
    text = links(with_counts(usual, {"onesided_sentinel": (0.97, 1.0, 1.01)}, exact=False))
    assert "| Sentinel | 1.00 to 1.01 | - |" in text
    assert "over n = 10 counts" in text
    assert text.endswith(
        " 5 more, at few tokens, are left out: their rows have what must cross in whole pairs, rounded."
    )
