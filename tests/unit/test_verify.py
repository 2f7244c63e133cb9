"""The fast checks against the oracle, and their words against one defect at a time."""

from dataclasses import replace

import numpy as np
import pytest
from tests._points import oracle_landed, received_from, slots_of, small_point

from epcross.harness.backends.base import Reduction
from epcross.harness.errors import ConfigError
from epcross.harness.point import Routing
from epcross.harness.terms import RoutingKind, RowFormat, WeightsBy
from epcross.harness.verification.verify import Checker
from epcross.harness.workload.batches import group_batch, slot_scale
from epcross.harness.workload.tape import Payload
from epcross.kernels import reference
from epcross.kernels.codecs import bf16_to_float, float_to_bf16


def checkers(point, weights_by=WeightsBy.EXPERTS, reduction=None):
    return [Checker(point, rank, slots_of(point), weights_by, reduction) for rank in range(point.ep_size)]


def round_trip(gb, weights_by=WeightsBy.EXPERTS, accumulate="fp32"):
    """Checkers, what each rank receives, its partials, and the oracle's sums of them."""
    reduction = Reduction(accumulate=accumulate)
    each = checkers(gb.point, weights_by, reduction)
    landed = oracle_landed(gb)
    received = [received_from(here) for here in landed]
    partials = [c.partials(gb, r) for c, r in zip(each, received, strict=True)]
    sums = reference.combine(
        gb.ids,
        gb.weights,
        landed,
        partials,
        slots_of(gb.point).slot_rank,
        accumulate,
        weighted=weights_by is WeightsBy.COMBINE,
    )
    return each, landed, received, partials, sums


@pytest.mark.parametrize("row_format", list(RowFormat))
@pytest.mark.parametrize("payload", list(Payload))
@pytest.mark.parametrize("weights_by", list(WeightsBy))
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [(5, 3), (7, 0, 4, 1)])
def test_checks_agree_with_the_oracle_bit_for_bit(row_format, payload, weights_by, accumulate, tokens):
    point = small_point(tokens, top_k=5, hidden=96, dispatch_format=row_format, routing=Routing(masked_fraction=0.2))
    gb = group_batch(point, seed=1, set_index=0, payload=payload)
    each, landed, received, partials, sums = round_trip(gb, weights_by, accumulate)
    for rank, checker in enumerate(each):
        assert checker.check_received(gb, received[rank]) is None
        assert checker.check_combined(gb, sums[rank]) is None
        if payload is not Payload.ADVERSARIAL:
            scale = slot_scale(slots_of(point))
            want = reference.expert_partials(
                landed[rank], row_format, 96, scale, weighted=weights_by is WeightsBy.EXPERTS
            )
            assert np.array_equal(partials[rank], want)


@pytest.mark.parametrize("weights_by", list(WeightsBy))
@pytest.mark.parametrize("kind", [RoutingKind.ALL_TO_ONE, RoutingKind.LOCAL_ONLY, RoutingKind.PERFECT])
def test_large_hidden_and_many_chunks_agree_too(weights_by, kind):
    point = small_point((40, 37), experts=16, top_k=8, hidden=7168, routing=Routing(kind=kind))
    gb = group_batch(point, seed=2, set_index=1, payload=Payload.RANDOM)
    each, _, received, _, sums = round_trip(gb, weights_by)
    for rank, checker in enumerate(each):
        assert checker.check_received(gb, received[rank]) is None
        assert checker.check_combined(gb, sums[rank]) is None


@pytest.fixture
def good():
    gb = group_batch(small_point((6, 5), hidden=64), seed=3, set_index=0, payload=Payload.EXACT)
    each, _, received, _, sums = round_trip(gb)
    return gb, each[1], received[1], sums[1]


def test_rows_may_come_in_any_order(good):
    gb, checker, received, _ = good
    order = np.arange(len(received.token))[::-1]
    turned = replace(received, **{name: getattr(received, name)[order] for name in received.__slots__})
    assert checker.check_received(gb, turned) is None


def edited(received, name, place, value):
    array = getattr(received, name).copy()
    array[place] = value
    return replace(received, **{name: array})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: edited(r, "rows", (2, 5), r.rows[2, 5] ^ 1), "wrong bytes in a row (source 0, token"),
        (lambda r: edited(r, "rows", 2, r.rows[3]), "wrong bytes in a row, which is that of source"),
        (lambda r: edited(r, "ids", 0, np.roll(r.ids[0], 1)), "wrong ids of a row (source 0"),
        (lambda r: edited(r, "weights", 0, r.weights[0] * 2), "wrong weights of a row (source 0"),
        (lambda r: edited(r, "token", 0, 99), "a row that was not sent here (source 0, token 99); 1 of"),
        # the token after the last of rank 0 must not pass for the first of rank 1
        (
            lambda r: edited(edited(r, "source", 5, 0), "token", 5, 6),
            "a row that was not sent here (source 0, token 6)",
        ),
        (lambda r: edited(r, "source", 0, -1), "a row that was not sent here (source -1"),
        (lambda r: edited(r, "source", 0, 7), "a row that was not sent here (source 7"),
        (lambda r: edited(r, "token", 0, r.token[1]), "a row received twice (source 0, token"),
        (lambda r: replace(r, rows=r.rows[:, :100]), "received rows are uint8 (10, 100), not uint8 (10, 128)"),
        (lambda r: replace(r, ids=r.ids.astype(np.int64)), "received ids are int64 (10, 3), not int32 (10, 3)"),
        (
            lambda r: replace(r, **{name: getattr(r, name)[1:] for name in r.__slots__}),
            "a missing row (source 0, token",
        ),
    ],
)
def test_each_defect_of_what_was_received_is_named(good, spoil, words):
    gb, checker, received, _ = good
    assert len(received.token) == 10
    found = str(checker.check_received(gb, spoil(received)))
    assert words in found
    assert found.startswith("rank 1: ")


