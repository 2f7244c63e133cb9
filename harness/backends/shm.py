"""Our own one-sided exchanges between processes of one host, and their two-sided baseline.

The protocols are C++ in `epcross.kernels.shm`; here they meet the contract: shapes in, workspaces mapped, arrays bound.
"""

import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import Backend, Batch, BF16Bits, Description, Group, Received, Shard
from epcross.harness.errors import ConfigError, EpcrossError
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, Domain, Phase, RowFormat
from epcross.kernels.formats import row_size
from epcross.kernels.shm import build
from epcross.kernels.shm.layout import LINE_BYTES, WORD_BYTES, Layout, ProtocolName, Shape, layout
from epcross.kernels.shm.native import Exchange
from epcross.kernels.shm.segment import Segment, attach_all, reserve

_T = TypeVar("_T", bound=np.generic)

_POISON = 0xFFFF  # a bf16 NaN that no sum gives: our reduction knows one NaN only


class ShmBackend(Backend):
    """What the three have in common; a subclass names its protocol, boundary and own bytes."""

    protocol: ClassVar[ProtocolName]
    domains = frozenset({Domain.CPU})
    host_sync = True

    _exchange: Exchange | None = None

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`wait_limit_s` bounds every wait for a peer; `first_epoch` numbers the first round (32 bits, wraps)."""
        return {"wait_limit_s": 20.0, "first_epoch": 1}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`. Every wait is bounded."""
        limit_s = options["wait_limit_s"]
        return [] if float(limit_s or 0) > 0 else [f"wait_limit_s={limit_s} must be above 0"]

    def unavailable(self) -> str | None:
        """No artifact and nothing to build one with."""
        return build.unavailable()

    def unsupported(self, point: Point) -> str | None:
        """Shared memory of one host, bf16 sums; any shape and any dispatch format."""
        if point.domain is not Domain.CPU:
            return f"{self.name} runs in domain cpu, not {point.domain}"
        if point.combine_format is not RowFormat.BF16:
            return f"{self.name} adds bf16 partials; combine_format={point.combine_format} is not one"
        return None

    def workspace_bytes(self, point: Point) -> int:
        """Size of the one segment of a rank."""
        return layout(self.protocol, _shape(point)).total_bytes

    def prebuild(self) -> None:
        """Compile the extension into the cache."""
        build.build()

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        """Reserve and arm the own workspace, map those of the peers, drop all names."""
        shape = _shape(point)
        self._layout = layout(self.protocol, shape)
        self._rank, self._ep_size = shard.rank, group.size
        self._slot_rank = np.ascontiguousarray(shard.slot_rank, np.int32)
        self._row_size = row_size(point.dispatch_format, point.model.hidden)
        self._segments: list[Segment] = []
        self._outs = [np.zeros((len(batch.ids), shape.hidden), np.uint16) for batch in shard.batches]
        self._batches = [_own_copy(batch) for batch in shard.batches]
        self._received_rows = [0] * len(shard.batches)

        native = build.load()
        self._segments.append(own := reserve(group.shared_name, shard.rank, self._layout.total_bytes))
        names = [name.decode() for name in group.all_gather(own.name.encode())]
        self._segments = attach_all(own, names, self._layout.total_bytes)
        create = {
            ProtocolName.FENCE: native.Fence,
            ProtocolName.SENTINEL: native.Sentinel,
            ProtocolName.TWO_SIDED: native.TwoSided,
        }[self.protocol]
        self._exchange = create(
            {
                "rank": shard.rank,
                "ep_size": shape.ep_size,
                "capacity": shape.capacity,
                "top_k": shape.top_k,
                "hidden": shape.hidden,
            },
            {**self._layout.offsets(), "total_bytes": self._layout.total_bytes},
            [segment.buffer for segment in self._segments],
            self._slot_rank,
            wait_limit_s=self._option("wait_limit_s"),
            share_cores=ranks_share_cores(group),
            sets=len(shard.batches),
        )
        self._exchange.start(int(self._option("first_epoch")) & 0xFFFFFFFF)
        for index in range(len(shard.batches)):
            self._bind(index)
        group.barrier()  # everyone has mapped and armed: the names are not needed, and rounds may begin
        own.unlink()

    def refill(self, set_index: int, batch: Batch) -> None:
        """Copy into the arrays that the exchange reads."""
        own = self._batches[set_index]
        if batch.ids.shape != own.ids.shape:
            raise ConfigError(f"set {set_index} holds {len(own.ids)} tokens and cannot take {len(batch.ids)}")
        for name in ("ids", "weights", "rows", "scales"):
            np.copyto(getattr(own, name), getattr(batch, name))
        self._bind(set_index)

    def dispatch(self, set_index: int) -> None:
        """One round's rows."""
        self._ready.dispatch(set_index)

    def received(self, set_index: int) -> Received:
        """Copies, with the selections of other ranks masked."""
        source, token, ids, weights, rows, scales = self._ready.received()
        self._received_rows[set_index] = len(source)
        elsewhere = (ids < 0) | (self._slot_rank[ids] != self._rank)
        ids[elsewhere] = -1
        weights[elsewhere] = 0
        return Received(source=source, token=token, ids=ids, weights=weights, rows=rows, scales=scales)

    def stage(self, set_index: int, partials: BF16Bits) -> None:
        """Keep the partials at the stride that combine uses."""
        staged = np.zeros((len(partials), self._layout.partial_bytes // 2), np.uint16)
        staged[:, : partials.shape[1]] = partials
        self._ready.stage(set_index, staged)

    def experts(self, set_index: int) -> None:
        """Identity experts, in C++."""
        self._ready.experts(set_index)

    def combine(self, set_index: int) -> None:
        """One round's sums."""
        self._ready.combine(set_index)

    def combined(self, set_index: int) -> BF16Bits:
        """A copy of the sums."""
        return self._outs[set_index].copy()

    def poison(self) -> None:
        """The private outputs only: a peer that is ahead may already write its next rows into a landing buffer."""
        for out in self._outs:
            out.fill(_POISON)

    def describe(self) -> Description:
        """The version is the hash of the C++ sources: they are what ran."""
        protocol_bytes = []
        for batch, received in zip(self._batches, self._received_rows, strict=True):
            sent = self._sent(batch)
            kept = int(sent[self._rank])  # rows that stay on this rank
            metadata = int(sent.sum()) * self._metadata_bytes()
            protocol_bytes.append(metadata + self._own_bytes(int(sent.sum()) - kept, max(received - kept, 0)))
        return Description(
            version=build.sources_hash(),
            transport="shared memory",
            algorithm=self.protocol.value,
            kernels=(f"{self.protocol.value}::dispatch", f"{self.protocol.value}::combine"),
            workspace_bytes=self._layout.total_bytes,
            protocol_bytes=round(sum(protocol_bytes) / max(len(protocol_bytes), 1)),
        )

    def close(self) -> None:
        """Unmap. Peers keep their own mappings, so nobody needs to wait for anybody."""
        self._exchange = None  # lets go of the mappings
        for segment in getattr(self, "_segments", []):
            with suppress(BufferError):  # a traceback may keep a frame of a failed call alive; the process ends soon
                segment.close()
        self._segments = []

    @abstractmethod
    def _own_bytes(self, sent: int, received: int) -> int:
        """Flags and re-arming of one pair, for a number of rows sent to and received from other ranks."""

    def _option(self, name: str) -> float:
        return float(self.options.get(name, self.option_defaults()[name]) or 0)

    @property
    def _ready(self) -> Exchange:
        if self._exchange is None:
            raise EpcrossError(f"{self.name} is not prepared, or is closed: call prepare first")
        return self._exchange

    def _bind(self, set_index: int) -> None:
        batch = self._batches[set_index]
        try:
            self._ready.bind(set_index, batch.ids, batch.weights, batch.rows, batch.scales, self._outs[set_index])
        except ValueError as error:
            raise ConfigError(f"{self.name} cannot take set {set_index}: {error}") from error

    def _sent(self, batch: Batch) -> NDArray[np.int64]:
        """Rows of a batch that go to each rank."""
        destination = np.where(batch.ids >= 0, self._slot_rank[batch.ids], self._ep_size)
        reached = np.zeros((len(batch.ids), self._ep_size + 1), bool)
        np.put_along_axis(reached, destination, True, axis=1)
        return reached[:, : self._ep_size].sum(axis=0)

    def _metadata_bytes(self) -> int:
        """Ids, weights and header of a record, and the padding of its row and scales."""
        size = self._row_size
        padding = size.padded_bytes - size.row_bytes - size.scale_bytes
        return self._layout.metadata_bytes + WORD_BYTES + padding

    _layout: Layout


class ShmFence(ShmBackend):
    """Rows as plain copies, then one flag per pair of ranks; combine pulls."""

    name = "shm_fence"
    protocol = ProtocolName.FENCE
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {
        Phase.DISPATCH: frozenset({Boundary.LAYOUT, Boundary.TRANSFER}),
        Phase.COMBINE: frozenset({Boundary.TRANSFER, Boundary.REDUCE}),
        Phase.ROUND_TRIP: frozenset({Boundary.LAYOUT, Boundary.TRANSFER, Boundary.EXPERTS_IDENTITY, Boundary.REDUCE}),
    }

    def _own_bytes(self, sent: int, received: int) -> int:
        return 2 * self._ep_size * WORD_BYTES


class ShmSentinel(ShmBackend):
    """Rows whose arrival is seen in the rows; combine pushes."""

    name = "shm_sentinel"
    protocol = ProtocolName.SENTINEL
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {
        Phase.DISPATCH: frozenset({Boundary.LAYOUT, Boundary.TRANSFER, Boundary.REARM}),
        Phase.COMBINE: frozenset({Boundary.TRANSFER, Boundary.REDUCE, Boundary.REARM}),
        Phase.ROUND_TRIP: frozenset(
            {Boundary.LAYOUT, Boundary.TRANSFER, Boundary.EXPERTS_IDENTITY, Boundary.REDUCE, Boundary.REARM}
        ),
    }

    def _own_bytes(self, sent: int, received: int) -> int:
        counts = 2 * (self._ep_size - 1) * WORD_BYTES  # sent, and armed again
        partial_bytes = -(-self._outs[0].shape[1] // 4) * WORD_BYTES if self._outs else 0
        return counts + received * self._layout.record_words * WORD_BYTES + sent * partial_bytes


class ShmTwoSided(ShmBackend):
    """Counts first, rows staged and copied out: what a send/receive library does."""

    name = "shm_two_sided"
    protocol = ProtocolName.TWO_SIDED
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {
        Phase.DISPATCH: frozenset(
            {Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.PACK, Boundary.TRANSFER, Boundary.COPY_OUT}
        ),
        Phase.COMBINE: frozenset({Boundary.PACK, Boundary.TRANSFER, Boundary.COPY_OUT, Boundary.REDUCE}),
        Phase.ROUND_TRIP: frozenset(
            {
                Boundary.LAYOUT,
                Boundary.COUNT_EXCHANGE,
                Boundary.PACK,
                Boundary.TRANSFER,
                Boundary.COPY_OUT,
                Boundary.EXPERTS_IDENTITY,
                Boundary.REDUCE,
            }
        ),
    }

    def _own_bytes(self, sent: int, received: int) -> int:
        return 3 * self._ep_size * WORD_BYTES


def _shape(point: Point) -> Shape:
    size = row_size(point.dispatch_format, point.model.hidden)
    return Shape(
        ep_size=point.ep_size,
        capacity=point.max_tokens_per_rank,
        row_bytes=size.padded_row_bytes,
        scale_bytes=size.padded_scale_bytes,
        top_k=point.model.top_k,
        hidden=point.model.hidden,
    )


def _own_copy(batch: Batch) -> Batch:
    """Line-aligned arrays of our own; what the harness hands over is not kept."""
    return Batch(
        ids=_aligned(batch.ids),
        weights=_aligned(batch.weights),
        rows=_aligned(batch.rows),
        scales=_aligned(batch.scales),
    )


def _aligned(array: NDArray[_T]) -> NDArray[_T]:
    raw = np.zeros(array.nbytes + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def ranks_share_cores(group: Group) -> bool:
    """Whether the ranks of the group have fewer cores than ranks, so that a wait must give its core away."""
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    cores = {core for cores in group.all_gather(own.encode()) for core in cores.decode().split(",")}
    return len(cores) < group.size
