"""Which slots a token chooses: integers only, a pure function of (seed, set, source rank, token).

Logical experts are chosen first, distinct per token, then mapped to slots:

    uniform      top_k of all experts
    perfect      passes over fresh permutations of the experts, dealt over the tokens of the whole group: how often any
                 two experts are chosen differs by at most 1
    zipf         without replacement, weight (i + 1) ** -exponent for the i-th expert of a permutation of the seed
    hot_expert   expert 0 for a share of hot_fraction of the tokens and for no other token; the rest uniform
    trace        rows of a file, one after another over the ranks, from a start of (seed, set), wrapping at its end
    all_to_one   experts of rank 0
    local_only   experts of the token's own rank
    matrix       experts of one rank per token; ranks are dealt in the proportions of the matrix' row, to the nearest
                 token (largest remainder); tokens of an all-zero row choose nothing (-1)

The last three aim at a rank: a rank with fewer than top_k experts gives all it has, and the token's other choices are
uniform over the experts that are not on that rank. An expert with several slots serves a token from its replica number
(source + token) % replicas, or from the slot on the rank aimed at. Then any selection may be masked to -1.
"""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from math import isfinite, lcm

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import Int32
from epcross.harness.errors import InputError
from epcross.harness.point import Routing
from epcross.harness.terms import RoutingKind
from epcross.harness.workload import counter
from epcross.harness.workload.counter import UInt64
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.routing_files import read_matrix, read_trace

# What a stream of words is for: two uses of one key must never see the same words.
_CHOICE, _PERMUTATION, _HOT, _MASK, _START, _TARGET, _REST = range(7)

Int64 = NDArray[np.int64]


def choose(
    routing: Routing,
    *,
    num_experts: int,
    top_k: int,
    slots: Slots,
    tokens: Sequence[int],
    seed: int,
    set_index: int,
    source: int,
) -> Int32:
    """Slot ids [tokens[source], top_k] of one rank; valid ids of a token are distinct, -1 is a dropped selection.

    Args:
        tokens: tokens of every rank.

    Raises:
        InputError: the trace or matrix cannot be used.
    """
    count = tokens[source]
    keyed = (seed, set_index, source)
    token = np.arange(count, dtype=np.int64)
    targets: Int64 | None = None
    experts = np.zeros((0, top_k), np.int64)
    match routing.kind:
        case RoutingKind.UNIFORM:
            experts = _uniform(_draws(_CHOICE, keyed, count, top_k), num_experts)
        case RoutingKind.ZIPF:
            by_rank = counter.shuffle(counter.key(_PERMUTATION, seed), 0, 1, num_experts)[0]
            drawn = _draws(_CHOICE, keyed, count, top_k)
            experts = by_rank[_distinct(drawn, zipf_table(routing.exponent, num_experts))]
        case RoutingKind.PERFECT:
            experts = _perfect(num_experts, top_k, sum(tokens[:source]) + token, (seed, set_index))
        case RoutingKind.HOT_EXPERT:
            experts = _hot(routing.hot_fraction, num_experts, top_k, count, keyed)
        case RoutingKind.TRACE:
            trace = read_trace(routing.path, routing.content_sha256, num_experts, top_k)
            experts = trace.ids[trace_rows(len(trace.ids), tokens, seed, set_index, source)].astype(np.int64)
        case RoutingKind.ALL_TO_ONE:
            targets = np.zeros(count, np.int64)
        case RoutingKind.LOCAL_ONLY:
            targets = np.full(count, source, np.int64)
        case RoutingKind.MATRIX:
            matrix = read_matrix(routing.path, routing.content_sha256, slots.ep_size)
            targets = _deal(matrix.traffic[source].tolist(), count, keyed)
    if targets is None:
        ids = _to_slots(experts, slots, source)
    else:
        ids = _aimed(targets, slots, num_experts, top_k, source, keyed)
    if routing.masked_fraction > 0:
        masked = _share(_draws(_MASK, keyed, count, top_k), routing.masked_fraction)
        ids = np.where(masked, -1, ids)
    return np.ascontiguousarray(ids, np.int32)


def problems(routing: Routing, *, num_experts: int, top_k: int, ep_size: int) -> list[str]:
    """Why these choices cannot be made, one sentence each; reads the trace or matrix. Empty if they can."""
    found: list[str] = []
    if not 1 <= top_k <= num_experts:
        found.append(f"top_k={top_k} must lie in [1, num_experts={num_experts}]; a token's experts are distinct")
    found += [
        f"routing.{name}={getattr(routing, name)} must lie in [0, 1]"
        for name in ("hot_fraction", "masked_fraction")
        if not 0 <= getattr(routing, name) <= 1
    ]
    if not (isfinite(routing.exponent) and 0 <= routing.exponent <= 8):
        found.append(f"routing.exponent={routing.exponent} must lie in [0, 8]")
    if routing.kind in (RoutingKind.TRACE, RoutingKind.MATRIX) and not found:
        if not routing.path:
            return [f"routing={routing.kind} reads a file: give routing.path"]
        try:
            if routing.kind is RoutingKind.TRACE:
                read_trace(routing.path, routing.content_sha256, num_experts, top_k)
            else:
                read_matrix(routing.path, routing.content_sha256, ep_size)
        except InputError as error:
            found += error.problems
    return found


def trace_rows(length: int, tokens: Sequence[int], seed: int, set_index: int, source: int) -> Int64:
    """Which rows of a trace of `length` tokens the tokens of `source` take."""
    first = counter.key(_START, seed, set_index) % length + sum(tokens[:source])
    return (first + np.arange(tokens[source], dtype=np.int64)) % length