def test_a_wrong_scale_row_is_named():
    gb = group_batch(
        small_point((6, 5), hidden=512, dispatch_format=RowFormat.FP8), seed=3, set_index=0, payload=Payload.EXACT
    )
    each, _, received, _, _ = round_trip(gb)
    bad = edited(received[0], "scales", (1, 3), received[0].scales[1, 3] ^ 1)
    assert "wrong bytes in a scale row" in str(each[0].check_received(gb, bad))


def test_first_wrong_sum_is_named_with_both_values(good):
    gb, checker, _, sums = good
    assert checker.check_combined(gb, sums) is None
    bad = sums.copy()
    bad[2, 7] = float_to_bf16(np.array([1000], np.float32))[0]
    bad[4, 1] ^= 0x8000
    want = bf16_to_float(sums[2:3])[0, 7]
    assert str(checker.check_combined(gb, bad)) == (
        f"rank 1: a wrong combined sum (source 1, token 2, column 7): got 1000.0 (0x447a), want {want}"
        f" (0x{sums[2, 7]:04x}); 2 of 5 combined rows are wrong"
    )
    assert "combined is uint16 (4, 64), not uint16 (5, 64)" in str(checker.check_combined(gb, sums[1:]))


def test_nan_must_stay_nan_of_any_payload_and_zeros_are_equal():
    point = small_point((6, 5), routing=Routing(masked_fraction=0.7))
    gb = group_batch(point, seed=3, set_index=0, payload=Payload.ADVERSARIAL)
    each, _, _, _, sums = round_trip(gb)
    nan = np.isnan(bf16_to_float(sums[0]))
    zero = (sums[0] & 0x7FFF) == 0
    assert nan.any()
    assert zero.any()
    other = np.where(nan, 0xFFFF, np.where(zero, 0x8000, sums[0])).astype(np.uint16)
    assert each[0].check_combined(gb, other) is None
    lost = np.where(nan, 0, sums[0]).astype(np.uint16)
    assert "want nan" in str(each[0].check_combined(gb, lost))
    invented = np.where(zero, 0x7FC0, sums[0]).astype(np.uint16)
    assert "got nan" in str(each[0].check_combined(gb, invented))


@pytest.mark.parametrize("weights_by", list(WeightsBy))
def test_inexact_sums_of_any_order_are_within_the_bound_and_wrong_ones_are_not(weights_by):
    # fp32 sums of a few bf16 terms hardly ever round apart for their order; bf16 sums do
    point = small_point((40, 40, 40, 40), experts=32, top_k=8, hidden=256)
    gb = group_batch(point, seed=5, set_index=0, payload=Payload.RANDOM)
    _, landed, _, partials, _ = round_trip(gb, weights_by)
    backwards = reference.combine(  # ranks descending
        gb.ids,
        gb.weights,
        landed[::-1],
        partials[::-1],
        3 - slots_of(point).slot_rank,
        "bf16",
        weighted=weights_by is WeightsBy.COMBINE,
    )
    loose = checkers(point, weights_by, Reduction(order="unordered", accumulate="bf16", exact=False))
    strict = checkers(point, weights_by, Reduction(accumulate="bf16"))
    assert all(c.check_combined(gb, s) is None for c, s in zip(loose, backwards, strict=True))
    assert any(c.check_combined(gb, s) is not None for c, s in zip(strict, backwards, strict=True))
    off = float_to_bf16(bf16_to_float(backwards[0]) * np.float32(1 + 2.0**-2))
    assert loose[0].check_combined(gb, off) is not None
    assert loose[0].check_combined(gb, np.full_like(off, 0x7FC0)) is not None
    one = backwards[0].copy()
    one[17] = backwards[0][18]  # one wrong row of 40 moves a global norm little, and is seen
    assert "token 17" in str(loose[0].check_combined(gb, one))


def test_a_sum_in_bf16_has_a_wider_bound():
    point = small_point((40, 40, 40, 40), experts=32, top_k=8, hidden=256)
    gb = group_batch(point, seed=5, set_index=0, payload=Payload.RANDOM)
    *_, sums = round_trip(gb, accumulate="bf16")
    as_fp32 = checkers(point, reduction=Reduction(exact=False))[0]
    as_bf16 = checkers(point, reduction=Reduction(exact=False, accumulate="bf16"))[0]
    assert as_fp32.check_combined(gb, sums[0]) is not None
    assert as_bf16.check_combined(gb, sums[0]) is None


def test_what_cannot_be_checked_is_refused_with_all_reasons():
    point = small_point(combine_format=RowFormat.FP8)
    with pytest.raises(ConfigError) as caught:
        Checker(point, 0, slots_of(point), WeightsBy.EXPERTS, Reduction(order="unordered", accumulate="fp16"))
    assert len(caught.value.problems) == 3
