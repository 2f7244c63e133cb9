"""Small points for tests of workload, checks and contract, and what rows of them are stored under."""

from epcross.harness.backends.base import Received
from epcross.harness.point import Model, Placement, Point, Routing
from epcross.harness.storing.rows import RunContext
from epcross.harness.terms import Regime, RowFormat
from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.placement import lay_out
from epcross.kernels import reference

CONTEXT = RunContext(
    run_id="run", measure_hash="hash", machine="machine", allocation_id="here", git_sha="", git_dirty=False
)


def small_point(
    tokens=(5, 3),
    *,
    experts=8,
    top_k=3,
    hidden=64,
    routing=None,
    placement=None,
    dispatch_format=RowFormat.BF16,
    combine_format=RowFormat.BF16,
) -> Point:
    return Point(
        backend="test",
        model=Model(name="small", num_experts=experts, top_k=top_k, hidden=hidden, intermediate=hidden),
        ep_size=len(tokens),
        tokens_per_rank=max(tokens),
        tokens=tuple(tokens),
        max_tokens_per_rank=max(tokens),
        routing=routing or Routing(),
        placement=placement or Placement(num_slots=experts),
        dispatch_format=dispatch_format,
        combine_format=combine_format,
        regime=Regime.STEADY,
    )


def slots_of(point: Point):
    return lay_out(point.placement, point.model.num_experts, point.ep_size)


def oracle_landed(gb: GroupBatch) -> list[reference.Landed]:
    """What the oracle says every rank receives."""
    batches = [gb.batch(rank) for rank in range(gb.point.ep_size)]
    return reference.dispatch(
        [b.ids for b in batches],
        [b.weights for b in batches],
        [b.rows for b in batches],
        [b.scales for b in batches],
        slots_of(gb.point).slot_rank,
        gb.point.ep_size,
    )


def received_from(landed: reference.Landed) -> Received:
    return Received(**{name: getattr(landed, name).copy() for name in landed.__slots__})
