"""Words and small tables of the documents: settings, floors, starts, reasons and withdrawn numbers of known rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_evidence_peers import run_of

from epcross.harness.analysis.evidence_again import again
from epcross.harness.analysis.evidence_leads import PAIRED, leads
from epcross.harness.analysis.evidence_peers import medians
from epcross.harness.analysis.evidence_run import EvidenceRun
from epcross.harness.analysis.evidence_settings import settings
from epcross.harness.analysis.evidence_text import caption, floor
from epcross.harness.record import Record
from epcross.harness.storing.withdrawn import Withdrawal
from epcross.harness.terms import Flag, Regime, Status


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> EvidenceRun:
    """See `TIMES_US` of the tests of peers; repeats 0 to 11 of three launches add as many microseconds."""
    return run_of(tmp_path_factory.mktemp("words"), launches=3)


def changed(run: EvidenceRun, change: Callable[[Record], Record]) -> EvidenceRun:
    """`run` with its ok rows changed."""
    return replace(run, rows=tuple(change(row) if row.status == Status.OK else row for row in run.rows))


def times_of(backend: str, latency_us: float) -> Callable[[Record], Record]:
    return lambda row: replace(row, latency_us=latency_us) if row.backend == backend else row


def test_entry_has_tables_of_its_own_after_steady(usual: EvidenceRun) -> None:
    both = replace(
        usual,
        rows=(
            *usual.rows,
            *(
                replace(row, regime=Regime.ENTRY, latency_us=2 * row.latency_us)
                for row in usual.rows
                if row.latency_us is not None and (row.tokens_per_rank, row.backend) != (8, "deepep_v2")
            ),
        ),
    )
    steady, entry, n = leads(both).split("\n\n")
    assert steady.splitlines()[0] == "| tokens per rank, EP 2, steady | ours (us) | best other (us) | other / ours |"
    assert entry.splitlines()[0] == "| tokens per rank, EP 2, entry | ours (us) | best other (us) | other / ours |"
    assert entry.splitlines()[2] == "| 1 | Sentinel 2011 | AG/RS 5011 | 2.49 [2.48..2.50] |"
    assert entry.splitlines()[3] == "| 8 | Fence 3611 | AG/RS 8011 | 2.22 [2.21..2.22] |"
    assert n == f"Each median is of n = 12 repeats. {PAIRED}"


def test_ratios_close_to_one_have_three_decimals(usual: EvidenceRun) -> None:
    """At 64 tokens Fence is the faster of ours, from 2000 to 2011 us."""
    close = changed(usual, times_of("deepep_v2", 2000.0))
    assert "| 64 | Fence 2006 | DeepEP V2 2000 | 0.997 [0.995..1.000] |" in leads(close)
    apart = changed(usual, times_of("deepep_v2", 2110.0))
    assert "| 64 | Fence 2006 | DeepEP V2 2110 | 1.05 [1.05..1.05] |" in leads(apart)  # 1.052


def test_settings_have_a_line_for_each_series(usual: EvidenceRun) -> None:
    sms = {"onesided_sentinel": {1: 14, 8: 44, 64: 132}, "deepep_v2": {1: 22, 8: 22, 64: 22}}
    held = {"onesided_sentinel": {1: 89_088, 8: 700_000, 64: 479_625_344}, "ag_rs": {1: 999, 8: 999_960}}

    def told(row: Record) -> Record:
        return replace(
            row,
            backend_version="2.1" if row.backend == "deepep_v2" else "f00d",
            num_sms=sms.get(row.backend, {}).get(row.tokens_per_rank, 0),
            workspace_bytes=held.get(row.backend, {}).get(row.tokens_per_rank),
            boundary="reduce transfer" if row.backend == "ag_rs" else "layout reduce transfer",
            enqueued="eager" if row.backend == "ag_rs" else "graph",
        )

    lines = settings(changed(usual, told)).splitlines()
    assert lines[0] == (
        "| series | library | SMs | held per rank, at its most tokens per rank"
        " | in its window besides reduce transfer | enqueued as |"
    )
    assert lines[2:] == [
        "| Sentinel | f00d | 14 to 132 | 480 MB at 64 | layout | replayed CUDA graphs |",
        "| Fence | f00d | not told | not told | layout | replayed CUDA graphs |",
        "| DeepEP V2 | 2.1 | 22 | not told | layout | replayed CUDA graphs |",
        "| AG/RS | f00d | not told | 1.00 MB at 8 | nothing | single calls: the host waits within |",
    ]


def test_a_floor_says_both_directions(usual: EvidenceRun) -> None:
    entry = {
        "ep_size": 2,
        "flag_one_way_us": 0.8214,
        "copy_gbps": 2063.1,
        "empty_pair_us": 0.976,
        "push_gbps_by_blocks": {"1": 45.6, "132": 360.459, "264": 359.7},
        "pull_gbps_by_blocks": {"1": 26.7, "264": 331.8},
    }
    whole = floor(replace(usual, floor={"nvlink_ep2": entry, "nvlink_ep4": {**entry, "ep_size": 4}}))
    assert whole == (
        "at EP 2 a flag crosses in 0.821 us, all ranks together copy 2060 GB/s (a rank pushes 360 GB/s and pulls 332"
        " GB/s), and an empty pair costs 0.976 us"
    )
    shared = floor(replace(usual, floor={"shared": {**entry, "pull_gbps_by_blocks": {}}}))
    assert "copy 2060 GB/s (a rank pushes 360 GB/s), and" in shared


def test_starts_that_differ_are_told_by_series(usual: EvidenceRun) -> None:
    """In the last launch everything in `slower` is 10 % slower, of 2, 3, 1 and 1 points; the host waits in AG/RS."""
    slower = {"ag_rs": (1, 8), "deepep_v2": (1, 8, 64), "onesided_fence": (64,), "onesided_sentinel": (1,)}

    def last(row: Record) -> Record:
        assert row.latency_us is not None
        late = row.launch == 2 and row.tokens_per_rank in slower[row.backend]
        enqueued = "eager" if row.backend == "ag_rs" else "graph"
        return replace(row, latency_us=row.latency_us * (1.1 if late else 1), enqueued=enqueued)

    text = again(changed(usual, last))
    assert (
        "differ by more than 3% at 7 (3 of DeepEP V2; 2 of AG/RS, which the host waits in; 1 of Sentinel; 1 of " in text
    )
    assert "; 1 of others); half of all by less than 10.30%," in text  # the sixth of eleven: 0.1 + 8.8 / 3001.5


def test_half_differs_by_less_than_is_printed(usual: EvidenceRun) -> None:
    """Medians of the first and last start are 8 us apart; of eleven points the sixth is 8 / 2501.5 = 0.3198 %."""
    assert "at 0; half of all by less than 0.32%, and the largest difference is 0.8%" in again(usual)
    alike = changed(usual, lambda row: replace(row, latency_us=100.0))
    assert "half of all by less than 0.01%" in again(alike)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("NCCL 2.28.9 /opt/a/lib-1/libnccl.so.2 refuses it", "NCCL 2.28.9 libnccl.so.2 refuses it"),
        ("cannot open '/a/b.so' (/c/d e)", "cannot open 'b.so' (d e)"),
        ("see https://x.org/a/b and GB/s, a/b or 1/2", "see https://x.org/a/b and GB/s, a/b or 1/2"),
    ],
)
def test_reasons_name_files_without_their_folders(usual: EvidenceRun, reason: str, told: str) -> None:
    rows = tuple(replace(row, reason=reason) if row.backend == "deepep_ll" else row for row in usual.rows)
    assert f"DeepEP LL: 2 points unsupported ({told})." in medians(replace(usual, rows=rows))


def test_withdrawn_repeats_are_counted_with_the_reason(usual: EvidenceRun) -> None:
    def flagged(row: Record) -> Record:
        return replace(row, flags=Flag.KNOWN_ISSUE) if row.backend in ("ag_rs", "onesided_fence") else row

    why = (Withdrawal(run_id=usual.run.run_id, backend="ag_rs", regime="steady", reason="its clock was wrong"),)
    run = replace(changed(usual, flagged), withdrawn={usual.run.run_id: why})
    text = medians(run)
    assert "AG/RS: 24 repeats of 2 points in steady left out (its clock was wrong)." in text
    assert "| AG/RS |" not in text
    assert "Fence:" not in text  # flagged by the run itself, for which there is no such reason
    assert "60 repeats flagged known_issue left out" in caption(run)
    table, below = leads(run).rsplit("\n\n", 1)
    assert "AG/RS" not in table
    assert below.endswith(" to the highest. Left out as withdrawn: steady of AG/RS (its clock was wrong).")
    assert "withdrawn" not in leads(usual)


def test_repeats_of_a_version_with_a_known_issue_are_counted_with_every_reason(usual: EvidenceRun) -> None:
    def told(row: Record) -> Record:
        version = {"ag_rs": "2.11.0+cu130", "deepep_v2": "deep-ep 2.1", "onesided_fence": "f00df00df00df00d"}
        flagged = row.backend in version and (row.backend, row.tokens_per_rank) != ("deepep_v2", 64)
        flags = Flag.KNOWN_ISSUE if flagged else ""
        return replace(row, backend_version=version.get(row.backend), flags=flags)

    issues = [
        {"versions": "<2.12", "reason": "sums may be late"},
        {"versions": "==2.11.0", "reason": "see /opt/a/notes"},
        {"versions": ">2.11.0", "reason": "of others"},
    ]
    plan = {"backends": {name: {**each, "known_issues": issues} for name, each in usual.backends.items()}}
    why = (Withdrawal(run_id=usual.run.run_id, backend="ag_rs", regime="steady", reason="its clock was wrong"),)
    run = replace(changed(usual, told), run=replace(usual.run, plan=plan), withdrawn={usual.run.run_id: why})
    text = medians(run)
    both = "its clock was wrong; sums may be late; see notes"
    assert f"AG/RS: 24 repeats of 2 points in steady left out ({both})." in text
    assert "DeepEP V2: 24 repeats of 2 points in steady left out (sums may be late)." in text
    assert "Fence:" not in text  # a hash is no version, so no issue can be the reason of its flag


def test_a_committed_run_is_read_with_what_is_withdrawn_of_it(tmp_path: Path) -> None:
    """By the folder that holds its tables."""
    from epcross.harness.analysis.evidence_run import committed_runs
    from epcross.harness.storing.store import merge

    run = run_of(tmp_path / "runs", launches=1)
    folder = tmp_path / "measured" / run.run.run_id
    merge(folder, [run.folder])
    entry = {"run_id": run.run.run_id, "backend": "ag_rs", "regime": "steady", "reason": "x"}
    (folder / "withdrawn.json").write_text(json.dumps([entry]))
    (read,) = committed_runs(tmp_path / "measured").values()
    assert set(run.series()) - set(read.series()) == {"ag_rs"}
    assert "AG/RS: 8 repeats of 2 points in steady left out (x)." in medians(read)


def test_what_is_left_out_as_withdrawn_is_told_by_reason(usual: EvidenceRun) -> None:
    """Regimes and backends without rows are not among it."""
    entries = [("ag_rs", "steady", "a"), ("deepep_v2", "steady", "a"), ("onesided_fence", "steady", "b")]
    entries += [("ag_rs", "entry", "a"), ("gone", "steady", "a")]
    names = ("backend", "regime", "reason")
    why = tuple(Withdrawal(run_id=usual.run.run_id, **dict(zip(names, each, strict=True))) for each in entries)
    gone = {entry.backend for entry in why}
    flagged = changed(usual, lambda row: replace(row, flags=Flag.KNOWN_ISSUE if row.backend in gone else ""))
    text = leads(replace(flagged, withdrawn={usual.run.run_id: why}))
    assert text == (
        "nothing of ours stands beside another backend. "
        "Left out as withdrawn: steady of Fence (b); steady of DeepEP V2; AG/RS (a)."
    )
