"""The factors that layers add: an expert stage and a weight format, and nothing for an exchange."""

from dataclasses import replace

import pytest
from planning import plan_of, problems_of, the_problem

from epcross.harness.planning.plan import Plan
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Point
from epcross.harness.terms import BackendKind, Phase, Regime, RowFormat, WeightFormat

LAYERS = ("sweep=quickstart", "device=cuda", "ep_size=2", "tokens_per_rank=8", "regime=steady", "model=deepseek_v3")


def test_an_exchange_has_none_of_them_and_its_id_is_what_it_was():
    (point,) = plan_of(*LAYERS, "backend=onesided_fence").points
    assert (point.kind, point.compute, point.weight_format) == (BackendKind.EXCHANGE, "", None)
    assert not {"kind", "compute", "compute_options", "weight_format"} & point.factors().keys()
    assert point.phases == (Phase.ROUND_TRIP,)


def test_a_point_without_the_new_fields_has_the_id_of_before():
    """Of evidence that was taken before there were layers."""
    (point,) = plan_of(
        "sweep=quickstart", "backend=shm_fence", "ep_size=2", "tokens_per_rank=1", "regime=steady"
    ).points
    older = {
        k: v for k, v in point.to_json().items() if k not in ("kind", "compute", "compute_options", "weight_format")
    }
    stored = plan_of(
        "sweep=quickstart", "backend=shm_fence", "ep_size=2", "tokens_per_rank=1", "regime=steady"
    ).to_json()
    stored["points"] = [older]
    assert Plan.from_json(stored).points[0].point_id == point.point_id


def test_a_sweep_may_name_both_and_the_axes_of_layers_do_not_multiply_exchanges():
    plan = plan_of(*LAYERS, "backend=onesided_fence,layer_onesided", "compute=gather_gemm,torch_grouped")
    assert [(p.backend, p.compute) for p in plan.points] == [
        ("onesided_fence", ""),
        ("layer_onesided", "gather_gemm"),
        ("layer_onesided", "torch_grouped"),
    ]
    plan = plan_of(*LAYERS, "backend=onesided_fence,megamoe", "weight_format=fp8,bf16")
    assert [(p.backend, p.weight_format) for p in plan.points] == [
        ("onesided_fence", None),
        ("megamoe", WeightFormat.FP8),
        ("megamoe", WeightFormat.BF16),
    ]


def test_the_backends_file_names_the_usual_stage_and_activations_the_usual_weights():
    points = plan_of(*LAYERS, "backend=layer_onesided,layer_deepep_v2,megamoe_mxfp4", "dispatch_format=bf16,fp8").points
    assert [(p.backend, p.compute, p.dispatch_format, p.weight_format) for p in points] == [
        ("layer_onesided", "gather_gemm", RowFormat.BF16, WeightFormat.BF16),
        ("layer_onesided", "gather_gemm", RowFormat.FP8, WeightFormat.FP8),
        ("layer_deepep_v2", "deepgemm", RowFormat.BF16, WeightFormat.BF16),
        ("layer_deepep_v2", "deepgemm", RowFormat.FP8, WeightFormat.FP8),
        ("megamoe_mxfp4", "", RowFormat.BF16, WeightFormat.FP4),
        ("megamoe_mxfp4", "", RowFormat.FP8, WeightFormat.FP4),
    ]
    assert [p.kind for p in points[::2]] == [BackendKind.LAYER, BackendKind.LAYER, BackendKind.FUSED]


def test_each_kind_plans_its_own_phases():
    rows = {
        (p.backend, p.regime): p.phases
        for p in plan_of(
            *(w for w in LAYERS if not w.startswith("regime")),
            "regime=steady,entry,spans",
            "backend=layer_onesided,megamoe",
        ).points
    }
    assert rows["layer_onesided", Regime.STEADY] == (Phase.LAYER, Phase.LAYER_COMM)
    assert rows["layer_onesided", Regime.ENTRY] == (Phase.LAYER,)
    assert set(rows["layer_onesided", Regime.SPANS]) == {Phase.DISPATCH, Phase.COMBINE, Phase.LAYER, Phase.LAYER_COMM}
    assert {rows["megamoe", regime] for regime in Regime} == {(Phase.LAYER,)}


def test_options_of_the_stage_are_factors_with_their_types():
    (point,) = plan_of(*LAYERS, "backend=layer_onesided", "compute=deepgemm", "compute.options.form=masked").points
    assert point.compute_options == (("form", "masked"),)
    (usual,) = plan_of(*LAYERS, "backend=layer_onesided", "compute=deepgemm").points
    assert usual.compute_options == (("form", "auto"),)
    assert usual.point_id != point.point_id
    problem = the_problem(*LAYERS, "backend=layer_onesided", "compute=deepgemm", "compute.options.form=3")
    assert "compute 'deepgemm': option form is 3, but must be text" in problem


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["backend=layer_onesided", "compute=gathr_gemm"], "unknown compute 'gathr_gemm'; did you mean 'gather_gemm'?"),
        (["backend=layer_onesided", "compute.options.shape=2"], "no expert stage of the sweep has the option 'shape'"),
        (["backend=onesided_fence", "compute=gather_gemm"], "compute is read by layers and expert stages only"),
        (["backend=onesided_fence", "weight_format=fp8"], "weight_format is read by layers and expert stages only"),
        (["backend=layer_onesided", "weight_format=fp6"], "weight_format is 'fp6'"),
    ],
)
def test_what_is_wrong_is_told(words, says):
    assert any(says in problem for problem in problems_of(*LAYERS, *words))


def test_a_plan_keeps_the_stages_that_its_points_name():
    plan = plan_of(*LAYERS, "backend=layer_onesided", "compute=deepgemm,torch_grouped")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert sorted(again.backends["layer_onesided"].computes) == ["deepgemm", "torch_grouped"]
    config = BackendConfig.from_json(plan.backends["layer_onesided"].to_json())
    assert config == plan.backends["layer_onesided"]
    (point, _) = plan.points
    assert Point.from_json(point.to_json()) == point
    assert replace(point, weight_format=WeightFormat.FP4).point_id != point.point_id


def test_what_a_stage_cannot_do_is_a_row_and_not_an_error():
    plan = plan_of(*LAYERS, "backend=layer_onesided", "compute=torch_grouped", "dispatch_format=fp8")
    (item,) = plan.impossible
    assert item.status == "unsupported"
    assert "serves bf16 rows and weights only" in item.reason


def test_a_sweep_that_says_what_the_model_has_anyway_names_no_other_model():
    """A claim about a model looks for rows of that name, and found none in a sweep of two numbers of experts."""
    words = ("backend=layer_onesided", "dispatch_format=fp8")
    names = {p.model.num_experts: p.model.name for p in plan_of(*LAYERS, *words, "model.num_experts=256,64").points}
    assert names == {256: "deepseek_v3", 64: "deepseek_v3,num_experts=64"}
    (plain,) = plan_of(*LAYERS, *words).points
    (told,) = plan_of(*LAYERS, *words, "model.num_experts=256").points
    assert plain.point_id == told.point_id
