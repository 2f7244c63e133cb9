"""The expert stage of one rank alone, as a backend: verified and timed without a GPU, in both layouts."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

import torch
from tests._torch_layer import PlainExperts, layer_point
from tests.contract.threads import on_ranks
from tests.unit.test_gpu_unit import CONTEXT
from tests.unit.test_layer_unit import FEW, FP8, LayerSession

from epcross.harness.backends.experts_only import ExpertsOnly
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.point import Point, Unit
from epcross.harness.record import UnitResult
from epcross.harness.storing.rows import check_record
from epcross.harness.terms import BackendKind, Regime, Sharing
from epcross.kernels.experts.compute import ExpertCompute
from epcross.kernels.experts.torch_grouped import TorchGrouped


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stage(compute: type[ExpertCompute] = PlainExperts, layout: str = "rank_major") -> ExpertsOnly:
    made = ExpertsOnly({"layout": layout})
    made.use_compute(compute)
    return made


def point(**other) -> Point:
    return replace(layer_point(kind=BackendKind.EXPERTS, **other), backend="experts_only")


def measure(backend: ExpertsOnly, **other) -> UnitResult:
    unit = Unit(point=point(**other), launch=0)
    (result,) = on_ranks(
        1,
        lambda group: measure_unit(backend, unit, FEW, group, CONTEXT, lambda stage: None, session_type=LayerSession),
    )
    assert result is not None
    return result


@pytest.mark.parametrize("regime", list(Regime))
@pytest.mark.parametrize("formats", [{}, FP8], ids=["bf16", "fp8"])
def test_it_is_verified_and_timed(regime, formats):
    records = measure(stage(), regime=regime, **formats).records
    assert {record.phase for record in records} == {"experts"}
    for record in records:
        assert check_record(record) == []
        assert (record.status, record.reason) == ("ok", None)
        assert (record.kind, record.compute, record.boundary) == ("experts", "plain_experts", "experts")
        assert record.error_ratio is not None
        assert 0 < record.error_ratio <= 2
        assert record.experts_hit == 2  # of the 2 that rank 0 has of 8


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_torchs_grouped_product_serves_both_layouts(layout):
    records = measure(stage(TorchGrouped, layout)).records
    assert {record.status for record in records} == {"ok"}, records[0].reason


class LeavesAnExpertOut(PlainExperts):
    def ids_of(self, rows):
        ids = super().ids_of(rows)
        return torch.where(ids == 1, -1, ids)


def test_an_expert_left_out_is_incorrect():
    records = measure(stage(LeavesAnExpertOut)).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "verify_before")}
    assert "tokens wrong" in (records[0].reason or "")


def test_what_it_cannot_serve_is_said():
    asked = point()
    assert stage().unsupported(asked) is None
    assert "device=cuda_one_launch" in (stage().unsupported(replace(asked, sharing=Sharing.PROCESSES)) or "")
    assert "layout=sideways must be rank_major or expert_major" in (stage(layout="sideways").unsupported(asked) or "")
    assert "no weights" in (stage().unsupported(replace(asked, weight_format=None)) or "")
