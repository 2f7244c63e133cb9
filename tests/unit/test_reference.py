"""The oracle on an exchange small enough to work out by hand."""

import numpy as np

from epcross.kernels import reference
from epcross.kernels.codecs import bf16_to_float, float_to_bf16
from epcross.kernels.formats import RowFormat

SLOT_RANK = np.array([0, 0, 1, 1], np.int32)
# token 0 of rank 0 chooses both ranks, its token 1 twice rank 1; rank 1's token chooses nothing but slot 0
IDS = [np.array([[0, 3], [2, 3]], np.int32), np.array([[-1, 0]], np.int32)]
WEIGHTS = [np.array([[0.5, 0.25], [1, 2]], np.float32), np.array([[9, 0.5]], np.float32)]


def rows(*values):
    bits = float_to_bf16(np.array([[v] * 8 for v in values], np.float32))
    return bits.view(np.uint8)


ROWS = [rows(1, 2), rows(3)]
SCALES = [np.zeros((2, 0), np.uint8), np.zeros((1, 0), np.uint8)]


def test_dispatch_sends_each_token_once_to_each_rank_it_chose():
    zero, one = reference.dispatch(IDS, WEIGHTS, ROWS, SCALES, SLOT_RANK, 2)
    assert (zero.source.tolist(), zero.token.tolist()) == ([0, 1], [0, 0])
    assert zero.ids.tolist() == [[0, -1], [-1, 0]]
    assert zero.weights.tolist() == [[0.5, 0], [0, 0.5]]
    assert np.array_equal(zero.rows, rows(1, 3))
    assert (one.source.tolist(), one.token.tolist()) == ([0, 0], [0, 1])
    assert one.ids.tolist() == [[-1, 3], [2, 3]]
    assert one.weights.tolist() == [[0, 0.25], [1, 2]]


def combined(weighted_by_experts, accumulate="fp32"):
    landed = reference.dispatch(IDS, WEIGHTS, ROWS, SCALES, SLOT_RANK, 2)
    scale = np.array([1, 2, 4, 8], np.float32)
    partials = [reference.expert_partials(here, RowFormat.BF16, 8, scale, weighted_by_experts) for here in landed]
    sums = reference.combine(IDS, WEIGHTS, landed, partials, SLOT_RANK, accumulate, weighted=not weighted_by_experts)
    return [bf16_to_float(p)[:, 0].tolist() for p in partials], [bf16_to_float(s)[:, 0].tolist() for s in sums]


def test_experts_weigh_and_combine_adds():
    partials, sums = combined(True)
    assert partials == [[0.5, 1.5], [2.0, 2 * (4 * 1 + 8 * 2)]]
    assert sums == [[0.5 + 2.0, 40.0], [1.5]]


def test_combine_weighs_each_selection_of_an_unweighted_partial():
    partials, sums = combined(False)
    assert partials == [[1.0, 3.0], [8.0, 2 * 4.0]]
    assert sums == [[1 * 0.5 + 8 * 0.25, 8 * 1 + 8 * 2.0], [1.5]]


def test_the_declared_type_of_the_sum_shows():
    """256 + 1 + 1 is 258 in fp32 and stays 256 in bf16, whose step there is 2."""
    slot_rank = np.array([0, 1, 2], np.int32)
    ids = [np.array([[2, 1, 0]], np.int32), np.zeros((0, 3), np.int32), np.zeros((0, 3), np.int32)]
    weights = [np.ones(i.shape, np.float32) for i in ids]
    data = [rows(1), np.zeros((0, 16), np.uint8), np.zeros((0, 16), np.uint8)]
    none = [np.zeros((len(i), 0), np.uint8) for i in ids]
    landed = reference.dispatch(ids, weights, data, none, slot_rank, 3)
    partials = [float_to_bf16(np.full((1, 8), v, np.float32)) for v in (256, 1, 1)]
    for accumulate, want in (("fp32", 258), ("bf16", 256)):
        sums = reference.combine(ids, weights, landed, partials, slot_rank, accumulate)
        assert bf16_to_float(sums[0]).tolist() == [[want] * 8]
        assert [len(s) for s in sums] == [1, 0, 0]


def test_nan_stays_nan_and_a_token_without_selections_is_zero():
    slot_rank = np.array([0], np.int32)
    ids = [np.array([[0], [-1]], np.int32)]
    weights = [np.ones((2, 1), np.float32)]
    landed = reference.dispatch(ids, weights, [rows(1, 1)], [np.zeros((2, 0), np.uint8)], slot_rank, 1)
    partials = [np.array([[0xFFFF, 0x7F81, 0x7FC0, 0x3F80, 0, 0, 0, 0]], np.uint16)]
    sums = bf16_to_float(reference.combine(ids, weights, landed, partials, slot_rank)[0])
    assert np.isnan(sums[0]).tolist() == [True] * 3 + [False] * 5
    assert sums[0, 3] == 1
    assert not sums[1].any()
