"""Adapters of libraries that are not here, against imitations of what those document, through the contract's cases."""

import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed; make torch")

from tests.fakes.deep_ep import install_deep_ep
from tests.fakes.flashinfer import install_flashinfer
from tests.fakes.nccl_ep import install_nccl_ep
from tests.fakes.world import problems

from epcross.harness.backends import deepep_ll, deepep_normal
from epcross.harness.backends.deepep_ll import DeepEPLowLatency
from epcross.harness.backends.deepep_normal import DeepEPNormal
from epcross.harness.backends.deepep_v2 import DeepEPV2
from epcross.harness.backends.flashinfer_one_sided import FlashInferOneSided
from epcross.harness.backends.flashinfer_two_sided import FlashInferTwoSided
from epcross.harness.backends.nccl_ep_ht import NcclEPHighThroughput
from epcross.harness.backends.nccl_ep_ll import NcclEPLowLatency
from epcross.harness.terms import Domain
from epcross.harness.verification.cases import cases

INSTALL = {
    DeepEPV2: install_deep_ep,
    DeepEPNormal: install_deep_ep,
    DeepEPLowLatency: install_deep_ep,
    FlashInferOneSided: install_flashinfer,
    FlashInferTwoSided: install_flashinfer,
    NcclEPLowLatency: install_nccl_ep,
    NcclEPHighThroughput: install_nccl_ep,
}


ODD = {"odd_hidden", "tiny_rows"}
MX = {f"{case}_{row_format}" for case in ("format", "any_bits") for row_format in ("mxfp8", "nvfp4")}
REFUSED = {
    DeepEPV2: ODD | MX,
    DeepEPNormal: ODD | MX,
    DeepEPLowLatency: ODD | MX | {"format_fp8", "any_bits_fp8"},
    FlashInferOneSided: ODD | {"odd_top_k"},
    FlashInferTwoSided: ODD | {"local_only"},
    NcclEPLowLatency: ODD | MX,
    NcclEPHighThroughput: ODD | MX,
}
"""Cases that are about a shape, a format or a routing that the library does not have."""


@pytest.fixture(autouse=True)
def any_group(monkeypatch):
    """Three ranks are few; the groups that libraries are compiled for are others."""
    monkeypatch.setattr(deepep_ll, "MAX_TOP_K", 99)
    monkeypatch.setattr(deepep_normal, "RANKS", (2, 3))


def visited(backend, name, size=2, **options):
    case = next(case for case in cases(size, backend.name, backend.contract_shape) if case.name == name)
    case = replace(case, point=replace(case.point, domain=Domain.NVLINK))

    def make():
        return backend({**backend.option_defaults(), **options})

    if refused := make().unsupported(case.point):
        return [f"unsupported: {refused}"]
    return problems(make, case, size)


@pytest.mark.parametrize("backend", INSTALL, ids=lambda backend: backend.name)
def test_every_case_passes_or_is_refused_with_its_limit(backend, monkeypatch):
    INSTALL[backend](monkeypatch)
    found = {case.name: visited(backend, case.name) for case in cases(2)}
    refused = {name for name, texts in found.items() if texts and texts[0].startswith("unsupported: ")}
    assert {name: texts for name, texts in found.items() if texts and name not in refused} == {}
    assert refused == REFUSED[backend]
    for name in refused:
        assert backend.name in found[name][0], found[name]


@pytest.mark.parametrize("backend", INSTALL, ids=lambda backend: backend.name)
def test_three_ranks(backend, monkeypatch):
    INSTALL[backend](monkeypatch)
    for name in ("ragged", "zero_received_on_a_rank", "rotated"):
        assert visited(backend, name, 3) == []


@pytest.mark.parametrize("backend", [b for b in INSTALL if b is not DeepEPLowLatency], ids=lambda b: b.name)
def test_fp8_rows_travel_with_their_scales(backend, monkeypatch):
    INSTALL[backend](monkeypatch)
    assert visited(backend, "format_fp8") == []
    assert visited(backend, "any_bits_fp8") == []


@pytest.mark.parametrize("backend", [NcclEPLowLatency, NcclEPHighThroughput], ids=lambda backend: backend.name)
def test_points_share_a_communicator_that_is_used_before_bytes_are_counted(backend, monkeypatch):
    made = install_nccl_ep(monkeypatch)
    before_counting = []

    class Counting(backend):
        def _free_bytes(self):
            before_counting.append(sum(map(len, made)))
            return super()._free_bytes()

    case = next(case for case in cases(2, backend.name, backend.contract_shape) if case.name == "plain")
    case = replace(case, point=replace(case.point, domain=Domain.NVLINK))

    assert problems(lambda: Counting(backend.option_defaults()), case, 2, visits=2) == []
    once = ["handle", "group"]
    assert made == [3 * once] * 2  # one that connects, and one of each point
    assert min(before_counting) >= len(once)


