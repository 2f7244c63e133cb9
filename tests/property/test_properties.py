"""What holds for every routing, placement and payload, searched for counterexamples."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._points import slots_of, small_point

from epcross.harness.errors import InputError
from epcross.harness.point import Placement, Routing
from epcross.harness.terms import PlacementKind, RoutingKind
from epcross.harness.workload.batches import assemble, group_batch, slot_scale
from epcross.harness.workload.routing import apportion
from epcross.harness.workload.routing_files import read_matrix, read_trace
from epcross.harness.workload.tape import Payload
from epcross.harness.workload.traffic import count, gini, matrices
from epcross.kernels.codecs import bf16_to_float, decode, float_to_bf16

GENERATED = [kind for kind in RoutingKind if kind not in (RoutingKind.TRACE, RoutingKind.MATRIX)]


@st.composite
def points(draw):
    ep = draw(st.integers(1, 6))
    experts = ep * draw(st.integers(1, 6))
    kind = draw(st.sampled_from(list(PlacementKind)))
    extra = draw(st.integers(0, experts)) // ep * ep if kind is PlacementKind.REPLICATED else 0
    tokens = draw(st.lists(st.integers(0, 12), min_size=ep, max_size=ep).filter(any))
    return small_point(
        tokens,
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        hidden=32,
        placement=Placement(kind=kind, num_slots=experts + extra),
        routing=Routing(
            kind=draw(st.sampled_from(GENERATED)),
            exponent=draw(st.sampled_from([0.0, 0.5, 1.0, 2.5])),
            hot_fraction=draw(st.sampled_from([0.0, 0.4, 1.0])),
            masked_fraction=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        ),
    )


@settings(max_examples=100, deadline=None)
@given(points(), st.integers(0, 2**63), st.integers(0, 3))
def test_ids_are_valid_distinct_and_stable(point, seed, set_index):
    gb = group_batch(point, seed=seed, set_index=set_index, payload=Payload.EXACT)
    again = group_batch(point, seed=seed, set_index=set_index, payload=Payload.RANDOM)
    slots = slots_of(point)
    for source, ids in enumerate(gb.ids):
        assert np.array_equal(ids, again.ids[source])
        assert ids.shape == (point.tokens[source], point.model.top_k)
        assert ((ids >= -1) & (ids < slots.num_slots)).all()
        for row in ids.tolist():
            valid = [slot for slot in row if slot >= 0]
            assert len({int(slots.slot_expert[slot]) for slot in valid}) == len(valid)
        if point.routing.masked_fraction == 0:
            assert (ids >= 0).all()


@settings(max_examples=100, deadline=None)
@given(points(), st.integers(0, 99))
def test_traffic_is_conserved_and_bounded(point, seed):
    ids = group_batch(point, seed=seed, set_index=0, payload=Payload.EXACT).ids
    slots = slots_of(point)
    selections, pairs = matrices(ids, slots.slot_rank, point.ep_size)
    t = count(ids, slots.slot_rank, point.ep_size)
    # the same by definition, token by token
    by_hand = np.zeros_like(pairs)
    for source, chosen in enumerate(ids):
        for row in chosen.tolist():
            for rank in {int(slots.slot_rank[slot]) for slot in row if slot >= 0}:
                by_hand[source, rank] += 1
    assert np.array_equal(pairs, by_hand)
    assert selections.sum(axis=1).tolist() == [int((i >= 0).sum()) for i in ids]
    assert selections.sum(axis=1).sum() == selections.sum(axis=0).sum() == t.selections_sum
    assert t.pairs_sum <= t.selections_sum
    assert t.fan_out <= min(point.model.top_k, point.ep_size)
    assert t.pairs_remote_sum == t.pairs_sum - int(np.trace(pairs))
    assert 0 <= t.gini <= 1
    assert t.imbalance == 0 or 1 <= t.imbalance <= point.ep_size


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_gini_is_half_the_relative_mean_difference(values):
    differences = sum(abs(a - b) for a in values for b in values)
    want = differences / (2 * len(values) * sum(values)) if any(values) else 0
    assert abs(gini(np.array(values)) - want) < 1e-12


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any), st.integers(0, 5000))
def test_apportioned_parts_add_up_and_are_within_one_of_their_quota(shares, total):
    parts = apportion(shares, total)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - share * total / sum(shares)) < 1 + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_exact_sums_need_8_bits_whatever_the_order_and_grouping(top_k, seed, random):
    """Partial sums of a random grouping, each rounded to bf16, against integers."""
    point = small_point((1,), experts=64, top_k=top_k, hidden=32)
    slots = slots_of(point)
    gb = group_batch(point, seed=seed, set_index=0, payload=Payload.EXACT)
    batch = gb.batch(0)
    row = decode(point.dispatch_format, batch.rows, batch.scales, 32)[0]
    units = (batch.weights[0] * slot_scale(slots)[batch.ids[0]] * 8).astype(int)
    assert units.sum() <= 256
    # every column is one +-2**j times the units, and a weight applied twice or never changes their sum
    squared = (batch.weights[0] ** 2 * slot_scale(slots)[batch.ids[0]] * 8).sum()
    never = (slot_scale(slots)[batch.ids[0]] * 8).sum()
    assert squared < units.sum() < never
    parts = [float_to_bf16(row * np.float32(u / 8)) for u in units]
    while len(parts) > 1:
        random.shuffle(parts)
        a, b = bf16_to_float(parts.pop()), bf16_to_float(parts.pop())
        parts.append(float_to_bf16(a + b))
    assert np.array_equal(bf16_to_float(parts[0]), row * np.float32(units.sum() / 8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(any), st.integers(), st.integers(0, 7))
def test_places_are_a_bijection(tokens, seed, set_index):
    point = small_point(tokens, experts=len(tokens), top_k=1)
    none = [np.full((t, 1), -1, np.int32) for t in tokens]
    gb = assemble(point, none, seed=seed, set_index=set_index, payload=Payload.EXACT)
    rows = np.concatenate([gb.batch(rank).rows for rank in range(len(tokens))])
    assert len({row.tobytes() for row in rows}) == sum(tokens)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([".npz", ".parquet", ".csv"]), st.binary(max_size=300), st.booleans())
def test_readers_raise_nothing_but_input_errors_on_any_bytes(suffix, content, with_magic):
    magic = {".npz": b"PK\x03\x04", ".parquet": b"PAR1", ".csv": b"1,2\n"}[suffix]
    content = magic + content + (magic if suffix == ".parquet" else b"") if with_magic else content
    with tempfile.TemporaryDirectory() as folder:
        read_any(Path(folder) / f"f{suffix}", content)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([".npz", ".parquet"]), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4))
def test_readers_survive_flipped_bytes_of_a_good_file(suffix, edits):
    content = bytearray(GOOD_FILES[suffix])
    for place, value in edits:
        content[int(place * (len(content) - 1))] = value
    with tempfile.TemporaryDirectory() as folder:
        read_any(Path(folder) / f"f{suffix}", bytes(content))


def read_any(path, content):
    path.write_bytes(content)
    read_trace.cache_clear()
    read_matrix.cache_clear()
    for read in (lambda: read_trace(str(path), "", 8, 2), lambda: read_matrix(str(path), "", 2)):
        said = str(path)
        try:
            read()
        except InputError as error:
            said = str(error)
        assert str(path) in said


def _good_files():
    import io

    import pandas as pd

    ids = np.array([[0, 1], [2, 3], [7, -1]])
    npz, parquet = io.BytesIO(), io.BytesIO()
    np.savez(npz, ids=ids, weights=ids / 8, traffic=np.eye(2))
    pd.DataFrame({"ids": list(ids), "weights": list(ids / 8)}).to_parquet(parquet)
    return {".npz": npz.getvalue(), ".parquet": parquet.getvalue()}


GOOD_FILES = _good_files()
