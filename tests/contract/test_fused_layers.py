"""Adapters of fused layers against imitations of what the libraries document, on one rank."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed; make torch")

import torch
from tests.fakes.mega import install_deep_gemm, install_flashinfer_mega
from tests.fakes.world import problems

from epcross.harness.backends.megamoe import MegaMoE
from epcross.harness.backends.megamoe_flashinfer import MegaMoEMxfp4, MegaMoENvfp4, marlin
from epcross.harness.backends.megamoe_push import MegaMoEPush
from epcross.harness.terms import BackendKind, Domain, RowFormat
from epcross.harness.verification.layer_contract import LayerVisit, suite
from epcross.kernels.experts.intermediate import requantised

INSTALL = {MegaMoE: (install_deep_gemm, "fp8_fp8"), MegaMoEMxfp4: (install_flashinfer_mega, "fp8_fp4")}


pytestmark = pytest.mark.usefixtures("one_thread")


def visited(backend, name, **options):
    case = next(c for c in suite(BackendKind.FUSED, 1, backend.name) if c.name == name)
    case = replace(case, point=replace(case.point, domain=Domain.NVLINK))

    def make():
        return backend({**backend.option_defaults(), **options})

    if refused := make().unsupported(case.point):
        return [f"unsupported: {refused}"]
    return problems(make, case, 1, LayerVisit)


@pytest.mark.parametrize("backend", INSTALL, ids=lambda backend: backend.name)
@pytest.mark.parametrize("staging", [True, False], ids=["staged", "in place"])
def test_the_layer_is_what_the_oracle_says(backend, staging, monkeypatch):
    install, formats = INSTALL[backend]
    install(monkeypatch)
    for case in ("plain", "one_token", "masked_ids", "capacity_above_tokens"):
        assert visited(backend, f"{case}_{formats}", staging=staging) == []


@pytest.mark.parametrize(("backend", "fault"), [(MegaMoE, "dropped"), (MegaMoEMxfp4, "factors")])
def test_a_library_that_does_otherwise_is_caught(backend, fault, monkeypatch):
    install, formats = INSTALL[backend]
    install(monkeypatch, fault)
    found = visited(backend, f"plain_{formats}")
    assert any("tokens wrong" in text for text in found), found


def point(backend, formats="fp8_fp4", ranks=2, **changes):
    (case,) = [c for c in suite(BackendKind.FUSED, ranks, backend.name) if c.name == f"plain_{formats}"]
    return replace(case.point, domain=Domain.NVLINK, **changes)


@pytest.mark.parametrize(
    ("backend", "given", "says"),
    [
        (MegaMoEMxfp4, {"formats": "fp8_fp8"}, "megamoe_mxfp4 computes fp8 x fp4"),
        (MegaMoEMxfp4, {"ranks": 3}, "takes a power of two of ranks up to 32, not 3"),
        (MegaMoEMxfp4, {"tokens": (3, 4)}, "takes the same tokens on every rank"),
        (MegaMoEMxfp4, {"combine_format": RowFormat.FP8}, "combine_format=fp8 is not one"),
        (MegaMoENvfp4, {}, "takes 4 or 8 ranks, not 2"),
        (MegaMoEPush, {"formats": "bf16_bf16"}, "takes top_k 1, 2, 4, 6, 8, not 3"),
        (MegaMoE, {}, "megamoe computes bf16 x bf16, fp8 x fp8, mxfp8 x fp4"),
    ],
)
def test_limits_are_told(backend, given, says):
    assert says in (backend(backend.option_defaults()).unsupported(point(backend, **given)) or "")


def test_codes_in_marlins_order():
    codes = torch.arange(16, dtype=torch.uint8)  # values 0 to 15 of a row
    packed = (codes[0::2] | codes[1::2] << 4)[None]
    assert marlin(packed).tolist() == [[0x04, 0x15, 0x26, 0x37, 0x8C, 0x9D, 0xAE, 0xBF]]


def test_scales_of_nvfp4_are_the_same_powers_of_two_twice():
    made = MegaMoENvfp4(MegaMoENvfp4.option_defaults()).library_scales(torch.arange(122, 134, dtype=torch.uint8)[None])
    values = made.view(torch.float8_e4m3fn).float()
    assert values.tolist() == [[2.0**power for power in range(-5, 7) for _ in range(2)]]


def test_on_capability_10_the_intermediate_has_the_least_powers_of_two_that_hold_32_values():
    (rule,) = MegaMoE(MegaMoE.option_defaults()).arithmetics(point(MegaMoE, dispatch_format=RowFormat.MXFP8))
    values = torch.zeros(1, 64, dtype=torch.float64)
    values[0, 0], values[0, 1], values[0, 32] = 500.0, 18.0, 18.0  # by 2, whose steps at 18 are 2; and by 2**-4
    made = requantised(values, rule)
    assert made[0, [0, 1, 32]].tolist() == [512.0, 18.0, 18.0]
    values[0, 1] = 17.0
    assert requantised(values, rule)[0, 1] in (16.0, 17.0, 18.0)
    assert rule.weight_first
    assert rule.gate_up_rounded


def test_a_library_without_the_kernel_is_absent_and_a_point_says_nothing_of_it(monkeypatch):
    install_deep_gemm(monkeypatch)
    monkeypatch.setattr("epcross.harness.backends.vendor.no_gpu", lambda least=(0, 0): None)
    monkeypatch.setattr("epcross.harness.backends.megamoe._capability", lambda: 9)
    backend = MegaMoE(MegaMoE.option_defaults())
    assert backend.unavailable() is None
    monkeypatch.delattr("deep_gemm.fp8_mega_moe")
    assert "has no fp8_mega_moe; make env-deepgemm builds its environment" in (backend.unavailable() or "")
    # whoever plans asks with another interpreter than the one that will run it, whose library may be another
    assert backend.unsupported(point(MegaMoE, "fp8_fp8")) is None
