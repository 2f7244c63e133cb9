import numpy as np
import pytest

from epcross.harness.errors import ConfigError
from epcross.harness.point import Placement
from epcross.harness.terms import PlacementKind
from epcross.harness.workload.placement import lay_out, problems


def test_contiguous_puts_expert_e_in_slot_e():
    slots = lay_out(Placement(num_slots=8), 8, 2)
    assert (slots.num_slots, slots.slots_per_rank, slots.ep_size) == (8, 4, 2)
    assert slots.slot_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert slots.slot_expert.tolist() == list(range(8))
    assert slots.replicas.tolist() == [[e] for e in range(8)]
    assert slots.replica_count.tolist() == [1] * 8
    assert slots.slot_rank.dtype == slots.replicas.dtype == slots.replica_count.dtype == np.int32


def test_strided_puts_expert_e_on_rank_e_mod_ep_size():
    slots = lay_out(Placement(kind=PlacementKind.STRIDED, num_slots=6), 6, 3)
    assert slots.slot_expert.tolist() == [0, 3, 1, 4, 2, 5]
    assert [int(slots.slot_rank[slots.replicas[e, 0]]) for e in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ep_72_of_256_experts_has_288_slots_and_no_rank_holds_an_expert_twice():
    slots = lay_out(Placement(kind=PlacementKind.REPLICATED, num_slots=288), 256, 72)
    assert slots.slots_per_rank == 4
    assert slots.replica_count.tolist() == [2] * 32 + [1] * 224
    assert slots.replicas[3].tolist() == [3, 259]
    assert slots.replicas[40].tolist() == [40, -1]
    for expert in range(256):
        mine = slots.replicas[expert, : slots.replica_count[expert]]
        assert slots.slot_expert[mine].tolist() == [expert] * len(mine)
        assert len(set(slots.slot_rank[mine].tolist())) == len(mine)


@pytest.mark.parametrize(
    ("placement", "experts", "ep", "said"),
    [
        (Placement(num_slots=256), 256, 3, ["ep_size=2 or ep_size=4", "num_slots=258"]),
        (Placement(num_slots=256), 256, 72, ["ep_size=64 or ep_size=128", "num_slots=288"]),
        (Placement(num_slots=8), 8, 16, ["nearest sizes that do are ep_size=8,", "num_slots=16"]),
        (Placement(num_slots=9), 8, 2, ["num_slots=9 differs from num_experts=8", "placement=replicated"]),
        (Placement(kind=PlacementKind.STRIDED, num_slots=10), 10, 4, ["ep_size=2 or ep_size=5", "num_slots=12"]),
        (Placement(kind=PlacementKind.REPLICATED, num_slots=200), 256, 8, ["num_slots=200 cannot hold", "=256"]),
        (Placement(kind=PlacementKind.REPLICATED, num_slots=290), 256, 72, ["use num_slots=360"]),
        (Placement(num_slots=8), 8, 0, ["ep_size=0"]),
    ],
)
def test_impossible_placements_say_what_would_work(placement, experts, ep, said):
    found = problems(placement, experts, ep)
    for words in said:
        assert any(words in problem for problem in found), found
    with pytest.raises(ConfigError):
        lay_out(placement, experts, ep)


def test_what_a_problem_proposes_has_no_problem():
    assert problems(Placement(num_slots=256), 256, 64) == []
    assert problems(Placement(kind=PlacementKind.REPLICATED, num_slots=288), 256, 72) == []
    assert problems(Placement(kind=PlacementKind.REPLICATED, num_slots=360), 256, 72) == []
