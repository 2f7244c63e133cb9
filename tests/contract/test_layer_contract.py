"""The contract of layers: the stand-in in one process, and adapters of libraries against their imitations."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed; make torch")

import torch
from tests._torch_layer import PlainExperts, layer
from tests.contract.threads import on_ranks
from tests.fakes.deep_ep import install_deep_ep
from tests.fakes.flashinfer import install_flashinfer
from tests.fakes.world import problems

from epcross.harness.backends import deepep_ll, deepep_normal, split_layer
from epcross.harness.backends.layer_deepep import LayerDeepEPLowLatency, LayerDeepEPNormal, LayerDeepEPV2
from epcross.harness.backends.layer_flashinfer import LayerFlashInfer
from epcross.harness.terms import BackendKind, Domain, Sharing
from epcross.harness.verification.contract import refusal, run_case
from epcross.harness.verification.layer_contract import LayerVisit, suite
from epcross.kernels.experts import capability, deepgemm
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE, DeepGemm
from epcross.kernels.experts.formats import RowScaling
from epcross.kernels.experts.quantise import quantise_rows

INSTALL = {
    LayerDeepEPV2: install_deep_ep,
    LayerDeepEPNormal: install_deep_ep,
    LayerDeepEPLowLatency: install_deep_ep,
    LayerFlashInfer: install_flashinfer,
}


@pytest.fixture(autouse=True)
def small(monkeypatch, one_thread):
    monkeypatch.setattr(deepep_ll, "MAX_TOP_K", 99)
    monkeypatch.setattr(deepep_normal, "RANKS", (2, 3))


def in_one_launch():
    return [
        replace(case, point=replace(case.point, domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH))
        for case in suite(BackendKind.LAYER, 2, "torch_layer", compute="plain_experts")
    ]


@pytest.mark.parametrize("case", in_one_launch(), ids=lambda case: case.name)
def test_the_stand_in_passes(case):
    assert refusal(layer, case) is None
    (found,) = on_ranks(1, lambda group: run_case(layer, case, group, 30, visit_type=LayerVisit))
    assert found == []


def visit_stage(compute, case):
    """What is wrong with an expert stage at a case, all ranks in one process; nothing of a case that it refuses."""
    if refusal(lambda: layer(compute), case) is not None:
        return []
    (found,) = on_ranks(1, lambda group: run_case(lambda: layer(compute), case, group, 30, visit_type=LayerVisit))
    return found or []


def visited(backend, name, compute=PlainExperts):
    layers = suite(BackendKind.LAYER, 2, backend.name, compute="plain_experts", shape=backend.contract_shape)
    case = next(case for case in layers if case.name == name)
    case = replace(case, point=replace(case.point, domain=Domain.NVLINK))

    def make():
        made = backend(backend.option_defaults())
        made.use_compute(compute)
        return made

    if refused := make().unsupported(case.point):
        return [f"unsupported: {refused}"]
    return problems(make, case, 2, LayerVisit)


@pytest.mark.parametrize("backend", INSTALL, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["ragged_bf16_bf16", "rotated_fp8_fp8", "masked_ids_fp8_fp4"])
def test_layers_around_other_exchanges(backend, name, monkeypatch):
    INSTALL[backend](monkeypatch)
    assert visited(backend, name) == []


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_rows_by_expert_have_room_for_whole_tiles_of_masked_products(tokens):
    case = next(c for c in suite(BackendKind.LAYER, 2, "layer_deepep_ll", compute="deepgemm") if "fp8_fp8" in c.name)
    point = replace(case.point, domain=Domain.NVLINK, tokens=(tokens, tokens), max_tokens_per_rank=tokens)
    made = LayerDeepEPLowLatency(LayerDeepEPLowLatency.option_defaults())
    made.use_compute(DeepGemm)
    room = made.exchange.capacity_rows(point)
    assert 2 * tokens <= room < 2 * tokens + MASKED_ROWS_MULTIPLE
    assert room % MASKED_ROWS_MULTIPLE == 0
    assert "multiple" not in (made.unsupported(point) or "")


class DropsAnExpert(PlainExperts):
    def _made(self, matrices, expert, rows, scales):
        made = super()._made(matrices, expert, rows, scales)
        return made * 0 if expert == 1 else made


@pytest.mark.parametrize("backend", INSTALL, ids=lambda backend: backend.name)
def test_a_dropped_expert_is_found_behind_any_exchange(backend, monkeypatch):
    INSTALL[backend](monkeypatch)
    found = visited(backend, "plain_fp8_fp8", DropsAnExpert)
    assert any("tokens wrong" in text for text in found), found


def test_rows_that_are_cast_by_other_operations_than_are_declared_are_found(monkeypatch):
    install_deep_ep(monkeypatch)
    monkeypatch.setattr(LayerDeepEPLowLatency, "row_scaling", RowScaling.QUOTIENT)
    found = visited(LayerDeepEPLowLatency, "plain_fp8_fp8")
    assert any("wrong outputs" in text for text in found), found


@pytest.fixture
def capability_10(monkeypatch):
    """As on a GPU whose tensor cores read scales that are powers of two, and no others."""
    monkeypatch.setattr(capability, "major_capability", lambda: 10)
    monkeypatch.setattr(deepgemm, "major_capability", lambda: 10)


class OnlyPowersOfTwo(PlainExperts):
    """Refuses what those tensor cores would read wrongly."""

    def prepare(self, shape, layout, weights):
        copy = weights.copies[0]
        if shape.weight_format == "fp8":
            assert bool((torch.frexp(copy.gate_up_scales)[0] == 0.5).all())
        super().prepare(shape, layout, weights)

    def _made(self, matrices, expert, rows, scales):
        if self.shape.row_format == "fp8":
            scale = scales.contiguous().view(torch.float32)
            assert bool((torch.frexp(scale)[0] == 0.5).all())
        return super()._made(matrices, expert, rows, scales)


@pytest.mark.parametrize("backend", INSTALL, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["plain_fp8_fp8", "ragged_fp8_fp4", "plain_bf16_bf16"])
def test_scales_are_powers_of_two_where_tensor_cores_read_no_others(backend, name, monkeypatch, capability_10):
    INSTALL[backend](monkeypatch)
    assert visited(backend, name, OnlyPowersOfTwo) == []


@pytest.mark.parametrize("formats", ["fp8_fp8", "fp8_fp4"])
def test_deepgemm_is_not_refused_for_its_scales_there(formats, capability_10):
    (case,) = [
        c for c in suite(BackendKind.LAYER, 2, "layer_deepep_v2", compute="deepgemm") if c.name == f"plain_{formats}"
    ]
    made = LayerDeepEPV2(LayerDeepEPV2.option_defaults())
    made.use_compute(DeepGemm)
    assert made.unsupported(replace(case.point, domain=Domain.NVLINK)) is None


def test_rows_with_other_scales_are_found_there(monkeypatch, capability_10):
    monkeypatch.setattr(split_layer, "quantise_rows", lambda *given, power_of_two: quantise_rows(*given))
    case = next(case for case in in_one_launch() if case.name == "plain_fp8_fp8")
    (found,) = on_ranks(1, lambda group: run_case(layer, case, group, 30, visit_type=LayerVisit))
    assert "tokens wrong" in str(found), found
