"""Rows of layers in the analysis: series, conditions, verdicts between equal formats, labels where they differ."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analysis_values import point, record, write

from epcross.harness.analysis import frame
from epcross.harness.analysis.cells import cells
from epcross.harness.analysis.compare import compare
from epcross.harness.analysis.crossover import find
from epcross.harness.analysis.table import run_table
from epcross.harness.claims.selection import of_layers
from epcross.harness.errors import InputError
from epcross.harness.measuring.expert_fields import expert_fields
from epcross.harness.report.content import document
from epcross.harness.report.document import Paragraph
from epcross.harness.storing.rows import check_record
from epcross.harness.terms import BackendKind, Phase, Regime, RowFormat, WeightFormat

TOKENS = (1, 8, 64, 512)


def layer_rows(backend, weights, us, *, kind=BackendKind.LAYER, compute="gather_gemm", comm=None, options=()):
    found = []
    for tokens in TOKENS:
        of = replace(
            point(backend, tokens),
            kind=kind,
            compute=compute,
            weight_format=weights,
            dispatch_format=RowFormat.FP8,
            options=options,
        )
        for launch in range(5):
            for chain in range(2):
                repeat = {"launch": launch, "chain": chain, "repeat": 2 * launch + chain}
                found.append(record(of, us(tokens) * (1 + 0.001 * repeat["repeat"]), Phase.LAYER, **repeat))
                if comm is not None:
                    found.append(record(of, comm, Phase.LAYER_COMM, **repeat))
    return found


def early(tokens):
    return 100 + 4 * tokens


def late(tokens):
    return 200 + 2 * tokens


@pytest.fixture
def rows(tmp_path: Path):
    return frame.load(
        write(
            tmp_path / "rows",
            [
                *layer_rows("ours", WeightFormat.FP8, early, comm=20.0),
                *layer_rows("fused", WeightFormat.FP8, late, kind=BackendKind.FUSED, compute=""),
                *layer_rows("fp4", WeightFormat.FP4, late, kind=BackendKind.FUSED, compute=""),
                *(record(point("exchange", tokens)) for tokens in TOKENS),
            ],
        )
    )


def test_rows_of_every_kind_may_be_stored():
    for row in (*layer_rows("ours", WeightFormat.FP8, early, comm=3.0), record(point("exchange", 1))):
        assert check_record(row) == []
    wrong = replace(layer_rows("ours", WeightFormat.FP8, early)[0], phase=Phase.ROUND_TRIP)
    assert check_record(wrong) == ["phase round_trip is not timed in regime steady, of kind layer"]


def test_no_value_that_tells_series_apart_is_missing(rows):
    assert not rows[list(frame.SERIES)].isna().any().any()
    told = rows.groupby("backend", observed=True)[["kind", "compute", "weight_format"]].first()
    assert told.loc["exchange"].tolist() == ["exchange", "none", "none"]
    assert told.loc["ours"].tolist() == ["layer", "gather_gemm", "fp8"]
    assert told.loc["fp4"].tolist() == ["fused", "none", "fp4"]


def test_a_crossover_is_called_between_equal_formats(rows):
    found = find(rows[rows["phase"] == "layer"], "ours", "fused")
    assert found["state"].tolist() == ["crossed"]
    assert 8 < found["estimate"].iloc[0] < 64  # 100 + 4 t = 200 + 2 t at 50


def test_between_other_formats_only_if_asked_and_then_it_says_so(rows):
    layers = rows[rows["phase"] == "layer"]
    assert find(layers, "ours", "fp4").empty
    asked = find(layers, "ours", "fp4", mixed_formats=True)
    assert asked["formats"].tolist() == ["fp8 x fp8 against fp8 x fp4"]
    assert find(layers, "ours", "fused", mixed_formats=True)["formats"].tolist() == [""]
    with pytest.raises(InputError, match="weight_format"):
        find(layers, "ours", "fp4", by=["ep_size"])


def test_runs_of_layers_are_compared_and_their_layer_decides(rows):
    compared = compare(rows, rows)
    assert set(compared.loc[compared["headline"].astype(bool), "phase"]) == {"layer", "round_trip"}
    assert set(compared["verdict"]) <= {"equal", "unclear"}


def test_figures_and_tables_tell_layers_by_their_experts_and_weights():
    records = [*layer_rows("ours", WeightFormat.FP8, early), *layer_rows("ours", WeightFormat.BF16, late)]
    assert {cell.series.name for cell in cells(records)} == {
        "ours + gather_gemm fp8 weights",
        "ours + gather_gemm bf16 weights",
    }
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(run_table(records))
    text = console.export_text()
    assert "steady: layer in us" in text
    assert "gather_gemm" in text


def test_a_claim_says_formats_and_how_communication_was_told_apart(rows):
    ours = rows[rows["backend"] == "ours"]
    assert of_layers(ours) == (
        "activations x weights fp8 x fp8; communication is the layer's period less that of the layer on rows in place, "
        "of the rank that waits least for others with more experts to read"
    )
    spans = ours.assign(regime=str(Regime.SPANS))
    assert "communication is the spans of the dispatch and combine kernels" in of_layers(spans)
    assert of_layers(rows[rows["backend"] == "exchange"]) == ""


def test_what_experts_had_to_do():
    of = replace(point("ours", 3), kind=BackendKind.LAYER, weight_format=WeightFormat.BF16)
    first = np.array([[0, 1], [1, -1], [4, 1]], np.int32)
    second = np.array([[2, 3], [2, 3], [2, 3]], np.int32)
    fields = expert_fields(of, [(first, first), (second, second)])
    expert_bytes = 2 * 3 * of.model.hidden * of.model.intermediate
    assert fields == {
        "expert_weight_bytes": 2 * expert_bytes,  # rank 0 reads two experts in either set
        "experts_hit": (2 + 1 + 2 + 0) / 4,
        "tokens_per_expert_min": 0,
        "tokens_per_expert_mean": pytest.approx((10 + 12) / 16),
        "tokens_per_expert_max": 6,
    }


def test_what_one_ranks_experts_had_to_do():
    of = replace(point("ours", 3), kind=BackendKind.EXPERTS, weight_format=WeightFormat.BF16)
    first = np.array([[0, 1], [1, -1], [4, 1]], np.int32)
    second = np.array([[2, 3], [2, 3], [2, 3]], np.int32)
    fields = expert_fields(of, [(first, first), (second, second)], rank=1)  # slots 4 to 7: slot 4, twice, in one set
    assert fields == {
        "expert_weight_bytes": round(0.5 * 2 * 3 * of.model.hidden * of.model.intermediate),
        "experts_hit": 0.5,
        "tokens_per_expert_min": 0,
        "tokens_per_expert_mean": 2 / 8,
        "tokens_per_expert_max": 2,
    }


def test_a_report_draws_layers_in_a_setting_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import report_runs
    from report_runs import make_run, points

    from epcross.harness.analysis import material, plots
    from epcross.harness.analysis.figures.canvas import Figure

    share = {Phase.LAYER: 1.0, Phase.LAYER_COMM: 0.3, Phase.ROUND_TRIP: 1.0}
    monkeypatch.setattr(report_runs, "unit_of", _unit_of(report_runs, share))
    exchanges = points(regimes=(Regime.STEADY,))
    layers = [
        replace(one, kind=BackendKind.LAYER, compute="gather_gemm", weight_format=weights)
        for one in points(("shm_fence",), regimes=(Regime.STEADY,))
        for weights in (WeightFormat.BF16, WeightFormat.FP8)
    ]
    made = material.load([make_run(tmp_path, [*exchanges, *layers])])
    words = [block.text for block in document(made).sections[0].blocks if isinstance(block, Paragraph)]
    assert any(text.startswith("Least median round trip or layer, where it is 3% ahead") for text in words)
    scenes = plots.scenes(made)
    assert sorted(scene.phase for scene in scenes) == [Phase.LAYER, Phase.LAYER, Phase.ROUND_TRIP]
    of_weights = {
        name: scene
        for scene in scenes
        if scene.phase is Phase.LAYER
        for name in {cell.series.name for cell in scene.cells}
    }
    assert set(of_weights) == {"shm_fence + gather_gemm bf16 weights", "shm_fence + gather_gemm fp8 weights"}
    assert [scene.words for scene in of_weights.values()] != ["", ""]
    name, scene = next(iter(of_weights.items()))
    drawn = {figure.name.removesuffix(scene.suffix): figure for figure in plots.draw(scene)}
    latency, ratio = drawn["latency"], drawn["bandwidth"]
    assert isinstance(latency, Figure)
    assert {line["series"] for line in latency.data} == {name}  # other weights are other work
    assert not isinstance(ratio, Figure)  # a layer moves rows, and does more


def _unit_of(report_runs, share):
    """Latencies of layers by the model of round trips."""
    from store_values import make_unit

    def unit_of(run, point, launch, change):
        made = make_unit(
            point, launch, context=replace(report_runs.CONTEXT, run_id=run.run_id, allocation_id=run.run_id)
        )

        def measured(row):
            value = report_runs.model_us(row.backend, row.tokens_per_rank) * (1 + 0.01 * row.repeat) * share[row.phase]
            return replace(row, latency_us=value, latency_min_us=value, latency_max_us=value, boundary="transfer")

        return replace(made, records=tuple(measured(row) for row in made.records))

    return unit_of
