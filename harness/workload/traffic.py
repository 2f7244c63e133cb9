"""How much a batch moves, as counts; the views below say how others turn counts into bytes.

A selection is one valid (token, slot). A pair is one (token, destination rank): several selections on one rank are one
pair. "Remote" leaves out a token's own rank. Names are those of `record.Record`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import Int32

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counts of one batch of the whole group, or their means over several."""

    selections_sum: int
    selections_remote_sum: int
    pairs_sum: int
    pairs_remote_sum: int
    selections_sent_max: int
    selections_received_max: int
    pairs_sent_max: int
    pairs_sent_remote_max: int
    pairs_received_max: int
    pairs_received_remote_max: int
    fan_out: float  # pairs per token, tokens that choose nothing included; 0 without tokens
    imbalance: float  # most over mean selections received per rank; 0 without selections
    gini: float  # of selections received per rank: 0 equal, (ep_size - 1) / ep_size all to one


def matrices(ids: Sequence[Int32], slot_rank: Int32, ep_size: int) -> tuple[Int64, Int64]:
    """Selections and pairs from each rank (row) to each rank (column), both [ep_size, ep_size].

    Args:
        ids: slot ids [T, top_k] of each source rank, -1 = dropped.
    """
    selections = np.zeros((ep_size, ep_size), np.int64)
    pairs = np.zeros((ep_size, ep_size), np.int64)
    for source, chosen in enumerate(ids):
        destination = np.where(chosen >= 0, slot_rank[chosen], ep_size)
        ordered = np.sort(destination, axis=1)
        first = np.ones(ordered.shape, np.bool_)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        selections[source] = np.bincount(destination.ravel(), minlength=ep_size + 1)[:ep_size]
        pairs[source] = np.bincount(ordered[first], minlength=ep_size + 1)[:ep_size]
    return selections, pairs


def count(ids: Sequence[Int32], slot_rank: Int32, ep_size: int) -> Traffic:
    """The counts of one batch; arguments as for `matrices`."""
    selections, pairs = matrices(ids, slot_rank, ep_size)
    remote_selections, remote_pairs = (m - np.diag(np.diag(m)) for m in (selections, pairs))
    tokens = sum(len(chosen) for chosen in ids)
    received = selections.sum(axis=0)
    total = int(received.sum())
    return Traffic(
        selections_sum=total,
        selections_remote_sum=int(remote_selections.sum()),
        pairs_sum=int(pairs.sum()),
        pairs_remote_sum=int(remote_pairs.sum()),
        selections_sent_max=int(selections.sum(axis=1).max()),
        selections_received_max=int(received.max()),
        pairs_sent_max=int(pairs.sum(axis=1).max()),
        pairs_sent_remote_max=int(remote_pairs.sum(axis=1).max()),
        pairs_received_max=int(pairs.sum(axis=0).max()),
        pairs_received_remote_max=int(remote_pairs.sum(axis=0).max()),
        fan_out=int(pairs.sum()) / tokens if tokens else 0.0,
        imbalance=int(received.max()) * ep_size / total if total else 0.0,
        gini=gini(received),
    )


def gini(values: Int64) -> float:
    """Gini coefficient of counts: half the mean absolute difference over the mean; 0 if all are 0."""
    total = int(values.sum())
    if not total:
        return 0.0
    place = 2 * np.arange(1, len(values) + 1) - len(values) - 1
    return int((place * np.sort(values)).sum()) / (len(values) * total)


def mean_over_sets(sets: Sequence[Traffic]) -> Traffic:
    """Means of every count, counts rounded to whole numbers (half to even)."""
    if not sets:
        raise ValueError("mean_over_sets needs at least one set")
    means: dict[str, Any] = {f.name: sum(getattr(t, f.name) for t in sets) / len(sets) for f in fields(Traffic)}
    return Traffic(**{f.name: round(means[f.name]) if f.type is int else means[f.name] for f in fields(Traffic)})


def selection_bytes(traffic: Traffic, bytes_per_token: int) -> int:
    """Every selection counts, own rank included: how per-expert (low-latency) libraries report."""
    return traffic.selections_sum * bytes_per_token


def rank_bytes(traffic: Traffic, bytes_per_token: int) -> int:
    """One copy per (token, destination rank), own rank included: rows that land."""
    return traffic.pairs_sum * bytes_per_token


def wire_bytes(traffic: Traffic, bytes_per_token: int) -> int:
    """One copy per (token, other rank): what must cross the interconnect."""
    return traffic.pairs_remote_sum * bytes_per_token
