"""What documents say of layers and expert stages, from rows with known times."""

import json
from dataclasses import replace

import pytest
from peer_runs import run_of

from epcross.harness.analysis.evidence_figure import HIGHEST, cut, is_relative, round_trip_figure
from epcross.harness.analysis.evidence_layers import bound, shares, stages
from epcross.harness.analysis.evidence_leads import PAIRED, leads
from epcross.harness.analysis.evidence_peers import medians
from epcross.harness.analysis.evidence_run import EvidenceRun
from epcross.harness.analysis.evidence_text import caption, figure
from epcross.harness.record import Record
from epcross.harness.terms import Phase, Regime, Status


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> EvidenceRun:
    return run_of(tmp_path_factory.mktemp("usual"))


def test_shares_set_communication_beside_its_layer_with_and_without_waiting(usual: EvidenceRun) -> None:
    """Of 1000 us a quarter is communication, of which the rank with more experts to read has a tenth."""
    run = usual
    assert shares(run) == "no layer of this run was timed with and without its exchange"
    layers = [replace(row, phase=Phase.LAYER) for row in run.rows if row.status == Status.OK]
    parts = [
        replace(row, phase=Phase.LAYER_COMM, latency_us=us / 4, latency_min_us=us / 40)
        for row in layers
        if (us := row.latency_us)
    ]
    text = shares(replace(run, rows=(*layers, *parts)))
    assert (
        "| EP 2, steady | tokens per rank | layer (us) | communication, rank that waits least (us) | share "
        "| with waiting (us) | share |"
    ) in text
    assert "| Sentinel | 8 | 2010 | 50.2 [50.0..50.5] | 0.02 | 502 [500..505] | 0.25 |" in text
    assert "| AG/RS | 1 | 2510 | 62.7 [62.5..63.0] | 0.02 | 627 [625..630] | 0.25 |" in text
    assert "| 64 |" not in text
    n = "Each median is of n = 20 repeats. Waiting included, "
    assert text.endswith(f"{n}steady: {layers[0].estimator}.")
    spans = [replace(row, regime=Regime.SPANS, latency_us=(row.latency_us or 0) / 2) for row in (*layers, *parts)]
    assert "Of spans" not in shares(replace(run, rows=(*layers, *parts, *spans)))
    spans = [replace(row, n_samples=32) for row in spans]
    both = shares(replace(run, rows=(*layers, *parts, *spans)))
    assert both.endswith(" Of spans the rank that waits least is that of the pair in which it waits least, too.")
    assert both.startswith(text.rpartition("\n\n")[0])
    assert f"{n}spans: {layers[0].estimator}; steady: " in both
    assert "| EP 2, spans | tokens per rank | layer (us) |" in both
    assert "| Sentinel | 8 | 1005 | 50.2 [50.0..50.5] | 0.05 | 251 [250..252] | 0.25 |" in both


def test_our_expert_stage_is_set_beside_the_fastest_other_on_the_same_rows(usual: EvidenceRun) -> None:
    assert stages(usual) == "our expert stage stands beside no other in this run"
    compute = {"onesided_sentinel": "gather_gemm", "deepep_v2": "deepgemm", "ag_rs": "torch_grouped"}
    rows = [
        replace(row, backend="onesided_fence", phase=Phase.EXPERTS, compute=compute[row.backend])
        for row in usual.rows
        if row.status == Status.OK and row.backend in compute
    ]
    text = stages(replace(usual, rows=tuple(rows)))
    head = "| tokens per rank, EP 2, steady | ours (us) | best other, same rows (us) | other / ours "
    assert head + "| best, rows by expert (us) | other / ours |" in text
    assert "| 1 | 1010 | torch_grouped 2510 | 2.49 [2.47..2.50] | - | - |" in text
    assert "| 64 | 6010 | deepgemm 3010 | 0.501 [0.500..0.502] | - | - |" in text
    assert text.endswith(f"\n\nEach median is of n = 20 repeats. {PAIRED}")
    assert len(text.splitlines()) == 2 + 3 + 2
    by_expert = {True: '{"layout": "expert_major"}', False: '{"layout": "rank_major"}'}
    rows = [replace(row, options=by_expert[row.compute == "deepgemm"]) for row in rows]
    text = stages(replace(usual, rows=tuple(rows)))
    assert "| 1 | 1010 | torch_grouped 2510 | 2.49 [2.47..2.50] | deepgemm 3010 | 2.98 [2.96..3.00] |" in text
    assert "| 64 | 6010 | - | - | deepgemm 3010 | 0.501 [0.500..0.502] |" in text


