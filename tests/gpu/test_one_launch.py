"""Whole units of the one-sided kernels on one GPU, all ranks in one launch, and the contract for each protocol."""

from dataclasses import replace

import pytest
from tests._points import CONTEXT, small_point
from tests._torch_one_launch import torch_one_launch
from tests.gpu._alone import alone

from epcross.harness.backends.onesided import OneSidedFence, OneSidedSentinel
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.point import Placement, Routing, Timing, Unit
from epcross.harness.storing.rows import check_record
from epcross.harness.terms import Domain, PlacementKind, Regime, RowFormat, Sharing
from epcross.harness.verification.cases import cases
from epcross.harness.verification.contract import refusal, run_case
from epcross.harness.verification.gpu_contract import GpuVisit

torch = pytest.importorskip("torch", reason="torch is not installed, which tests on a GPU need")

BACKENDS = [OneSidedFence, OneSidedSentinel, torch_one_launch()]
TIMING = Timing(
    launches=5,
    seeds=2,
    chains=2,
    chain_ms=1.0,
    min_pairs=20,
    max_pairs=400,
    iterations=20,
    warmup_pairs=4,
    sets=2,
    wall_limit_s=60.0,
)


def options(backend_class):
    return dict(backend_class.option_defaults())


def shared(point, regime=Regime.STEADY):
    return replace(point, domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH, regime=regime)


def measure(backend_class, point):
    backend = backend_class(options(backend_class))
    assert backend.unavailable() is None
    assert backend.unsupported(point) is None
    result = measure_unit(backend, Unit(point=point, launch=0), TIMING, alone(), CONTEXT, lambda stage: None)
    assert result is not None
    return result.records


@pytest.mark.parametrize("backend_class", BACKENDS, ids=lambda c: c.name)
@pytest.mark.parametrize("regime", list(Regime))
def test_a_unit_of_every_regime_is_right(backend_class, regime):
    for record in measure(backend_class, shared(small_point((9, 3, 0, 7), hidden=7168), regime)):
        if regime is Regime.SPANS and record.status == "no_timing":
            pytest.skip(f"the profiler sees no kernels on this GPU: {record.reason}")
        assert (record.status, record.reason) == ("ok", None)
        assert check_record(record) == []
        assert record.enqueued == ("graph" if regime is not Regime.SPANS else "eager")
        assert 0.5 < (record.latency_us or 0) < 100_000


@pytest.mark.parametrize("backend_class", BACKENDS, ids=lambda c: c.name)
@pytest.mark.parametrize("ep_size", [1, 4])
def test_the_contract(backend_class, ep_size):
    found = {}
    for case in cases(ep_size, backend_class.name):
        case = replace(case, point=shared(case.point))

        def make():
            return backend_class(options(backend_class))

        if refusal(make, case):
            continue
        if problems := run_case(make, case, alone(), 60, visit_type=GpuVisit):
            found[case.name] = problems[0]
    assert found == {}


@pytest.mark.parametrize("backend_class", BACKENDS[:2], ids=lambda c: c.name)
@pytest.mark.parametrize("row_format", list(RowFormat))
@pytest.mark.parametrize("tokens", [1, 33, 128])
def test_formats_at_real_rows(backend_class, row_format, tokens):
    point = small_point((tokens,) * 8, experts=64, top_k=8, hidden=7168, dispatch_format=row_format)
    assert {record.status for record in measure(backend_class, shared(point))} == {"ok"}


@pytest.mark.parametrize("backend_class", BACKENDS[:2], ids=lambda c: c.name)
@pytest.mark.parametrize(("ep_size", "tokens"), [(16, 8), (32, 4), (64, 2)])
def test_many_ranks(backend_class, ep_size, tokens):
    point = small_point((tokens,) * ep_size, experts=256, top_k=8, hidden=7168, routing=Routing(masked_fraction=0.1))
    assert {record.status for record in measure(backend_class, shared(point))} == {"ok"}


@pytest.mark.parametrize("backend_class", BACKENDS[:2], ids=lambda c: c.name)
def test_replicas(backend_class):
    placement = Placement(kind=PlacementKind.REPLICATED, num_slots=72)
    point = small_point((5, 0, 9, 2, 7, 7, 1, 4), experts=64, top_k=4, hidden=512, placement=placement)
    assert {record.status for record in measure(backend_class, shared(point))} == {"ok"}


@pytest.mark.parametrize("backend_class", BACKENDS[:2], ids=lambda c: c.name)
def test_memory_comes_back_after_a_unit(backend_class):
    point = shared(small_point((64,) * 8, experts=64, top_k=8, hidden=7168))
    measure(backend_class, point)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # of this process: others may use the GPU meanwhile
    for _ in range(3):
        measure(backend_class, point)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 64 << 20


def test_what_does_not_fit_is_unsupported_with_both_sizes():
    torch.cuda.init()
    point = shared(small_point((1,) * 64, experts=64, hidden=7168))
    point = replace(point, max_tokens_per_rank=1 << 16)
    reason = OneSidedSentinel(options(OneSidedSentinel)).unsupported(point)
    assert reason is not None
    assert str(64 * OneSidedSentinel(options(OneSidedSentinel)).workspace_bytes(point)) in reason
    assert str(torch.cuda.mem_get_info()[1]) in reason
