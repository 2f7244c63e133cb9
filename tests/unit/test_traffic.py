from dataclasses import asdict, replace

import numpy as np
import pytest

from epcross.harness.point import Placement, Routing
from epcross.harness.record import COLUMNS
from epcross.harness.workload.placement import lay_out
from epcross.harness.workload.routing import choose
from epcross.harness.workload.traffic import (
    count,
    gini,
    matrices,
    mean_over_sets,
    rank_bytes,
    selection_bytes,
    wire_bytes,
)


def test_two_experts_of_the_own_rank_are_two_selections_one_pair_and_nothing_remote():
    ids = [np.array([[0, 1]], np.int32), np.zeros((0, 2), np.int32)]
    t = count(ids, np.array([0, 0, 1, 1], np.int32), 2)
    assert (t.selections_sum, t.pairs_sum, t.pairs_remote_sum, t.selections_remote_sum) == (2, 1, 0, 0)
    assert (t.fan_out, t.imbalance, t.gini) == (1.0, 2.0, 0.5)
    assert (selection_bytes(t, 14336), rank_bytes(t, 14336), wire_bytes(t, 14336)) == (28672, 14336, 0)


def test_every_count_of_a_small_exchange():
    slot_rank = np.array([0, 0, 1, 1, 2, 2], np.int32)
    ids = [
        np.array([[0, 2, 3], [4, 5, -1], [-1, -1, -1]], np.int32),
        np.array([[0, 1, 2]], np.int32),
        np.zeros((0, 3), np.int32),
    ]
    selections, pairs = matrices(ids, slot_rank, 3)
    assert selections.tolist() == [[1, 2, 2], [2, 1, 0], [0, 0, 0]]
    assert pairs.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    t = count(ids, slot_rank, 3)
    assert t.selections_sum == 8
    assert t.selections_remote_sum == 6
    assert t.pairs_sum == 5
    assert t.pairs_remote_sum == 3
    assert t.selections_sent_max == 5
    assert t.selections_received_max == 3
    assert t.pairs_sent_max == 3
    assert t.pairs_sent_remote_max == 2
    assert t.pairs_received_max == 2
    assert t.pairs_received_remote_max == 1
    assert t.fan_out == 5 / 4
    assert t.imbalance == 3 / (8 / 3)


def test_names_are_those_of_the_record():
    t = count([np.zeros((0, 1), np.int32)], np.zeros(1, np.int32), 1)
    assert set(asdict(t)) <= set(COLUMNS)
    assert t.fan_out == t.imbalance == t.gini == t.pairs_sum == 0


@pytest.mark.parametrize(("values", "want"), [([5, 5, 5], 0), ([0, 0, 0, 8], 0.75), ([1, 3], 0.25), ([0, 0], 0)])
def test_gini(values, want):
    assert gini(np.array(values)) == pytest.approx(want)


def test_mean_over_sets_keeps_counts_whole():
    t = count([np.array([[0, 1]], np.int32)], np.zeros(2, np.int32), 1)
    mean = mean_over_sets([t, replace(t, selections_sum=5, fan_out=2.0), replace(t, selections_sum=5, fan_out=3.0)])
    assert mean.selections_sum == 4
    assert isinstance(mean.selections_sum, int)
    assert mean.fan_out == 2.0
    with pytest.raises(ValueError, match="at least one set"):
        mean_over_sets([])


@pytest.mark.parametrize(("ep", "published"), [(8, 5.29), (16, 6.52), (32, 7.27), (64, 7.68)])
def test_uniform_fan_out_of_8_of_256_experts_is_its_expectation(ep, published):
    slots = lay_out(Placement(num_slots=256), 256, ep)
    tokens = (512,) * 16 + (0,) * (ep - 16) if ep > 16 else (8192 // ep,) * ep
    ids = [
        choose(Routing(), num_experts=256, top_k=8, slots=slots, tokens=tokens, seed=3, set_index=0, source=s)
        for s in range(ep)
    ]
    missed = np.prod([(256 - 256 // ep - i) / (256 - i) for i in range(8)])  # no choice on a given rank
    assert ep * (1 - missed) == pytest.approx(published, abs=0.006)
    # 8192 tokens with a standard deviation below 1: 5 standard errors
    assert count(ids, slots.slot_rank, ep).fan_out == pytest.approx(ep * (1 - missed), abs=5 / 8192**0.5)
