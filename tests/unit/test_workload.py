import numpy as np
import pytest
from tests._points import slots_of, small_point

from epcross.harness.errors import ConfigError
from epcross.harness.point import Routing
from epcross.harness.terms import RoutingKind, RowFormat
from epcross.harness.workload.batches import assemble, group_batch, ids_hash, slot_scale
from epcross.harness.workload.tape import Payload
from epcross.kernels.codecs import bf16_to_float, decode
from epcross.kernels.formats import row_size

# rows, weights and ids may never change: they are the same on every machine and for every version
PINNED_ROW = [-2.0, 4.0, -2.0, 1.0, -2.0, 2.0, -2.0, 1.0]
PINNED_WEIGHTS = [[0.5, 0.125, 0.25], [0.5, 0.25, 0.125]]
PINNED_HASH = "e997c2cd3b41f6c8"


def batch_of(point, rank=0, *, payload=Payload.EXACT, seed=1, set_index=0):
    return group_batch(point, seed=seed, set_index=set_index, payload=payload).batch(rank)


@pytest.mark.parametrize("row_format", list(RowFormat))
@pytest.mark.parametrize("payload", list(Payload))
def test_batches_have_the_padded_shapes_and_zero_padding(row_format, payload):
    point = small_point((5, 0), hidden=66, dispatch_format=row_format)
    size = row_size(row_format, 66)
    for rank, tokens in enumerate(point.tokens):
        batch = batch_of(point, rank, payload=payload)
        assert batch.rows.shape == (tokens, size.padded_row_bytes)
        assert batch.scales.shape == (tokens, size.padded_scale_bytes)
        assert batch.ids.shape == batch.weights.shape == (tokens, 3)
        assert (batch.ids.dtype, batch.weights.dtype) == (np.int32, np.float32)
        assert not batch.rows[:, size.row_bytes :].any()
        assert not batch.scales[:, size.scale_bytes :].any()
        assert batch.rows.flags.c_contiguous
        assert batch.rows.flags.writeable


@pytest.mark.parametrize("row_format", list(RowFormat))
@pytest.mark.parametrize("payload", list(Payload))
def test_any_two_rows_of_a_batch_of_the_group_differ(row_format, payload):
    # hostile tapes have whole lines of ones, so that only rows of several lines are sure to differ
    hidden = 2048 if payload is Payload.ADVERSARIAL else 64
    point = small_point((700, 0, 900, 448), hidden=hidden, dispatch_format=row_format)
    gb = group_batch(point, seed=0, set_index=0, payload=payload)
    rows = np.concatenate([gb.batch(rank).rows for rank in range(4)])
    assert len({row.tobytes() for row in rows}) == 2048


def test_rows_of_other_seeds_and_sets_are_other_rows_in_place():
    point = small_point((50, 50))
    first = batch_of(point).rows
    for other in (batch_of(point, seed=2), batch_of(point, set_index=1), batch_of(point, rank=1)):
        assert (first != other.rows).any(axis=1).all()


def test_rows_are_pinned():
    batch = batch_of(small_point((2, 1)))
    assert bf16_to_float(batch.rows.view(np.uint16))[1, :8].tolist() == PINNED_ROW
    assert batch.weights.tolist() == PINNED_WEIGHTS


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_exact_values_are_signed_powers_of_two_and_never_zero(row_format):
    point = small_point((40, 0), hidden=256, dispatch_format=row_format)
    batch = batch_of(point)
    values = np.abs(decode(row_format, batch.rows, batch.scales, 256))
    assert set(np.unique(np.log2(values)).tolist()) <= set(range(-1, 4))
    assert len(np.unique(values)) >= 3
    assert set(np.unique(batch.weights).tolist()) == {0.125, 0.25, 0.5}


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_random_values_are_finite_and_moderate(row_format):
    point = small_point((40, 0), hidden=256, dispatch_format=row_format)
    batch = batch_of(point, payload=Payload.RANDOM)
    values = np.abs(decode(row_format, batch.rows, batch.scales, 256))
    assert values.max() < 256
    assert values[values > 0].min() > 2.0**-8
    assert len(np.unique(values)) > 60
    np.testing.assert_allclose(batch.weights.sum(axis=1), 1, rtol=1e-6)


