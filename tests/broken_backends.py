"""A right backend in plain Python over the group's all-gather, and children of it that are each wrong in one way."""

import pickle
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from epcross.harness.backends.base import Backend, Batch, BF16Bits, Description, Group, Received, Reduction, Shard
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, Domain, Phase, WeightsBy
from epcross.kernels import reference


class ReferenceBackend(Backend):
    """Right, slow, for tiny shapes: every rank computes what the oracle says from everybody's inputs."""

    name = "reference_test"
    domains = frozenset({Domain.CPU})
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {
        Phase.DISPATCH: frozenset({Boundary.PACK, Boundary.TRANSFER}),
        Phase.COMBINE: frozenset({Boundary.TRANSFER, Boundary.REDUCE}),
        Phase.ROUND_TRIP: frozenset({Boundary.PACK, Boundary.TRANSFER, Boundary.EXPERTS_IDENTITY, Boundary.REDUCE}),
    }
    host_sync = True
    timeout_s = 20.0
    calls = 0

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, point: Point) -> str | None:
        return None if point.ep_size <= 8 else f"ep_size={point.ep_size} is above 8"

    def workspace_bytes(self, point: Point) -> int:
        return 0

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        self.point, self.group, self.rank, self.slot_rank = point, group, shard.rank, shard.slot_rank
        self.batches = list(shard.batches)
        self.staged: dict[int, BF16Bits] = {}
        self.sums = np.zeros((point.tokens[self.rank], point.model.hidden), np.uint16)

    def refill(self, set_index: int, batch: Batch) -> None:
        self.batches[set_index] = batch

    def dispatch(self, set_index: int) -> None:
        self.calls += 1
        self.landed = self.exchange(set_index)

    def exchange(self, set_index: int) -> reference.Landed:
        b = self.batches[set_index]
        mine = pickle.dumps((b.ids, b.weights, b.rows, b.scales))
        everyone = [pickle.loads(data) for data in self.group.all_gather(mine, self.timeout_s)]
        ids, weights, rows, scales = zip(*everyone, strict=True)
        landed = reference.dispatch(ids, weights, rows, scales, self.slot_rank, self.group.size)[self.rank]
        backwards = np.argsort(-landed.token, kind="stable")  # any order is right
        return reference.Landed(**{name: getattr(landed, name)[backwards] for name in landed.__slots__})

    def received(self, set_index: int) -> Received:
        return Received(**{name: getattr(self.landed, name).copy() for name in self.landed.__slots__})

    def stage(self, set_index: int, partials: BF16Bits) -> None:
        self.staged[set_index] = partials.copy()
        self.partials = partials.copy()

    def experts(self, set_index: int) -> None:
        self.partials = self.staged[set_index].copy()

    def combine(self, set_index: int) -> None:
        self.sums = self.reduced(set_index)

    def reduced(self, set_index: int, weighted: bool | None = None) -> BF16Bits:
        b = self.batches[set_index]
        mine = pickle.dumps((b.ids, b.weights, self.landed, self.partials))
        everyone = [pickle.loads(data) for data in self.group.all_gather(mine, self.timeout_s)]
        if weighted is None:
            weighted = self.weights_by is WeightsBy.COMBINE
        ids, weights, landed, partials = zip(*everyone, strict=True)
        return reference.combine(ids, weights, landed, partials, self.slot_rank, self.reduction.accumulate, weighted)[
            self.rank
        ]

    def combined(self, set_index: int) -> BF16Bits:
        return self.sums.copy()

    def poison(self) -> None:
        self.sums[:] = 0x7FA5
        if hasattr(self, "landed"):
            self.landed.rows[:] = 0xA5
            self.landed.token[:] = -1

    def describe(self) -> Description:
        return Description(version="1", transport="all-gather")

    def close(self) -> None:
        return


class WeightsInCombine(ReferenceBackend):
    """Right as well."""

    weights_by = WeightsBy.COMBINE


