"""What rules a point or an option out for a library, before it is asked; and what a library's launches take."""

from dataclasses import replace

import pytest
from tests._points import small_point

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Description
from epcross.harness.backends.deepep_ll import DeepEPLowLatency
from epcross.harness.backends.deepep_normal import DeepEPNormal
from epcross.harness.backends.deepep_v2 import DeepEPV2
from epcross.harness.backends.experts_only import ExpertsOnly
from epcross.harness.backends.flashinfer_one_sided import FlashInferOneSided
from epcross.harness.backends.flashinfer_two_sided import FlashInferTwoSided
from epcross.harness.backends.layer_deepep import LayerDeepEPNormal
from epcross.harness.backends.layer_onesided import LayerOneSided
from epcross.harness.backends.megamoe_push import MegaMoEPush
from epcross.harness.backends.nccl_ep_ht import NcclEPHighThroughput
from epcross.harness.backends.nccl_ep_ll import NcclEPLowLatency
from epcross.harness.backends.onesided import OneSidedFence
from epcross.harness.measuring.unit_rows import described_fields
from epcross.harness.point import Routing
from epcross.harness.terms import RoutingKind, RowFormat


def made(backend, **options):
    return backend({**backend.option_defaults(), **options})


@pytest.mark.parametrize(
    ("row_format", "least"),
    [(RowFormat.BF16, 8), (RowFormat.FP8, 512), (RowFormat.MXFP8, 512), (RowFormat.NVFP4, 256)],
)
def test_two_sided_rows_and_scale_rows_travel_in_units_of_16_bytes(row_format, least):
    backend = made(FlashInferTwoSided)
    assert backend.unsupported(small_point(hidden=3 * least, dispatch_format=row_format)) is None
    reason = backend.unsupported(small_point(hidden=3 * least + least // 2, dispatch_format=row_format))
    assert f"takes {row_format} rows of a multiple of {least} values" in (reason or "")


def test_two_sided_takes_up_to_32_experts_of_a_token():
    backend = made(FlashInferTwoSided)
    assert backend.unsupported(small_point(experts=64, top_k=32)) is None
    assert "top_k up to 32, not 33" in (backend.unsupported(small_point(experts=64, top_k=33)) or "")


@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "refused"),
    [
        (RoutingKind.LOCAL_ONLY, (5, 3), 4, True),
        (RoutingKind.LOCAL_ONLY, (5, 3), 5, False),  # a rank has 4 experts, and the fifth is another's
        (RoutingKind.LOCAL_ONLY, (5,), 4, False),
        (RoutingKind.UNIFORM, (5, 3), 4, False),
        (RoutingKind.ALL_TO_ONE, (5, 3), 4, False),
    ],
)
def test_two_sided_takes_no_routing_in_which_nothing_crosses(kind, tokens, top_k, refused):
    point = small_point(tokens, top_k=top_k, routing=Routing(kind=kind))
    reason = made(FlashInferTwoSided).unsupported(point)
    if refused:
        assert "takes steps in which rows cross between ranks, not routing=local_only" in (reason or "")
        assert "csrc/nvlink_two_sided_prepare.cu:124 of 0.7.4" in (reason or "")
        assert "choose another routing" in (reason or "")
    else:
        assert reason is None
    assert made(FlashInferOneSided).unsupported(replace(point, model=replace(point.model, top_k=4))) is None


@pytest.mark.parametrize(("row_format", "least"), [(RowFormat.FP8, 512), (RowFormat.MXFP8, 256)])
def test_lamport_takes_longer_rows_than_fence(row_format, least):
    point = small_point(hidden=128, dispatch_format=row_format)
    assert made(FlashInferOneSided).unsupported(point) is None
    reason = made(FlashInferOneSided, transport="lamport").unsupported(point)
    assert f"takes {row_format} rows of a multiple of {least} values, not 128" in (reason or "")


