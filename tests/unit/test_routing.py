from functools import partial

import numpy as np
import pytest

from epcross.harness.point import Placement, Routing
from epcross.harness.terms import PlacementKind, RoutingKind
from epcross.harness.workload.placement import lay_out
from epcross.harness.workload.routing import apportion, choose, problems, trace_rows, zipf_table

PINNED_UNIFORM = [
    [[77, 248, 35, 100, 11, 208, 108, 16], [242, 138, 217, 164, 2, 81, 156, 214]],
    [[120, 161, 127, 185, 23, 106, 214, 30]],
]
PINNED_ZIPF = [
    [[237, 140, 229, 110, 186, 179, 21, 207], [224, 46, 111, 1, 229, 207, 120, 244]],
    [[207, 36, 222, 22, 229, 216, 127, 237]],
]


def routed(routing, *, experts=16, top_k=4, ep=4, tokens=(9, 0, 5, 7), seed=0, set_index=0, placement=None):
    slots = lay_out(placement or Placement(num_slots=experts), experts, ep)
    ids = [
        choose(
            routing,
            num_experts=experts,
            top_k=top_k,
            slots=slots,
            tokens=tokens,
            seed=seed,
            set_index=set_index,
            source=source,
        )
        for source in range(ep)
    ]
    return slots, ids


def test_ids_are_pinned():
    """These may never change: they are the same tokens on every machine and for every version."""
    _, ids = routed(Routing(), experts=256, top_k=8, ep=2, tokens=(2, 1))
    assert [i.tolist() for i in ids] == PINNED_UNIFORM
    _, ids = routed(Routing(kind=RoutingKind.ZIPF, exponent=1.2), experts=256, top_k=8, ep=2, tokens=(2, 1))
    assert [i.tolist() for i in ids] == PINNED_ZIPF


def test_a_token_chooses_the_same_experts_at_any_ep_size_and_with_any_number_of_tokens():
    _, few = routed(Routing(), experts=64, top_k=6, ep=2, tokens=(5, 5))
    _, many = routed(Routing(), experts=64, top_k=6, ep=16, tokens=(40,) * 16)
    assert np.array_equal(few[1], many[1][:5])


def test_seed_set_and_source_each_change_the_choice():
    _, a = routed(Routing())
    _, b = routed(Routing(), seed=1)
    _, c = routed(Routing(), set_index=1)
    assert not np.array_equal(a[0], b[0])
    assert not np.array_equal(a[0], c[0])
    assert not np.array_equal(a[0][:5], a[2])


@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (16, 3), (10, 4), (7, 7), (256, 8)])
@pytest.mark.parametrize("tokens", [(8, 8), (1, 0), (33, 6)])
def test_perfect_counts_differ_by_at_most_one_over_the_whole_group(experts, top_k, tokens):
    ep = 2 if experts % 2 == 0 else 1
    _, ids = routed(Routing(kind=RoutingKind.PERFECT), experts=experts, top_k=top_k, ep=ep, tokens=tokens[:ep])
    counts = np.bincount(np.concatenate(ids).ravel(), minlength=experts)
    assert counts.max() - counts.min() <= 1
    assert counts.sum() == sum(tokens[:ep]) * top_k


def test_perfect_passes_are_fresh_permutations():
    _, ids = routed(Routing(kind=RoutingKind.PERFECT), experts=8, top_k=4, ep=1, tokens=(40,))
    assert len({tuple(sorted(row)) for row in ids[0].tolist()}) > 20


def test_zipf_shares_follow_the_exponent_and_do_not_favour_a_rank():
    routing = Routing(kind=RoutingKind.ZIPF, exponent=1.0)
    _, ids = routed(routing, experts=64, top_k=1, ep=1, tokens=(60_000,))
    share = np.sort(np.bincount(ids[0].ravel(), minlength=64))[::-1] / 60_000
    harmonic = sum(1 / i for i in range(1, 65))
    assert share[:4] == pytest.approx([1 / i / harmonic for i in range(1, 5)], rel=0.05)
    hottest = {int(np.bincount(routed(routing, seed=s, tokens=(99, 0, 0, 0))[1][0].ravel()).argmax()) for s in range(8)}
    assert len(hottest) > 3


