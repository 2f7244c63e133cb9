"""Rows in fp8 by the operations of a library: the codes are the library's, and one rule's are wrong by another."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from epcross.harness.backends.layer_deepep import LayerDeepEPLowLatency, LayerDeepEPNormal
from epcross.harness.backends.megamoe import MegaMoE
from epcross.harness.backends.megamoe_flashinfer import MegaMoEMxfp4
from epcross.kernels.experts import oracle
from epcross.kernels.experts.formats import Arithmetic, RowScaling, WeightFormat
from epcross.kernels.experts.quantise import quantise_fp8_rows
from epcross.kernels.experts.weights import make_weights
from epcross.kernels.formats import RowFormat

from tests import _tensor_core  # isort: skip
from tests._experts import hidden_states, rank_major, shape_of  # isort: skip
from tests.fakes.deep_ep import low_latency_cast  # isort: skip
from tests.fakes.mega import staging_cast  # isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8)) and torch.equal(one[1], other[1])


def rows(count: int = 64, hidden: int = 1024) -> torch.Tensor:
    """bf16, with a block of zeros and one below what libraries take for the least magnitude."""
    values = hidden_states(count, hidden, torch.Generator().manual_seed(4))
    values[0, :128], values[1, :128] = 0, values[1, :128] * 1e-6
    return values


def test_codes_are_those_of_the_library_that_casts_itself() -> None:
    values = rows()
    assert same(quantise_fp8_rows(values, scaling=LayerDeepEPLowLatency.row_scaling), low_latency_cast(values))
    assert same(quantise_fp8_rows(values, scaling=MegaMoE.row_scaling), staging_cast(values))
    assert LayerDeepEPNormal.row_scaling is MegaMoEMxfp4.row_scaling is RowScaling.QUOTIENT  # rows come from us
    scaling = LayerDeepEPLowLatency.row_scaling
    by_powers = quantise_fp8_rows(values, scaling=scaling, power_of_two=True)
    assert same(by_powers, low_latency_cast(values, round_scale=True))


def test_operations_differ_in_neighbours_of_what_lies_halfway() -> None:
    values = rows()[2:]
    codes, scales = quantise_fp8_rows(values)
    for scaling in (RowScaling.RECIPROCAL, RowScaling.FACTOR):
        other, other_scales = quantise_fp8_rows(values, scaling=scaling)
        assert torch.allclose(scales, other_scales, rtol=2**-22, atol=0)
        differ = codes.view(torch.uint8) != other.view(torch.uint8)
        assert 0 < differ.sum() < 2e-3 * differ.numel()
        steps = (codes.view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
        assert steps.max() == 1
        exact = (values.double().unflatten(1, (-1, 128)) / scales.double()[..., None]).flatten(1)[differ]
        between = (codes.double()[differ] + other.double()[differ]) / 2
        assert ((exact / between - 1).abs() < 2**-21).all()
        powers = (quantise_fp8_rows(values, power_of_two=True, scaling=one) for one in (RowScaling.QUOTIENT, scaling))
        assert same(*powers)


@pytest.mark.parametrize("scaling", [RowScaling.RECIPROCAL, RowScaling.FACTOR])
def test_an_oracle_that_casts_otherwise_calls_right_outputs_wrong(scaling: RowScaling) -> None:
    """Rows whose codes differ most, of 256."""
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, hidden=1024, intermediate=512, first_slot=0, top_k=2, capacity_rows=12
    )
    copy = make_weights(shape, seed=1, device="cpu").copies[0]
    landed = rank_major(shape, seed=2, headers=False, share=1.0, slots=4)
    one = landed.sets[0]
    values = hidden_states(256, 1024, torch.Generator().manual_seed(5))
    ours, theirs = quantise_fp8_rows(values), quantise_fp8_rows(values, scaling=scaling)
    apart = (ours[0].float() - theirs[0].float()).unflatten(1, (-1, 128)) * ours[1][..., None]
    most = (apart.flatten(1).norm(dim=1) / values.float().norm(dim=1)).topk(12).indices
    one.ids[:] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).repeat(6, 1)

    def bring(cast: tuple[torch.Tensor, torch.Tensor]) -> None:
        one.rows.view(torch.float8_e4m3fn)[:] = cast[0][most]
        one.scales[:] = cast[1][most].view(torch.uint8)

    bring(theirs)
    out = _tensor_core.layer(shape, copy, landed, 13)
    arithmetic = Arithmetic(intermediate=RowFormat.FP8)
    right = oracle.judge(out, oracle.expected_of_rows(shape, copy, landed, arithmetic)[1])
    assert right.ok, right.sentence()
    assert right.experts.times_allowed.max() < 0.6
    bring(ours)
    wrong = oracle.judge(out, oracle.expected_of_rows(shape, copy, landed, arithmetic)[1])
    assert not wrong.ok
