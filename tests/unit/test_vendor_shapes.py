"""Shapes that libraries of others take: each limit at its value and just beyond, one for the contract that each takes,
and ranks that share a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests._points import small_point

from epcross.harness.backends import vendor
from epcross.harness.backends.ag_rs import AllGatherReduceScatter
from epcross.harness.backends.base import Backend, ContractShape
from epcross.harness.backends.deepep_ll import DeepEPLowLatency
from epcross.harness.backends.deepep_normal import DeepEPNormal
from epcross.harness.backends.deepep_v2 import DeepEPV2
from epcross.harness.backends.flashinfer_one_sided import FlashInferOneSided
from epcross.harness.backends.flashinfer_two_sided import FlashInferTwoSided
from epcross.harness.backends.nccl_a2a import NcclAllToAll
from epcross.harness.backends.nccl_a2a_padded import NcclAllToAllPadded
from epcross.harness.backends.nccl_ep_ht import NcclEPHighThroughput
from epcross.harness.backends.nccl_ep_ll import NcclEPLowLatency
from epcross.harness.terms import Domain, RowFormat, Sharing
from epcross.harness.verification.cases import cases

VENDORS = (
    *(DeepEPV2, DeepEPNormal, DeepEPLowLatency, FlashInferOneSided, FlashInferTwoSided),
    *(NcclEPLowLatency, NcclEPHighThroughput),
)
FP8 = {"dispatch_format": RowFormat.FP8}


def made(backend, **options):
    return backend({**backend.option_defaults(), **options})


@dataclass(frozen=True)
class Limit:
    """A point at a limit of a backend, one just beyond it, and what is said to that."""

    backend: type[Backend]
    right: dict[str, Any]
    wrong: dict[str, Any]
    says: str


LIMITS = (
    Limit(DeepEPV2, {"hidden": 256}, {"hidden": 384}, "bf16 rows of a multiple of 256 values, not 384"),
    Limit(DeepEPV2, {"hidden": 7168, **FP8}, {"hidden": 128, **FP8}, "fp8 rows of a multiple of 256 values, not 128"),
    Limit(DeepEPV2, {"hidden": 256, "experts": 512}, {"hidden": 256, "experts": 514}, "256 experts per rank, not 257"),
    Limit(
        DeepEPV2,
        {"hidden": 256, "experts": 2048, "tokens": (1,) * 16},
        {"hidden": 256, "experts": 2064, "tokens": (1,) * 16},
        "up to 2048 experts, not 2064",
    ),
    Limit(DeepEPNormal, {"hidden": 16}, {"hidden": 24}, "bf16 rows of a multiple of 16 values, not 24"),
    Limit(
        DeepEPNormal, {"hidden": 8176}, {"hidden": 8192}, "rows of up to 16368 bytes, not 16384, those of hidden=8192"
    ),
    Limit(DeepEPNormal, {"hidden": 8192, **FP8}, {"hidden": 16384, **FP8}, "not 16384, those of hidden=16384 in fp8"),
    Limit(DeepEPNormal, {"experts": 256}, {"experts": 258}, "128 experts per rank, not 129"),
    Limit(DeepEPNormal, {"experts": 64, "top_k": 32}, {"experts": 64, "top_k": 33}, "top_k up to 32, not 33"),
    Limit(DeepEPLowLatency, {"hidden": 2048}, {"hidden": 2304}, "6144, 7168, 8192, not 2304"),
    Limit(
        DeepEPLowLatency,
        {"hidden": 2048, "experts": 64, "top_k": 9},
        {"hidden": 2048, "experts": 64, "top_k": 10},
        "top_k up to 9, not 10",
    ),
    Limit(NcclEPLowLatency, {"hidden": 512}, {"hidden": 768}, "bf16 rows of a multiple of 512 values, not 768"),
    Limit(NcclEPLowLatency, {"hidden": 512 * 31}, {"hidden": 512 * 32}, "hidden up to 15872, not 16384"),
    Limit(
        NcclEPLowLatency,
        {"hidden": 512, "experts": 64, "top_k": 31},
        {"hidden": 512, "experts": 64, "top_k": 32},
        "top_k up to 31, not 32",
    ),
    Limit(
        NcclEPLowLatency,
        {"hidden": 512, "experts": 14 * 114},
        {"hidden": 512, "experts": 14 * 114 + 2},
        "14 experts for each of 114 SMs, not 1598",
    ),
    Limit(NcclEPHighThroughput, {"experts": 12}, {"experts": 10}, "a multiple of 4 experts, not 10"),
    Limit(NcclEPHighThroughput, {"tokens": (8192, 0)}, {"tokens": (8193, 0)}, "8192 tokens per rank, not 8193"),
    Limit(
        DeepEPLowLatency,
        {"hidden": 2048, "tokens": (510, 0)},
        {"hidden": 2048, "tokens": (511, 0)},
        "deepep_ll holds at most 510 tokens per rank at EP 2 (511, in steps of 2), not 511",
    ),
    Limit(
        DeepEPLowLatency,
        {"hidden": 2048, "tokens": (511, 0, 0, 0)},
        {"hidden": 2048, "tokens": (512, 0, 0, 0)},
        "deepep_ll holds at most 511 tokens per rank at EP 4, not 512",
    ),
    Limit(
        DeepEPLowLatency,
        {"hidden": 2048, "tokens": (508, 0, 0), "experts": 6},
        {"hidden": 2048, "tokens": (509, 0, 0), "experts": 6},
        "deepep_ll holds at most 508 tokens per rank at EP 3 (511, in steps of 4), not 509",
    ),
    Limit(FlashInferTwoSided, {"experts": 12}, {"experts": 10}, "a multiple of 4 experts, not 10"),
    Limit(FlashInferOneSided, {"top_k": 6}, {"top_k": 5}, "14, 16, 18, 22, not 5"),
)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.backend.name}: {limit.says}")
def test_a_limit_is_told_before_the_library_ends_the_process(limit):
    assert made(limit.backend).unsupported(small_point(**limit.right)) is None
    assert limit.says in (made(limit.backend).unsupported(small_point(**limit.wrong)) or "")


@pytest.mark.parametrize("backend", VENDORS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("tokens", [1, 8, 128, 510])
def test_what_ran_between_two_gpus_is_taken(backend, tokens):
    assert made(backend).unsupported(small_point((tokens, tokens), experts=256, top_k=8, hidden=7168)) is None


ALWAYS_TRIED = {"plain", "one_token", "ragged", "capacity_above_tokens", "masked_ids", "masked_rows", "rotated"}


@pytest.mark.parametrize("backend", VENDORS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_the_contract_has_a_shape_that_every_library_takes(backend, ep_size):
    suite = cases(ep_size, backend.name, backend.contract_shape)
    refused = {case.name: why for case in suite if (why := made(backend).unsupported(case.point))}
    assert not refused.keys() & {*ALWAYS_TRIED, "replicated", "zero_tokens_on_a_rank", "any_bits_bf16"}, refused
    assert refused.keys() >= {"odd_hidden", "tiny_rows"}
    if backend is not DeepEPLowLatency:
        assert not refused.keys() & {"format_fp8", "any_bits_fp8"}, refused


def test_a_shape_of_its_own_changes_neither_names_nor_what_odd_cases_are_about():
    usual, vendors = cases(2), cases(2, "x", ContractShape(hidden=2048, format_hidden=512, slots_multiple=4))
    assert [case.name for case in usual] == [case.name for case in vendors]
    hidden = {case.name: case.point.model.hidden for case in vendors}
    assert (hidden["odd_hidden"], hidden["tiny_rows"], hidden["plain"], hidden["any_bits_nvfp4"]) == (67, 4, 2048, 512)
    slots = {case.name: case.point.placement.num_slots for case in usual}
    assert (slots["plain"], slots["odd_top_k"], slots["replicated"]) == (8, 10, 10)
    assert {case.point.model.hidden for case in usual} == {128, 67, 4, 160}


@pytest.mark.parametrize(
    ("ep_size", "tokens", "room"),
    [(2, 1, 2), (2, 2, 2), (2, 4095, 4096), (2, 8192, 8192), (3, 5, 8), (4, 5, 5), (5, 5, 8), (6, 3, 4), (8, 1, 1)],
)
@pytest.mark.parametrize("experts", [4, 128])
def test_ht_is_told_room_whose_map_fills_units_of_16_bytes(ep_size, tokens, room, experts):
    backend = made(NcclEPHighThroughput)
    point = small_point((tokens,) + (0,) * (ep_size - 1), experts=experts * ep_size)
    assert room * ep_size * 4 % 16 == 0
    assert backend.room(point) == room
    assert backend.landing_shape(point) == (ep_size * room,)


def shared(ep_size=2, tokens=8, **shape):
    shape = {"experts": 256, "top_k": 8, "hidden": 7168, **shape}
    return replace(small_point((tokens,) * ep_size, **shape), domain=Domain.SHARED_GPU, sharing=Sharing.PROCESSES)


@pytest.mark.parametrize(
    ("backend", "point", "options", "says"),
    [
        (DeepEPV2, shared(), {}, "does not come back from its first step between processes on one GPU"),
        (DeepEPV2, shared(), {"sm_budget": "maximum"}, "use device=cuda"),
        (DeepEPLowLatency, shared(), {}, "deepep_ll has 86 blocks of each of 2 ranks wait for one another"),
        (DeepEPLowLatency, shared(tokens=128, experts=8), {}, "deepep_ll has 64 blocks of each of 2 ranks"),
        (DeepEPLowLatency, shared(experts=8), {}, None),
        (DeepEPNormal, shared(), {}, None),
        (DeepEPNormal, shared(8), {}, "20 blocks of each of 8 ranks wait for one another"),
        (DeepEPNormal, shared(8), {}, "of 114; num_sms=14 fits"),
        (DeepEPNormal, shared(8), {"num_sms": 14}, None),
        (NcclEPLowLatency, shared(), {}, None),
        (NcclEPLowLatency, shared(), {"max_num_sms": 58}, "nccl_ep has 58 blocks of each of 2 ranks wait"),
        (NcclEPLowLatency, shared(8), {}, "14 experts for each of 14 SMs, not 256"),
        (NcclEPHighThroughput, shared(), {}, None),
        (NcclEPHighThroughput, shared(8), {}, None),
        (FlashInferOneSided, shared(), {}, None),
    ],
)
def test_ranks_on_one_gpu_fit_on_it_together_or_are_told_why_not(backend, point, options, says):
    reason = made(backend, **options).unsupported(point)
    assert reason is None if says is None else says in (reason or "")


@pytest.mark.parametrize(
    ("backend", "ep_size", "alone", "together"),
    [(NcclEPLowLatency, 2, 0, 57), (NcclEPHighThroughput, 2, 0, 16), (NcclEPHighThroughput, 8, 0, 14)],
)
def test_ranks_on_one_gpu_share_out_its_multiprocessors(backend, ep_size, alone, together):
    point = shared(ep_size)
    assert made(backend).most_sms(replace(point, domain=Domain.NVLINK, sharing=Sharing.NONE)) == alone
    assert made(backend).most_sms(point) == together
    assert made(backend, max_num_sms=8).most_sms(point) == 8


WITH_NCCL = (NcclEPLowLatency, NcclEPHighThroughput, NcclAllToAll, NcclAllToAllPadded, AllGatherReduceScatter)


@pytest.mark.parametrize("backend", WITH_NCCL, ids=lambda backend: backend.name)
def test_nccl_before_2_30_refuses_ranks_on_one_gpu_where_it_is_loaded(backend, monkeypatch):
    monkeypatch.setattr(vendor, "loaded_nccl", lambda: {"nccl": "2.28.9 /lib/libnccl.so.2"})
    assert "NCCL 2.28.9 /lib/libnccl.so.2 refuses several ranks" in (made(backend).refused_here(shared()) or "")
    assert made(backend).refused_here(replace(shared(), sharing=Sharing.NONE, domain=Domain.NVLINK)) is None
    assert made(backend).unsupported(shared()) is None, "a limit of the point, which does not hang on the process"
    for found in ({"nccl": "2.30.7 /lib/libnccl.so.2"}, {}):
        monkeypatch.setattr(vendor, "loaded_nccl", lambda found=found: found)
        assert made(backend).refused_here(shared()) is None
