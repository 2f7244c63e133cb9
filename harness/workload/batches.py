"""The inputs of all ranks, computable on any rank: ids, weights and rows of one set.

A row is a window into a tape of values that is fixed by payload and format. Where it starts is a bijection of (source,
token) that depends on (seed, set): any row costs one copy, on its own rank or where it must be checked, and no two
tokens of a batch share a window. Windows of 64 values or more (ADVERSARIAL: 1 KiB) differ in fact; shorter rows may
repeat by chance.

Three payloads:

EXACT
    Sums come out the same in any order and in bf16. Values times scales are +-2**j. Weights are w/8 with w in {1, 2, 4}
    and slots scale by 2**s with s in {0, 1, 2}, so what a token's selections add to a column is u * (w * 2**s) with one
    u = +-2**j / 8 for all of them. w * 2**s is an integer of at most 16; sums of 16 of them are integers of at most
    256 = 2**8, and so is every partial sum in any grouping, for no term has another sign. All need at most 8
    significant bits, which bf16 has. (More than 16 selections drop the larger weights.) As all terms have one sign and
    every weight is below 1, a missing selection, or a weight applied twice or never, changes every column of the row.
RANDOM
    Finite values of moderate size; weights of a token add to 1.
ADVERSARIAL
    Any bits in rows and scales, among them NaN patterns and runs of all-ones words; EXACT weights, and NaN as the
    weight of dropped selections. Partials are not computed from such rows but are windows too, of NaN patterns and +-1,
    +-2, +-4: whatever the order, a sum with a NaN is NaN, and one without is as exact as above (with s = 0, 1, 2 in the
    partial).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import Batch, BF16Bits, Bytes, Float32, Int32
from epcross.harness.errors import ConfigError
from epcross.harness.point import Point
from epcross.harness.terms import RoutingKind
from epcross.harness.workload import counter, routing
from epcross.harness.workload.placement import Slots, lay_out
from epcross.harness.workload.routing_files import read_trace
from epcross.harness.workload.tape import Payload, TapeKind, windows
from epcross.kernels.formats import row_size

MAX_TOP_K = 64
"""Beyond this, EXACT sums would need more than 8 bits."""

_WEIGHTS, _PLACE = 101, 102  # purposes of counter streams; routing uses numbers below 100
_WEIGHT_UNIT = 1 / 8
_MIN_PLACE_BITS = 16  # a tape of 1 MiB: in the last cache, and two (seed, set) place a token alike once in 65536

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """One set of inputs of all ranks. Rows are made on demand."""

    point: Point
    payload: Payload
    seed: int
    set_index: int
    ids: tuple[Int32, ...]  # of each rank [T, top_k]
    weights: tuple[Float32, ...]  # of each rank [T, top_k]

    def batch(self, rank: int) -> Batch:
        """The inputs of one rank."""
        token = np.arange(len(self.ids[rank]))
        return Batch(
            ids=self.ids[rank].copy(),
            weights=self.weights[rank].copy(),
            rows=self.rows(np.full(len(token), rank), token),
            scales=self.scales(np.full(len(token), rank), token),
        )

    def rows(self, source: NDArray[np.integer], token: NDArray[np.integer]) -> Bytes:
        """The rows [N, padded_row_bytes] of N tokens."""
        size = row_size(self.point.dispatch_format, self.point.model.hidden)
        return self._windows(TapeKind.ROWS, size.row_bytes, size.padded_row_bytes, self.places(source, token))

    def scales(self, source: NDArray[np.integer], token: NDArray[np.integer]) -> Bytes:
        """The scale rows [N, padded_scale_bytes] of N tokens."""
        size = row_size(self.point.dispatch_format, self.point.model.hidden)
        if not size.scale_bytes:
            return np.zeros((len(token), 0), np.uint8)
        return self._windows(TapeKind.SCALES, size.scale_bytes, size.padded_scale_bytes, self.places(source, token))

    def adversarial_partials(
        self, rank: NDArray[np.integer], source: NDArray[np.integer], token: NDArray[np.integer]
    ) -> BF16Bits:
        """What the experts of `rank` say to N tokens under ADVERSARIAL, [N, hidden]."""
        width = 2 * self.point.model.hidden
        place = self.partial_places(rank, source, token)
        return self._windows(TapeKind.PARTIALS, width, width, place).view(np.uint16)

    def partial_places(
        self, rank: NDArray[np.integer], source: NDArray[np.integer], token: NDArray[np.integer]
    ) -> Int64:
        """Where the windows of partials start that do not follow from rows: a place for each (rank, source, token)."""
        return (self.places(source, token) * self.point.ep_size + rank) & ((1 << self.place_bits) - 1)

    @property
    def place_bits(self) -> int:
        """A tape has `2**place_bits` places at which a window may start."""
        return max(_MIN_PLACE_BITS, sum(self.point.tokens).bit_length())

    def places(self, source: NDArray[np.integer], token: NDArray[np.integer]) -> Int64:
        """A different number below `2**place_bits` for each token of the group: an affine map with an odd factor."""
        factor, start = _place_map(self.seed, self.set_index)
        before = np.cumsum((0, *self.point.tokens))
        place = (before[source] + token).astype(np.uint64) * factor + start
        return (place & np.uint64((1 << self.place_bits) - 1)).astype(np.int64)

    def _windows(self, kind: TapeKind, used: int, width: int, place: Int64) -> Bytes:
        """[N, width] bytes, zero from `used` on."""
        rows = windows(self.payload, self.point.dispatch_format, kind, used, self.place_bits)[place]
        if used == width:
            return rows
        out = np.zeros((len(place), width), np.uint8)
        out[:, :used] = rows
        return out


def group_batch(point: Point, *, seed: int, set_index: int, payload: Payload) -> GroupBatch:
    """The inputs of all ranks as the point's routing chooses them.

    Raises:
        ConfigError: the placement, trace or matrix cannot be used, or `top_k` is above `MAX_TOP_K`.
    """
    slots = lay_out(point.placement, point.model.num_experts, point.ep_size)
    ids = [
        routing.choose(
            point.routing,
            num_experts=point.model.num_experts,
            top_k=point.model.top_k,
            slots=slots,
            tokens=point.tokens,
            seed=seed,
            set_index=set_index,
            source=source,
        )
        for source in range(point.ep_size)
    ]
    return assemble(point, ids, seed=seed, set_index=set_index, payload=payload)


def assemble(point: Point, ids: Sequence[Int32], *, seed: int, set_index: int, payload: Payload) -> GroupBatch:
    """The inputs of all ranks for given slot ids [T, top_k] of each rank.

    Raises:
        ConfigError: `top_k` is above `MAX_TOP_K`.
    """
    if point.model.top_k > MAX_TOP_K:
        raise ConfigError(f"top_k={point.model.top_k} cannot be verified exactly; use at most {MAX_TOP_K}")
    weights = [_weights(point, ids[source], seed, set_index, source, payload) for source in range(point.ep_size)]
    return GroupBatch(
        point=point, payload=payload, seed=seed, set_index=set_index, ids=tuple(ids), weights=tuple(weights)
    )


def slot_scale(slots: Slots) -> Float32:
    """What the expert of each slot multiplies by, [num_slots]: 1, 2 or 4.

    It differs between neighbours on a rank and between the same places on neighbouring ranks.
    """
    slot = np.arange(slots.num_slots)
    return (1 << ((slot % slots.slots_per_rank + slots.slot_rank) % 3)).astype(np.float32)


def ids_hash(sets: Iterable[Sequence[Int32]]) -> str:
    """First 16 hex digits of the SHA-256 of all ranks' slot ids, set after set; shapes count too."""
    digest = hashlib.sha256()
    for ids in sets:
        for chosen in ids:
            digest.update(f"{chosen.shape};".encode())
            digest.update(np.ascontiguousarray(chosen, "<i4").tobytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def _place_map(seed: int, set_index: int) -> tuple[np.uint64, np.uint64]:
    """An odd factor and a start."""
    key = counter.key(_PLACE, seed, set_index)
    return np.uint64(key | 1), np.uint64(counter.key(key))


def _weights(point: Point, ids: Int32, seed: int, set_index: int, source: int, payload: Payload) -> Float32:
    drawn = counter.words(counter.key(_WEIGHTS, seed, set_index, source), 0, ids.size).reshape(ids.shape)
    if payload is Payload.RANDOM:
        return _random_weights(point, ids, drawn, seed, set_index, source)
    allowed = [unit for unit in (1, 2, 4) if unit * 4 * ids.shape[1] <= 256]
    units = np.array(allowed, np.float32)[counter.below(drawn, len(allowed)).astype(np.int64)]
    weights = units * np.float32(_WEIGHT_UNIT)
    return np.where(ids < 0, np.float32("nan"), weights) if payload is Payload.ADVERSARIAL else weights


def _random_weights(point: Point, ids: Int32, drawn: counter.UInt64, seed: int, set_index: int, source: int) -> Float32:
    """Weights that add to 1 over the valid selections; those of a trace, if it has them, as they are."""
    if point.routing.kind is RoutingKind.TRACE:
        model = point.model
        trace = read_trace(point.routing.path, point.routing.content_sha256, model.num_experts, model.top_k)
        if trace.weights is not None:
            return trace.weights[routing.trace_rows(len(trace.ids), point.tokens, seed, set_index, source)]
    shares = ((drawn >> np.uint64(44)) + np.uint64(1 << 16)).astype(np.float64)  # integers below 2**21: sums are exact
    total = np.where(ids >= 0, shares, 0).sum(axis=1, keepdims=True)
    return (shares / np.maximum(total, 1)).astype(np.float32)