def test_random_weights_add_to_one_over_valid_selections():
    point = small_point((200, 0), top_k=4, routing=Routing(masked_fraction=0.3))
    batch = batch_of(point, payload=Payload.RANDOM)
    valid = batch.ids >= 0
    total = np.where(valid, batch.weights, 0).sum(axis=1)
    np.testing.assert_allclose(total[valid.any(axis=1)], 1, rtol=1e-6)
    assert np.isfinite(batch.weights).all()


def test_random_weights_of_a_trace_are_its_own(tmp_path):
    path = tmp_path / "t.npz"
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(path, ids=np.array([[0, 1, 2], [3, 4, 5], [5, 6, 7], [1, 3, 5]]), weights=weights)
    point = small_point((4, 2), routing=Routing(kind=RoutingKind.TRACE, path=str(path)))
    batch = batch_of(point, payload=Payload.RANDOM)
    by_first = {0: 0, 3: 1, 5: 2, 1: 3}
    assert np.array_equal(batch.weights, weights[[by_first[row[0]] for row in batch.ids.tolist()]])


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_adversarial_rows_hold_the_words_that_break_protocols(row_format):
    point = small_point((64, 0), hidden=512, dispatch_format=row_format, routing=Routing(masked_fraction=0.3))
    gb = group_batch(point, seed=0, set_index=0, payload=Payload.ADVERSARIAL)
    batch = gb.batch(0)
    words = batch.rows.view(np.uint32)
    for hostile in (0xFFFFFFFF, 0x7FC07FC0, 0x7F817F81, 0x80000000, 0):
        assert (words == hostile).any(), hex(hostile)
    assert (batch.rows.reshape(len(batch.rows), -1, 16) == 0xFF).all(axis=2).any()  # whole vectors of ones
    assert np.isnan(batch.weights[batch.ids < 0]).all()
    assert np.isfinite(batch.weights[batch.ids >= 0]).all()
    partials = bf16_to_float(gb.adversarial_partials(np.ones(64, int), np.zeros(64, int), np.arange(64)))
    elsewhere = bf16_to_float(gb.adversarial_partials(np.zeros(64, int), np.zeros(64, int), np.arange(64)))
    assert not (np.nan_to_num(partials, nan=9) == np.nan_to_num(elsewhere, nan=9)).all(axis=1).any()
    assert np.isnan(partials).any()
    assert set(np.unique(np.abs(partials[~np.isnan(partials)])).tolist()) == {1, 2, 4}


def test_neighbouring_slots_scale_differently():
    point = small_point((1, 1, 1), experts=24)
    slots = slots_of(point)
    scale = slot_scale(slots).reshape(3, 8)
    assert set(scale.ravel().tolist()) == {1, 2, 4}
    assert (scale[:, 1:] != scale[:, :-1]).all()
    assert (scale[1:] != scale[:-1]).all()


def test_the_hash_is_of_ids_and_shapes_of_all_ranks_and_sets():
    point = small_point((4, 3))
    sets = [group_batch(point, seed=0, set_index=i, payload=Payload.EXACT).ids for i in range(2)]
    assert ids_hash(sets) == PINNED_HASH
    assert ids_hash(sets[:1]) != ids_hash(sets)
    assert ids_hash([sets[0][::-1], sets[1]]) != ids_hash(sets)
    assert ids_hash([(np.zeros((2, 3), np.int32),)]) != ids_hash([(np.zeros((3, 2), np.int32),)])


def test_more_choices_than_can_be_checked_exactly_are_refused():
    point = small_point((1, 1), experts=80, top_k=65)
    with pytest.raises(ConfigError, match="top_k=65 cannot be verified exactly; use at most 64"):
        assemble(point, [np.zeros((1, 65), np.int32)] * 2, seed=0, set_index=0, payload=Payload.EXACT)