def raises_in(stage: str) -> type[ReferenceBackend]:
    """A child whose `stage` raises on rank 1 (a rank of its own, so that peers wait for it)."""

    def fail(self: ReferenceBackend, *args: object) -> object:
        if getattr(self, "rank", 1) == 1:
            raise RuntimeError("deliberate")
        return getattr(ReferenceBackend, stage)(self, *args)

    return type(f"RaisesIn_{stage}", (ReferenceBackend,), {stage: fail})


def __getattr__(name: str) -> type[ReferenceBackend]:
    """`RaisesIn_dispatch` and so on, so that a YAML's `target` can name them."""
    if name.startswith("RaisesIn_"):
        return raises_in(name.removeprefix("RaisesIn_"))
    raise AttributeError(name)


class OnRankOne(ReferenceBackend):
    """Children spoil what rank 1 received, or its sums."""

    def dispatch(self, set_index: int) -> None:
        super().dispatch(set_index)
        if self.rank == 1 and len(self.landed.token) > 1:
            self.landed = replace(self.landed, **self.spoil(self.landed))

    def combine(self, set_index: int) -> None:
        super().combine(set_index)
        if self.rank == 1:
            self.sums = self.spoil_sums(self.sums)

    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {}

    def spoil_sums(self, sums: BF16Bits) -> BF16Bits:
        return sums


class Hangs(ReferenceBackend):
    """Dispatch does not return on rank 1 until the test lets it."""

    let_go = threading.Event()

    def dispatch(self, set_index: int) -> None:
        if self.rank == 1:
            self.let_go.wait(60)
        super().dispatch(set_index)


class ReturnsEarly(ReferenceBackend):
    """Dispatch returns before anything has moved; combine waits for it."""

    def dispatch(self, set_index: int) -> None:
        if not hasattr(self, "landed"):
            super().dispatch(set_index)

    def combine(self, set_index: int) -> None:
        self.landed = self.exchange(set_index)
        super().combine(set_index)


class WritesLate(ReferenceBackend):
    """The last row's bytes land a little after dispatch has returned."""

    def dispatch(self, set_index: int) -> None:
        super().dispatch(set_index)
        if len(self.landed.rows):
            late, rows = self.landed.rows[-1].copy(), self.landed.rows
            rows[-1] = 0
            timer = threading.Timer(0.05, lambda: rows.__setitem__(-1, late))
            timer.daemon = True
            timer.start()