def test_zipf_table_is_integers_that_fit_a_32_bit_draw():
    table = zipf_table(1.5, 1024)
    assert table.dtype == np.uint64
    assert 0 < int(table.sum()) < 2**32
    assert table.min() >= 1
    assert int(table[0]) == 2**31 // 1024
    assert int(table[3]) == 2**31 // 1024 // 8
    assert zipf_table(0.0, 10).tolist() == [2**31 // 10] * 10


def test_hot_expert_takes_its_share_of_tokens_and_no_other():
    _, ids = routed(Routing(kind=RoutingKind.HOT_EXPERT, hot_fraction=0.3), tokens=(20_000, 0, 0, 0))
    assert (ids[0] == 0).any(axis=1).mean() == pytest.approx(0.3, abs=0.02)
    for fraction, share in ((0.0, 0), (1.0, 1)):
        _, ids = routed(Routing(kind=RoutingKind.HOT_EXPERT, hot_fraction=fraction), tokens=(50, 0, 0, 0))
        assert (ids[0] == 0).any(axis=1).mean() == share


def test_all_to_one_and_local_only_stay_on_their_rank():
    slots, ids = routed(Routing(kind=RoutingKind.ALL_TO_ONE))
    assert all((slots.slot_rank[i] == 0).all() for i in ids)
    slots, ids = routed(Routing(kind=RoutingKind.LOCAL_ONLY))
    assert all((slots.slot_rank[i] == source).all() for source, i in enumerate(ids))


def test_a_rank_with_too_few_experts_gives_all_and_the_rest_come_from_others():
    slots, ids = routed(Routing(kind=RoutingKind.ALL_TO_ONE), experts=16, top_k=6)
    for chosen in ids:
        assert ((slots.slot_rank[chosen] == 0).sum(axis=1) == 4).all()
        assert all(len(set(row)) == 6 for row in chosen.tolist())


def test_masking_takes_its_share_and_can_take_everything():
    _, ids = routed(Routing(masked_fraction=0.25), tokens=(20_000, 0, 0, 0))
    assert (ids[0] < 0).mean() == pytest.approx(0.25, abs=0.01)
    _, ids = routed(Routing(masked_fraction=1.0))
    assert all((i == -1).all() for i in ids)
    _, plain = routed(Routing())
    _, masked = routed(Routing(masked_fraction=0.5))
    assert all(((m == p) | (m == -1)).all() for m, p in zip(masked, plain, strict=True))


def test_replicas_take_turns_by_source_and_token():
    placement = Placement(kind=PlacementKind.REPLICATED, num_slots=24)
    slots, ids = routed(Routing(), experts=16, placement=placement)
    for source, chosen in enumerate(ids):
        for token, row in enumerate(chosen.tolist()):
            experts = slots.slot_expert[row]
            assert len(set(experts.tolist())) == 4
            for slot, expert in zip(row, experts, strict=True):
                nth = (source + token) % slots.replica_count[expert]
                assert slots.replicas[expert, nth] == slot
    slots, ids = routed(Routing(kind=RoutingKind.LOCAL_ONLY), experts=16, placement=placement)
    assert all((slots.slot_rank[i] == source).all() for source, i in enumerate(ids))


def test_trace_rows_are_dealt_over_the_ranks_and_wrap(tmp_path):
    path = tmp_path / "trace.npz"
    ids = np.array([[i, (i + 1) % 16, (i + 5) % 16, -1] for i in range(6)])
    np.savez(path, ids=ids)
    routing = Routing(kind=RoutingKind.TRACE, path=str(path))
    slots, chosen = routed(routing, tokens=(3, 0, 4, 1), seed=5, set_index=1)
    dealt = np.concatenate([trace_rows(6, (3, 0, 4, 1), 5, 1, source) for source in range(4)])
    assert (np.diff(dealt) % 6 == 1).all()
    assert np.array_equal(np.concatenate(chosen), ids[dealt])
    assert slots.num_slots == 16


def test_matrix_is_realised_to_the_nearest_token(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("# from row to column\n0,1,1,2\n1,0,0,0\n0,0,0,0\n0.1,0.2,0.3,0.4\n")
    routing = Routing(kind=RoutingKind.MATRIX, path=str(path))
    slots, ids = routed(routing, tokens=(8, 5, 5, 10))
    ranks = [np.where(i >= 0, slots.slot_rank[i], -1) for i in ids]
    assert all((r == r[:, :1]).all() for r in ranks)
    assert [np.bincount(r[:, 0], minlength=4).tolist() for r in ranks if (r >= 0).all()] == [
        [0, 2, 2, 4],
        [5, 0, 0, 0],
        [1, 2, 3, 4],
    ]
    assert (ranks[2] == -1).all()


def test_apportion_gives_every_thing_to_the_largest_remainders():
    assert apportion([1, 1, 1], 4) == [2, 1, 1]
    assert apportion([0.5, 0.3, 0.2], 7) == [4, 2, 1]
    assert apportion([0, 5], 3) == [0, 3]


def test_problems_are_all_named(tmp_path):
    check = partial(problems, num_experts=16, top_k=4, ep_size=4)
    assert check(Routing()) == []
    assert problems(Routing(), num_experts=4, top_k=5, ep_size=1) == [
        "top_k=5 must lie in [1, num_experts=4]; a token's experts are distinct"
    ]
    bad = Routing(kind=RoutingKind.ZIPF, exponent=float("nan"), masked_fraction=1.5, hot_fraction=-1)
    assert len(check(bad)) == 3
    assert "give routing.path" in check(Routing(kind=RoutingKind.TRACE))[0]
    assert "cannot read" in check(Routing(kind=RoutingKind.MATRIX, path=str(tmp_path / "none.csv")))[0]
