"""What was done before the window tells rows apart: in crossovers, verdicts of claims, legends and tables."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from analysis_values import write
from rich.console import Console
from test_layer_rows import early, late, layer_rows
from tests._points import small_point

from epcross.harness.analysis import frame
from epcross.harness.analysis.cells import cells
from epcross.harness.analysis.crossover import find
from epcross.harness.analysis.evidence_run import names
from epcross.harness.analysis.figures import domains
from epcross.harness.analysis.figures.canvas import Figure
from epcross.harness.analysis.inputs import layout_of, option_words, staged_before, staging_of
from epcross.harness.analysis.table import run_table
from epcross.harness.claims.selection import staged
from epcross.harness.commands.plan import _varied
from epcross.harness.errors import InputError
from epcross.harness.running.find_point import describe
from epcross.harness.terms import BackendKind, Phase, WeightFormat

INSIDE, BEFORE = (("staging", True),), (("staging", False),)


def ours(options):
    return layer_rows("ours", WeightFormat.FP8, early, options=options)


def fused(options):
    return layer_rows("fused", WeightFormat.FP8, late, kind=BackendKind.FUSED, compute="", options=options)


def loaded(folder: Path, *rows):
    return frame.load(write(folder, [row for each in rows for row in each]))


def test_rows_staged_before_are_not_set_beside_rows_staged_inside(tmp_path: Path) -> None:
    unlike = loaded(tmp_path / "unlike", ours(BEFORE), fused(INSIDE))
    assert find(unlike, "ours", "fused").empty
    with pytest.raises(
        InputError, match=r"staging: staged before, staging inside are mixed in one group.*mixed_inputs"
    ):
        find(unlike, "ours", "fused", by=["ep_size"])
    asked = find(unlike, "ours", "fused", mixed_inputs=True)
    assert asked["inputs"].tolist() == ["staged before against staging inside"]
    assert asked["state"].tolist() == ["crossed"]


def test_each_staging_is_a_group_of_its_own(tmp_path: Path) -> None:
    both = loaded(tmp_path / "both", ours(BEFORE), ours(INSIDE), fused(BEFORE), fused(INSIDE))
    assert find(both, "ours", "fused")["staging"].tolist() == ["staged before", "staging inside"]
    alike = find(both[both["staging"] == "staging inside"], "ours", "fused", mixed_inputs=True)
    assert alike["inputs"].tolist() == [""]
    with pytest.raises(InputError, match=r"staging: staged before, staging inside \(ours\)"):
        find(both, "ours", "fused", mixed_inputs=True)


def stage(backend, us, layout):
    rows = layer_rows(backend, WeightFormat.FP8, us, kind=BackendKind.EXPERTS, options=(("layout", layout),))
    return [replace(row, phase=Phase.EXPERTS) for row in rows]


def test_rows_by_expert_are_not_set_beside_rows_by_rank(tmp_path: Path) -> None:
    """Somebody has brought them to their experts before, which the other stage does itself."""
    rows = loaded(tmp_path / "rows", stage("mine", early, "rank_major"), stage("other", late, "expert_major"))
    assert set(rows["layout"]) == {"rank_major", "expert_major"}
    assert find(rows, "mine", "other").empty
    asked = find(rows, "mine", "other", mixed_inputs=True)
    assert asked["inputs"].tolist() == ["rank_major against expert_major"]


@pytest.mark.parametrize(
    ("kind", "options", "staging", "layout"),
    [
        ("layer", '{"staging":false}', "staged before", ""),
        ("fused", '{"staging":true}', "staging inside", ""),
        ("layer", "{}", "staging inside", ""),
        ("experts", '{"layout":"expert_major","staging":false}', "", "expert_major"),
        ("exchange", '{"staging":false,"layout":"x"}', "", ""),
        (None, "no JSON", "", ""),
        ("layer", "no JSON", "staging inside", ""),
    ],
)
def test_the_words_for_it(kind: str | None, options: str, staging: str, layout: str) -> None:
    assert (staging_of(kind, options), layout_of(kind, options)) == (staging, layout)
    assert staged_before(options) == ('"staging":false' in options)


def test_options_have_the_words_of_titles() -> None:
    told = [
        option_words("staging", True),
        option_words("staging", False),
        option_words("layout", "x"),
        option_words("sms", 24),
    ]
    assert told == ["staging inside", "staged before", "layout x", "sms=24"]


def test_legends_and_tables_have_the_words_of_titles() -> None:
    rows = [*ours(BEFORE), *ours(INSIDE)]
    found = cells(rows)
    assert {cell.series.name for cell in found} == {"ours + gather_gemm fp8 weights"}  # the title tells the two apart
    assert {re.sub(".*weights, (.*);.*", r"\1", cell.setting) for cell in found} == {"staged before", "staging inside"}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(run_table(rows))
    text = " ".join(console.export_text().split())
    assert "staging=" not in text
    assert "staged before" in text


def test_a_figure_of_domains_tells_layers_apart(tmp_path: Path) -> None:
    """By staging in words, and by the formats of weights, whose rows were one line."""
    rows = loaded(tmp_path / "rows", ours(BEFORE), ours(INSIDE), layer_rows("ours", WeightFormat.BF16, late))
    drawn = domains.draw(rows)
    assert isinstance(drawn, Figure)
    assert {line["series"] for line in drawn.data} == {
        "ours, bf16 weights, staging inside",
        "ours, fp8 weights, staged before",
        "ours, fp8 weights, staging inside",
    }


def test_a_claim_says_what_was_done_before_the_window(tmp_path: Path) -> None:
    rows = loaded(tmp_path / "rows", ours(BEFORE), fused(INSIDE))
    of = {name: rows[rows["backend"] == name] for name in ("ours", "fused")}
    assert staged(of["ours"], of["fused"]) == "inputs staged before against staging inside"
    assert staged(of["ours"], of["ours"]) == "inputs staged before"
    assert staged(of["fused"], of["fused"].iloc[:0]) == ""


def test_a_point_the_plan_and_the_series_of_documents_have_the_same_words() -> None:
    inside, before, by_expert = (
        replace(small_point(), options=options, compute="deepgemm", compute_options=(("form", "masked"),))
        for options in ((("sms", 24), ("staging", True)), (("staging", False),), (("layout", "expert_major"),))
    )
    assert describe(inside).startswith("test sms=24 staging inside with deepgemm form=masked, EP 2, ")
    assert describe(before).startswith("test staged before with ")
    assert describe(by_expert).startswith("test layout expert_major with ")
    by_rank = replace(by_expert, options=(("layout", "rank_major"),))
    varied = _varied((inside, before, by_expert, by_rank))  # all have the same number of SMs
    assert list(varied.values()) == ["staging inside", "staged before", "layout expert_major", "layout rank_major"]
    rows = [row for layout in ("rank_major", "expert_major") for row in stage("mine", early, layout)]
    assert {names(rows)(row) for row in rows} == {
        f"mine compute=gather_gemm layout {layout}" for layout in ("rank_major", "expert_major")
    }