def test_what_reading_the_weights_alone_takes_bounds_every_lead(usual: EvidenceRun) -> None:
    """1.2 GB at 4800 GB/s: 250 us, though the others take 2500 and more."""
    assert bound(usual) == "the nominal rate of this memory is not known here: no GPU"
    on = {
        name: replace(usual, run=replace(usual.run, environment={"gpus": [{"name": each} for each in name.split("+")]}))
        for name in ("NVIDIA H200", "NVIDIA H200+NVIDIA H100 80GB HBM3", "NVIDIA X")
    }
    assert bound(on["NVIDIA H200"]) == "no layer of ours stands beside another in this run"
    rows = tuple(replace(row, expert_weight_bytes=12 * 10**8) for row in usual.rows)
    text = bound(replace(on["NVIDIA H200"], rows=rows))
    assert text.splitlines()[0] == (
        "| tokens per rank, EP 2, steady | weights to read (GB) | at 4.8 TB/s (us) "
        "| ours (us) | best other (us) | other / reading alone |"
    )
    assert "| 1 | 1.2 | 250 | 1010 | 2510 | 10.04 |" in text
    assert "| 64 | 1.2 | 250 | 2010 | 3010 | 12.04 |" in text
    assert bound(replace(on["NVIDIA X"], rows=rows)).endswith("not known here: NVIDIA X")
    assert bound(replace(on["NVIDIA H200+NVIDIA H100 80GB HBM3"], rows=rows)).startswith("the nominal rate")


def staged(run: EvidenceRun, *backends: str) -> EvidenceRun:
    """Inputs of these are staged before the window, of others inside."""

    def told(row: Record) -> Record:
        return replace(row, options=json.dumps({"staging": row.backend not in backends}))

    return replace(run, rows=tuple(map(told, run.rows)))


def test_what_is_staged_before_stands_beside_its_like_alone(usual: EvidenceRun) -> None:
    run = staged(usual, "ag_rs", "onesided_fence")
    assert [run.words(panel) for panel in run.panels()] == ["EP 2, staging inside", "EP 2, staged before"]
    text = leads(run)
    assert "| 1 | Sentinel 1010 | DeepEP V2 3010 | 2.98" in text
    assert "| 1 | Fence 1510 | AG/RS 2510 | 1.66" in text
    assert "staging=" not in text + medians(run)  # panels say it
    assert [line for line in medians(run).splitlines() if "Sentinel" in line] == ["| Sentinel | 1010 | 2010 | 6010 |"]


def test_layers_are_drawn_in_multiples_of_ours(usual: EvidenceRun) -> None:
    assert not is_relative(usual)
    layers = staged(replace(usual, rows=tuple(replace(row, phase=Phase.LAYER) for row in usual.rows)), "ag_rs")
    assert is_relative(layers)
    assert figure(layers).startswith("![Layer, in multiples of ours, against tokens per rank](")
    drawn = round_trip_figure(layers).decode()
    assert "layer, multiple of ours" in drawn
    assert "staging inside" in drawn
    assert "staged before" not in drawn  # nothing of ours is there
    assert f">{HIGHEST:g}<" in drawn
    assert ">3<" not in drawn


def test_a_caption_says_where_lines_are_cut(usual: EvidenceRun) -> None:
    """Ours take 1000, 1800 and 2000 us at 1, 8 and 64 tokens. At 1 two of the others take more than twice as long, at 8
    one, and at 64 Sentinel takes three times as long as Fence."""
    assert cut(usual) == ""  # microseconds have no end
    layers = replace(usual, rows=tuple(replace(row, phase=Phase.LAYER) for row in usual.rows))
    words = (
        "*Lines are cut at 2 times ours, and 4 of 11 medians lie above, up to 2.99 times. Median and range of n = 20"
    )
    assert words in figure(layers)
    near = tuple(
        row for row in layers.rows if row.backend in ("onesided_fence", "deepep_v2") and row.tokens_per_rank > 1
    )
    assert cut(replace(layers, rows=near)) == ""
    at_the_edge = tuple(
        replace(row, latency_us=(row.latency_us or 0) * 1.2) if row.backend == "deepep_v2" else row for row in near
    )
    assert cut(replace(layers, rows=at_the_edge)) == "bands are cut at 2 times ours"


def test_a_caption_is_about_what_is_drawn(usual: EvidenceRun) -> None:
    """A panel without ours is not drawn: its formats and repeats are no part of the caption, which names it."""
    layers = replace(usual, rows=tuple(replace(row, phase=Phase.LAYER, weight_format="fp8") for row in usual.rows))
    fp4 = [
        replace(row, weight_format="fp4", point_id=f"{row.point_id}-fp4", dispatch_format="mxfp8")
        for row in layers.rows
        if row.backend == "deepep_v2"
    ]
    both = replace(layers, rows=(*layers.rows, *fp4))
    alone, told = (figure(run).partition("\n\n*")[2] for run in (layers, both))
    assert told == alone.replace(
        " times. Median", " times; no panel of EP 2, mxfp8 out, fp4 weights, where none of ours was measured. Median"
    )
    assert "mxfp8 out, bf16 back, fp4 weights" in caption(both)  # of tables, which have it
    drawn = round_trip_figure(both).decode()
    assert "fp8 weights" in drawn
    assert "fp4" not in drawn
