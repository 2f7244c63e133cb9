"""How experts become physical slots, and slots ranks.

Slot s always lies on rank s // slots_per_rank; a placement only says which expert a slot holds:

    contiguous   slot s holds expert s
    strided      expert e lies on rank e % ep_size
    replicated   slot s holds expert s % num_experts, so the extra slots go to experts 0, 1, 2, ... in turn; copies of
                 an expert are num_experts slots apart and share a rank only if a rank holds more slots than experts
"""

from dataclasses import dataclass

import numpy as np

from epcross.harness.backends.base import Int32
from epcross.harness.errors import ConfigError
from epcross.harness.point import Placement
from epcross.harness.terms import PlacementKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """A placement, laid out. E logical experts, S physical slots."""

    num_slots: int
    slots_per_rank: int
    slot_rank: Int32  # [S], the rank that holds each slot
    slot_expert: Int32  # [S], the expert in each slot
    replicas: Int32  # [E, max replicas], the slots of each expert in ascending order, -1 beyond its count
    replica_count: Int32  # [E]

    @property
    def ep_size(self) -> int:
        """Ranks the slots lie on."""
        return self.num_slots // self.slots_per_rank


def lay_out(placement: Placement, num_experts: int, ep_size: int) -> Slots:
    """Lay `num_experts` experts on `ep_size` ranks.

    Raises:
        ConfigError: the placement is impossible; all reasons, as `problems` gives them.
    """
    if found := problems(placement, num_experts, ep_size):
        raise ConfigError(found)
    slots_per_rank = placement.num_slots // ep_size
    slot = np.arange(placement.num_slots, dtype=np.int32)
    slot_rank = (slot // slots_per_rank).astype(np.int32)
    if placement.kind is PlacementKind.STRIDED:
        slot_expert = (slot % slots_per_rank * ep_size + slot_rank).astype(np.int32)
    else:
        slot_expert = slot % np.int32(num_experts)
    count = np.bincount(slot_expert, minlength=num_experts).astype(np.int32)
    replicas = np.full((num_experts, int(count.max())), -1, np.int32)
    by_expert = np.argsort(slot_expert, kind="stable")
    nth = np.arange(len(slot)) - np.repeat(np.cumsum(count) - count, count)
    replicas[slot_expert[by_expert], nth] = by_expert
    return Slots(
        num_slots=placement.num_slots,
        slots_per_rank=slots_per_rank,
        slot_rank=slot_rank,
        slot_expert=slot_expert,
        replicas=replicas,
        replica_count=count,
    )


def problems(placement: Placement, num_experts: int, ep_size: int) -> list[str]:
    """Why the placement cannot be laid out, one sentence each with the next step; empty if it can."""
    if num_experts < 1 or ep_size < 1:
        return [f"num_experts={num_experts} and ep_size={ep_size} must both be at least 1"]
    kind, num_slots = placement.kind, placement.num_slots
    fitting_slots = -(-max(num_experts, num_slots) // ep_size) * ep_size
    if kind is PlacementKind.REPLICATED:
        found = []
        if num_slots < num_experts:
            found.append(
                f"num_slots={num_slots} cannot hold num_experts={num_experts}: a replicated placement needs at least"
                f" one slot for each expert; use num_slots={fitting_slots}"
            )
        if num_slots % ep_size:
            found.append(
                f"num_slots={num_slots} does not divide over ep_size={ep_size} ranks; use num_slots={fitting_slots}"
            )
        return found
    found = []
    if num_slots != num_experts:
        found.append(
            f"num_slots={num_slots} differs from num_experts={num_experts}, which a {kind} placement does not allow;"
            " leave num_slots out or use placement=replicated"
        )
    if num_experts % ep_size:
        below = max(d for d in range(1, min(ep_size, num_experts) + 1) if num_experts % d == 0)
        above = min((d for d in range(ep_size, num_experts + 1) if num_experts % d == 0), default=None)
        nearest = f"ep_size={below}" if above is None else f"ep_size={below} or ep_size={above}"
        found.append(
            f"num_experts={num_experts} does not divide over ep_size={ep_size} ranks under a {kind} placement;"
            f" the nearest sizes that do are {nearest}, or use placement=replicated with"
            f" num_slots={-(-num_experts // ep_size) * ep_size}"
        )
    return found