class OneWrongRow(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        rows = landed.rows.copy()
        rows[-1, 3] ^= 0x40
        return {"rows": rows}


class SwapsTwoRows(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {"rows": landed.rows[[1, 0, *range(2, len(landed.rows))]]}


class SwapsScales(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {"scales": landed.scales[[1, 0, *range(2, len(landed.rows))]]}


class WrongExpert(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {"ids": np.where(landed.ids >= 0, landed.ids ^ 1, -1).astype(np.int32)}


class WrongWeights(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {"weights": landed.weights[::-1].copy()}


class DropsARow(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {name: getattr(landed, name)[1:] for name in landed.__slots__}


class RepeatsARow(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {name: np.concatenate([getattr(landed, name), getattr(landed, name)[:1]]) for name in landed.__slots__}


class ForeignRow(OnRankOne):
    """A row in the place of a token that never existed."""

    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        token = landed.token.copy()
        token[0] = 1000
        return {"token": token}


class Unpadded(OnRankOne):
    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        return {"rows": landed.rows[:, :-1]}


class WeightTwice(ReferenceBackend):
    """The experts have multiplied the weights, and combine does again."""

    def combine(self, set_index: int) -> None:
        self.sums = self.reduced(set_index, weighted=True)


class WeightNever(WeightsInCombine):
    """Combine should multiply the weights, and does not."""

    def combine(self, set_index: int) -> None:
        self.sums = self.reduced(set_index, weighted=False)


class NoOpAfterFirst(ReferenceBackend):
    """Works in its first round only, as a kernel that is missing from a graph."""

    def dispatch(self, set_index: int) -> None:
        if self.calls == 0:
            super().dispatch(set_index)


class IdleWhileTimed(ReferenceBackend):
    """Does nothing at all once a timed pair has begun, until it gets new inputs: the fastest there is."""

    idle = False

    def refill(self, set_index: int, batch: Batch) -> None:
        self.idle = False
        super().refill(set_index, batch)

    def dispatch(self, set_index: int) -> None:
        if not self.idle:
            super().dispatch(set_index)

    def experts(self, set_index: int) -> None:
        self.idle = True

    def combine(self, set_index: int) -> None:
        if not self.idle:
            super().combine(set_index)


class StaleCombine(ReferenceBackend):
    """Combine gives its first sums for ever."""

    first: BF16Bits | None = None

    def combine(self, set_index: int) -> None:
        super().combine(set_index)
        self.first = self.sums.copy() if self.first is None else self.first
        self.sums = self.first.copy()


class ForgetsCombine(ReferenceBackend):
    """Combine does nothing, so the poison is still there."""

    def combine(self, set_index: int) -> None:
        self.reduced(set_index)


class DropsAPartial(OnRankOne):
    """One token's sum lacks what rank 0 made of it."""

    def combine(self, set_index: int) -> None:
        kept = self.partials
        if self.rank == 0 and len(kept):
            self.partials = kept.copy()
            self.partials[0] = 0
        super().combine(set_index)
        self.partials = kept


class WrongToken(OnRankOne):
    def spoil_sums(self, sums: BF16Bits) -> BF16Bits:
        return np.roll(sums, 1, axis=0)


class LosesNaN(OnRankOne):
    """Sentinel protocols may rewrite payload words that look like the sentinel."""

    def spoil_sums(self, sums: BF16Bits) -> BF16Bits:
        return np.where((sums & 0x7FFF) > 0x7F80, 0, sums).astype(np.uint16)


class EatsAllOnes(OnRankOne):
    """A payload word equal to the sentinel is taken for an armed one."""

    def spoil(self, landed: reference.Landed) -> dict[str, np.ndarray]:
        words = landed.rows.copy().view(np.uint32)
        words[words == 0xFFFFFFFF] = 0
        return {"rows": words.view(np.uint8)}


class StaleExperts(ReferenceBackend):
    """`experts` writes the partials of set 1 whatever the set."""

    def experts(self, set_index: int) -> None:
        super().experts(1)


class IgnoresRefill(ReferenceBackend):
    def refill(self, set_index: int, batch: Batch) -> None:
        return


class MixesSets(ReferenceBackend):
    """Sends set 0 for set 1."""

    def exchange(self, set_index: int) -> reference.Landed:
        return super().exchange(0)


class ReturnsViews(ReferenceBackend):
    def received(self, set_index: int) -> Received:
        return Received(**{name: getattr(self.landed, name) for name in self.landed.__slots__})


class ReturnsNothing(ReferenceBackend):
    def received(self, set_index: int) -> Received:
        return None  # pyright: ignore[reportReturnType]


class WrongType(ReferenceBackend):
    def combined(self, set_index: int) -> BF16Bits:
        return self.sums.astype(np.float32)  # pyright: ignore[reportReturnType]


class DeclaresNonsense(ReferenceBackend):
    reduction = Reduction(order="unordered", exact=True)


class ClosesOnce(ReferenceBackend):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("double free")
        self.closed = True


class MixesRouting(ReferenceBackend):
    """Combine is given the received ids where it wants the token's own."""

    def combine(self, set_index: int) -> None:
        own = self.batches[set_index]
        ids = own.ids.copy()
        count = min(len(ids), len(self.landed.ids))
        ids[:count] = self.landed.ids[:count]
        self.batches[set_index] = replace(own, ids=ids)
        try:
            self.sums = self.reduced(set_index)
        except KeyError:  # the oracle does not find a partial that was never made
            self.sums = np.zeros_like(self.sums)
        finally:
            self.batches[set_index] = own
