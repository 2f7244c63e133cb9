"""Rows through the group's all-gather: right, slow, and short enough to start from."""

import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from epcross.harness.backends.base import Backend, Batch, BF16Bits, Description, Group, Received, Shard
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, Domain, Phase
from epcross.kernels.codecs import bf16_to_float, float_to_bf16

DISPATCH = frozenset({Boundary.LAYOUT, Boundary.PACK, Boundary.TRANSFER, Boundary.COPY_OUT})
COMBINE = frozenset({Boundary.PACK, Boundary.TRANSFER, Boundary.COPY_OUT, Boundary.REDUCE})


class MyKernel(Backend):
    """Every rank sends all it has to all ranks, and keeps what is meant for it."""

    name = "my_kernel"
    domains = frozenset({Domain.CPU})
    host_sync = True
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {
        Phase.DISPATCH: DISPATCH,
        Phase.COMBINE: COMBINE,
        Phase.ROUND_TRIP: DISPATCH | COMBINE | {Boundary.EXPERTS_IDENTITY},
    }

    def unavailable(self) -> str | None:
        """Nothing is needed."""
        return None

    def unsupported(self, point: Point) -> str | None:
        """Rows go through one process."""
        return None if point.ep_size <= 8 else f"ep_size={point.ep_size} is above its limit 8"

    def workspace_bytes(self, point: Point) -> int:
        """Nothing is held in shared memory."""
        return 0

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        """Keep what the calls below need."""
        self.group, self.slot_rank, self.batches = group, shard.slot_rank, list(shard.batches)
        self.staged: dict[int, BF16Bits] = {}
        self.landed: dict[str, np.ndarray] = {}
        self.sums = np.zeros((point.tokens[group.rank], point.model.hidden), np.uint16)

    def refill(self, set_index: int, batch: Batch) -> None:
        """New inputs of one set."""
        self.batches[set_index] = batch

    def dispatch(self, set_index: int) -> None:
        """One row for each (source, token) with a selection here."""
        own = self.batches[set_index]
        parts = []
        for source, batch in enumerate(self.exchange((own.ids, own.weights, own.rows, own.scales))):
            ids, weights, rows, scales = batch
            here = (ids >= 0) & (self.slot_rank[ids] == self.group.rank)
            token = np.flatnonzero(here.any(axis=1)).astype(np.int32)
            parts.append(
                {
                    "source": np.full(len(token), source, np.int32),
                    "token": token,
                    "ids": np.where(here, ids, -1)[token].astype(np.int32),
                    "weights": np.where(here, weights, 0)[token].astype(np.float32),
                    "rows": rows[token],
                    "scales": scales[token],
                }
            )
        self.landed = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def received(self, set_index: int) -> Received:
        """Copies, so that a later round does not change them."""
        return Received(**{name: array.copy() for name, array in self.landed.items()})

    def stage(self, set_index: int, partials: BF16Bits) -> None:
        """The experts' output, for `combine` now and for `experts` later."""
        self.staged[set_index] = partials.copy()
        self.partials = partials.copy()

    def experts(self, set_index: int) -> None:
        """Read every cache line that landed, write the partials."""
        self.landed["rows"][:, ::64].sum()
        self.partials = self.staged[set_index].copy()

    def combine(self, set_index: int) -> None:
        """The partials of ranks 0, 1, ... added in fp32 and rounded once, as `reduction` declares."""
        sums = np.zeros(self.sums.shape, np.float32)
        for source, token, partials in self.exchange((self.landed["source"], self.landed["token"], self.partials)):
            mine = source == self.group.rank
            sums[token[mine]] += bf16_to_float(partials[mine])
        self.sums = float_to_bf16(sums)

    def combined(self, set_index: int) -> BF16Bits:
        """The sums of the last combine."""
        return self.sums.copy()

    def poison(self) -> None:
        """Old outputs must not pass for new ones."""
        self.sums[:] = 0x7FA5
        if self.landed:
            self.landed["rows"][:] = 0xA5

    def describe(self) -> Description:
        """What the row says of it."""
        return Description(version="1", transport="all-gather of the group")

    def close(self) -> None:
        """Nothing to release."""

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank gives, in rank order."""
        return [pickle.loads(data) for data in self.group.all_gather(pickle.dumps(mine))]