@lru_cache(maxsize=16)
def zipf_table(exponent: float, num_experts: int) -> UInt64:
    """Integer weights of a zipf distribution [num_experts], summing to less than 2**32, none 0.

    Decimal arithmetic rounds the same on every machine; a C library's `pow` does not.
    """
    scale = 2**31 // num_experts
    with localcontext() as context:
        context.prec = 28
        shares = [Decimal(i + 1) ** -Decimal(repr(exponent)) for i in range(num_experts)]
        return np.array([max(1, int(scale * share)) for share in shares], np.uint64)


def apportion(shares: Sequence[float], count: int) -> list[int]:
    """`count` things divided in proportion to `shares`, exactly: floors, then one more for the largest remainders
    (the first of equals). Source: Hamilton's method."""
    total = sum(map(Fraction, shares))
    quotas = [Fraction(share) * count / total for share in shares]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: count - sum(parts)]:
        parts[i] += 1
    return parts


def _draws(purpose: int, keyed: tuple[int, ...], count: int, columns: int) -> UInt64:
    """Words [count, columns]; a token's words do not depend on how many tokens there are."""
    return counter.words(counter.key(purpose, *keyed), 0, count * columns).reshape(count, columns)


def _share(drawn: UInt64, fraction: float) -> NDArray[np.bool_]:
    return (drawn >> np.uint64(32)) < np.uint64(round(fraction * 2**32))


def _uniform(drawn: UInt64, num_experts: int) -> Int64:
    return _distinct(drawn, np.ones(num_experts, np.uint64))


def _distinct(drawn: UInt64, table: UInt64) -> Int64:
    """Draw without replacement with integer weights, one column of `drawn` after another; [T, columns].

    Each draw is a place on the line of the weights that are left. Going through the choices already made from left to
    right, a place at or beyond one moves right by its weight: that is the place on the whole line.
    """
    count, columns = drawn.shape
    ends = np.cumsum(table)
    starts = ends - table
    left = np.full(count, ends[-1], np.uint64)
    chosen = np.empty((count, columns), np.int64)
    for column in range(columns):
        place = counter.below(drawn[:, column], left)
        before = np.sort(chosen[:, :column], axis=1)
        for i in range(column):
            place += np.where(place >= starts[before[:, i]], table[before[:, i]], np.uint64(0))
        chosen[:, column] = np.searchsorted(ends, place, side="right")
        left -= table[chosen[:, column]]
    return chosen


def _perfect(num_experts: int, top_k: int, group_token: Int64, keyed: tuple[int, ...]) -> Int64:
    """A block is as many tokens as make whole passes over the experts. It walks one permutation cyclically, so a token
    that spans the end of a pass still meets distinct experts, and a block cut short has made some passes and a part."""
    if not len(group_token):
        return np.empty((0, top_k), np.int64)
    tokens_per_block = lcm(num_experts, top_k) // top_k
    block = group_token // tokens_per_block
    first = int(block[0])
    order = counter.shuffle(counter.key(_PERMUTATION, *keyed), first, int(block[-1]) - first + 1, num_experts)
    place = (group_token % tokens_per_block)[:, None] * top_k + np.arange(top_k)
    return order[(block - first)[:, None], place % num_experts]


def _hot(fraction: float, num_experts: int, top_k: int, count: int, keyed: tuple[int, ...]) -> Int64:
    if top_k == num_experts:
        return np.tile(np.arange(num_experts, dtype=np.int64), (count, 1))
    cold = 1 + _uniform(_draws(_CHOICE, keyed, count, top_k), num_experts - 1)
    hot = _share(_draws(_HOT, keyed, count, 1)[:, 0], fraction)
    cold[hot, 0] = 0
    return cold


def _to_slots(experts: Int64, slots: Slots, source: int) -> Int64:
    """The slot that serves each expert; -1 stays -1."""
    token = np.arange(len(experts), dtype=np.int64)[:, None]
    chosen = slots.replicas[experts, (source + token) % slots.replica_count[experts]]
    return np.where(experts < 0, -1, chosen).astype(np.int64)


def _deal(shares: list[float], count: int, keyed: tuple[int, ...]) -> Int64:
    """A rank for each token in the proportions of `shares`, in random order; -1 if all are 0."""
    if not any(shares):
        return np.full(count, -1, np.int64)
    ranks = np.repeat(np.arange(len(shares), dtype=np.int64), apportion(shares, count))
    return ranks[counter.shuffle(counter.key(_TARGET, *keyed), 0, 1, count)[0]] if count else ranks


def _aimed(targets: Int64, slots: Slots, num_experts: int, top_k: int, source: int, keyed: tuple[int, ...]) -> Int64:
    """Slots of the rank each token is aimed at, others only where that rank has too few experts; -1 where it is -1."""
    count = len(targets)
    ids = np.full((count, top_k), -1, np.int64)
    near, far = _draws(_CHOICE, keyed, count, top_k), _draws(_REST, keyed, count, top_k)
    for rank in np.unique(targets[targets >= 0]).tolist():
        mine = np.flatnonzero(targets == rank)
        first = rank * slots.slots_per_rank
        experts, at = np.unique(slots.slot_expert[first : first + slots.slots_per_rank], return_index=True)
        here = min(top_k, len(experts))
        ids[mine, :here] = (first + at)[_uniform(near[mine, :here], len(experts))]
        if here < top_k:
            others = np.setdiff1d(np.arange(num_experts), experts)
            rest = np.full((count, top_k - here), -1, np.int64)
            rest[mine] = others[_uniform(far[mine, : top_k - here], len(others))]
            ids[mine, here:] = _to_slots(rest, slots, source)[mine]
    return ids