@pytest.mark.parametrize(("size", "tokens", "room"), [(2, 1, 2), (2, 2, 2), (2, 7, 8), (3, 1, 4), (3, 6, 8), (4, 1, 1)])
def test_ht_takes_any_number_of_tokens_with_many_experts(size, tokens, room, monkeypatch):
    """With 256 experts, where a row of the routing map is whole units of 16 bytes and that of places is none."""
    install_nccl_ep(monkeypatch)
    described = []

    class Told(NcclEPHighThroughput):
        def close(self):
            described.append(self.describe().algorithm)
            super().close()

    case = next(case for case in cases(size, Told.name, Told.contract_shape) if case.name == "plain")
    experts = 64 * size
    model = replace(case.point.model, num_experts=experts)
    shape = {"tokens": (tokens,) * size, "tokens_per_rank": tokens, "max_tokens_per_rank": tokens}
    placement = replace(case.point.placement, num_slots=experts)
    point = replace(case.point, domain=Domain.NVLINK, model=model, placement=placement, **shape)
    assert problems(lambda: Told(Told.option_defaults()), replace(case, point=point), size) == []
    more = "" if room == tokens else f", room for {room} tokens per rank"
    assert set(described) == {f"high_throughput, flat{more}"}


def test_a_count_that_may_be_lost_is_a_hang_of_the_imitation(monkeypatch):
    """What `local_only` is refused for: the imitated library does not take it either."""
    install_flashinfer(monkeypatch)
    monkeypatch.setattr(FlashInferTwoSided, "unsupported", lambda self, point: None)
    assert any("the count of rank 0 may be overwritten" in text for text in visited(FlashInferTwoSided, "local_only"))
    assert visited(FlashInferTwoSided, "all_to_one", 3) == []  # ranks 1 and 2 exchange nothing, and both wait for 0


def test_lamport(monkeypatch):
    install_flashinfer(monkeypatch)
    assert visited(FlashInferOneSided, "plain", transport="lamport") == []


@pytest.mark.parametrize(
    ("backend", "fault", "case", "says"),
    [
        (DeepEPV2, "global_ids", "plain", "wrong ids of a row"),
        (DeepEPV2, "weights", "plain", "wrong weights of a row"),
        (DeepEPV2, "last_rank_lost", "plain", "a wrong combined sum"),
        (DeepEPV2, "rdma", "plain", "would send to the others over RDMA"),
        (DeepEPNormal, "own_counts", "ragged", "rank"),
        (DeepEPLowLatency, "unweighted", "plain", "a wrong combined sum"),
        (DeepEPLowLatency, "lost_copy", "every_expert", "wrong ids of a row"),
        (DeepEPLowLatency, "differing_copy", "every_expert", "wrong bytes in a row"),
        (FlashInferOneSided, "unsanitised", "ragged", "a row"),
        (FlashInferTwoSided, "unsanitised", "ragged", "a row"),
        (NcclEPLowLatency, "no_weights", "one_token", "wrong weights of a row"),
        (NcclEPHighThroughput, "no_weights", "one_token", "of a row"),
        (NcclEPHighThroughput, "bf16_twice", "plain", "a wrong combined sum"),
        (NcclEPHighThroughput, "swapped_weights", "plain", "of a row"),
    ],
)
def test_a_library_that_does_otherwise_is_caught(backend, fault, case, says, monkeypatch):
    INSTALL[backend](monkeypatch, fault)
    found = visited(backend, case)
    assert any(says in text for text in found), found


@pytest.mark.parametrize("fault", ["fence_instead", "no_lamport"])
def test_another_transport_than_asked_for_is_a_failure(fault, monkeypatch):
    install_flashinfer(monkeypatch, fault)
    found = visited(FlashInferOneSided, "plain", transport="lamport")
    assert any("was asked for transport=lamport and took" in text for text in found), found


@pytest.mark.parametrize("backend", [FlashInferOneSided, FlashInferTwoSided], ids=lambda backend: backend.name)
def test_a_gpu_that_the_library_does_not_take_is_told_before_it_is_asked_to(backend, monkeypatch):
    install_flashinfer(monkeypatch)
    monkeypatch.setattr("epcross.harness.backends.vendor.no_gpu", lambda least=(0, 0): None)
    monkeypatch.setattr("epcross.harness.backends.vendor.lacks", lambda *names: None)
    monkeypatch.setattr(backend, "differs", lambda self: None)
    asked = sys.modules["flashinfer.comm.mnnvl"].MnnvlMemory
    made = backend(backend.option_defaults())
    assert made.unavailable() is None
    monkeypatch.setattr(asked, "supports_mnnvl", lambda: False)
    assert "NVLinks are all up, also for ranks that share one" in (made.unavailable() or "")

    def broken():
        raise OSError("no NVML")

    monkeypatch.setattr(asked, "supports_mnnvl", broken)
    assert made.unavailable() == "FlashInfer cannot ask for this GPU's NVLinks: OSError: no NVML"