@pytest.mark.parametrize(
    ("backend", "options", "says"),
    [
        (FlashInferOneSided, {"timeout_s": 0}, "timeout_s=0 must be at least 1"),
        (FlashInferOneSided, {"transport": "automatic"}, "transport=automatic must be fence or lamport"),
        (DeepEPV2, {"sm_budget": "foo"}, "sm_budget=foo must be default or maximum"),
        (DeepEPNormal, {"num_sms": 21}, "num_sms=21 must be even and at least 2"),
        (DeepEPNormal, {"num_sms": 0}, "num_sms=0 must be even and at least 2"),
        (LayerDeepEPNormal, {"num_sms": 0}, "num_sms=0 must be even and at least 2"),
        (OneSidedFence, {"num_sms": -4}, "num_sms=-4 must be at least 0, which is no bound"),
        (OneSidedFence, {"timeout_s": 3601.0}, "timeout_s=3601.0 must be above 0 and at most 3600"),
        (LayerOneSided, {"timeout_s": 0.0}, "timeout_s=0.0 must be above 0 and at most 3600"),
        (LayerOneSided, {"protocol": "telepathy"}, "protocol=telepathy must be fence or sentinel"),
        (ExpertsOnly, {"layout": "flat"}, "layout=flat must be rank_major or expert_major"),
        (ExpertsOnly, {"rank": -1}, "rank=-1 must be at least 0"),
        (MegaMoEPush, {"staging": False}, "staging=false must be true: it stages by dispatching"),
        (FlashInferOneSided, {"timeout_s": 86401}, "timeout_s=86401 must be at most 86400"),
        (DeepEPV2, {"timeout_s": 0}, "timeout_s=0 must be at least 1"),
        (DeepEPV2, {"num_sms": -2}, "num_sms=-2 must be at least 0"),
        (DeepEPV2, {"num_sms": 7}, "num_sms=7 must be even, or 0 for the library's choice"),
        (NcclEPLowLatency, {"max_num_sms": -9}, "max_num_sms=-9 must be at least 0"),
        (NcclEPHighThroughput, {"timeout_s": -3}, "timeout_s=-3 must be at least 1"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_limit(backend, options, says):
    defaults = backend.option_defaults()
    assert backend.option_problems(defaults) == []
    assert backend.option_problems({**defaults, **options}) == [says]


@pytest.mark.parametrize(
    ("tokens", "slots", "sms"),
    [(1, 256, 128), (128, 256, 128), (132, 256, 132), (133, 256, 128), (400, 8, 100), (0, 8, 8)],
)
def test_low_latency_kernels_take_a_block_for_some_experts_or_some_tokens(tokens, slots, sms, monkeypatch):
    monkeypatch.setattr(vendor, "sm_count", lambda: 132)
    backend = made(DeepEPLowLatency)
    backend._tokens, backend._slots = tokens, slots
    assert backend._num_sms() == sms


@pytest.mark.parametrize(("ranks", "sms"), [(2, 66), (8, 66), (16, 64), (64, 64)])
def test_two_sided_channels_take_half_of_the_multiprocessors(ranks, sms, monkeypatch):
    monkeypatch.setattr(vendor, "sm_count", lambda: 132)
    backend = made(FlashInferTwoSided)
    backend._point = replace(small_point(), ep_size=ranks)
    assert backend._num_sms() == sms


@pytest.mark.parametrize(("tokens", "sms"), [(0, 1), (8, 8), (4096, 132)])
def test_one_sided_takes_a_block_for_each_token(tokens, sms, monkeypatch):
    monkeypatch.setattr(vendor, "sm_count", lambda: 132)
    backend = made(FlashInferOneSided)
    backend._tokens = tokens
    assert backend._num_sms() == sms


@pytest.mark.parametrize(("told", "stored"), [((7, 9), 9), ((0, 0), 0), ((None, None), None), ((7, None), None)])
def test_bytes_that_a_library_does_not_tell_are_not_said_to_be_none(told, stored):
    descriptions = [Description(version="1", transport="nvlink", protocol_bytes=size) for size in told]
    assert described_fields(made(DeepEPV2), descriptions)["protocol_bytes"] == stored


@pytest.mark.parametrize("backend", [DeepEPV2, DeepEPNormal, DeepEPLowLatency], ids=lambda backend: backend.name)
def test_what_a_rank_holds_includes_what_a_dispatch_returns_and_partials(backend):
    torch = pytest.importorskip("torch", reason="torch is not installed; make torch")
    held = made(backend)
    rows, ids = torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(6, 2, dtype=torch.int64)
    held._landed = (rows, torch.zeros(6, 1)), ids, [4, 2], (ids, object()), None
    held._partials = [torch.zeros(6, 8, dtype=torch.bfloat16)] * 2
    assert held.held_bytes(1000) == 1000 + 96 + 24 + 2 * 96 + 96
