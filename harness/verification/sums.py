"""What a rank's tokens add up to in combine, whoever multiplies the weights, in the declared order and type."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import BF16Bits, Float32, Reduction
from epcross.harness.terms import WeightsBy
from epcross.harness.workload.batches import GroupBatch, slot_scale
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.tape import Payload
from epcross.kernels.codecs import bf16_to_float, decode, float_to_bf16

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What each of a rank's tokens adds up, in order: term j is bf16(row * scale[:, j]) * weight[:, j].

    With `WeightsBy.EXPERTS` there is a term for each rank that the token reaches, with COMBINE one for each selection.
    """

    rank: Int64  # [T, count], whose experts made it; -1 where a token has fewer terms
    scale: Float32  # [T, count]; 0 there
    weight: Float32  # [T, count]; 1 throughout if the experts multiply

    @property
    def count(self) -> int:
        """Most terms of any token."""
        return self.rank.shape[1]


class Sums:
    """The sums of one rank's tokens, a few at a time."""

    def __init__(self, gb: GroupBatch, rank: int, slots: Slots, weights_by: WeightsBy, reduction: Reduction) -> None:
        self.gb, self.rank, self.reduction = gb, rank, reduction
        self.terms = terms_of(gb, rank, slots, weights_by)

    @np.errstate(invalid="ignore")  # signalling NaNs are legal partials
    def of(self, at: slice) -> tuple[Float32, Float32]:
        """Unrounded sums of tokens `at` [n, hidden], and the magnitudes of their terms added; those only where the sums
        are not exact, else 0."""
        gb, terms = self.gb, self.terms
        hidden = gb.point.model.hidden
        token = np.arange(at.start, at.stop)
        source = np.full(len(token), self.rank)
        total = np.zeros((len(token), hidden), np.float32)
        magnitude = np.zeros_like(total)
        adversarial = gb.payload is Payload.ADVERSARIAL
        rows = total
        if not adversarial:
            rows = decode(gb.point.dispatch_format, gb.rows(source, token), gb.scales(source, token), hidden)
        for step in range(terms.count):
            made_by = terms.rank[at, step]
            if adversarial:
                partial = gb.adversarial_partials(np.maximum(made_by, 0), source, token)
            else:
                partial = float_to_bf16(rows * terms.scale[at, step, None])
            term = bf16_to_float(partial)
            term *= terms.weight[at, step, None]
            term[made_by < 0] = 0
            total += term
            if self.reduction.accumulate == "bf16":
                total = bf16_to_float(float_to_bf16(total))
            if not (self.reduction.exact or adversarial):
                magnitude += np.abs(term)
        return total, magnitude


def terms_of(gb: GroupBatch, rank: int, slots: Slots, weights_by: WeightsBy) -> Terms:
    """The terms of one rank's tokens. Under `Payload.EXACT` one stands for all of a token, as no order can matter."""
    ids, weights = gb.ids[rank], gb.weights[rank]
    every = np.arange(len(ids))
    destination = np.where(ids >= 0, slots.slot_rank[ids], slots.ep_size)
    order = np.argsort(destination, axis=1, kind="stable")  # ranks ascending; on a rank, the token's own order
    place, slot = (np.take_along_axis(a, order, axis=1) for a in (destination, ids))
    weight = np.take_along_axis(weights, order, axis=1)
    valid = place < slots.ep_size
    weight = np.where(valid, weight, np.float32(0))
    scale = np.where(valid, slot_scale(slots)[slot], np.float32(0))
    first = valid.copy()  # selections that are a token's first on their rank
    first[:, 1:] &= place[:, 1:] != place[:, :-1]
    group = np.maximum(np.cumsum(first, axis=1) - 1, 0)
    if weights_by is WeightsBy.COMBINE:
        leader = np.maximum.accumulate(np.where(first, np.arange(ids.shape[1]), 0), axis=1)
        scale = np.where(valid, np.take_along_axis(scale, leader, axis=1), np.float32(0))
        terms = Terms(rank=np.where(valid, place, -1), scale=scale, weight=weight)
    else:
        count = int(first.sum(axis=1).max(initial=0))
        made_by = np.full((len(ids), max(1, count)), -1, np.int64)
        summed = np.zeros(made_by.shape, np.float32)
        for column in range(ids.shape[1]):  # one after another, as the oracle adds
            summed[every, group[:, column]] += weight[:, column] * scale[:, column]
            made_by[every, group[:, column]] = np.where(
                valid[:, column], place[:, column], made_by[every, group[:, column]]
            )
        terms = Terms(rank=made_by, scale=summed, weight=np.ones_like(summed))
    if gb.payload is not Payload.EXACT:
        return terms
    total = (terms.scale * terms.weight).sum(axis=1, keepdims=True)
    return Terms(rank=terms.rank.max(axis=1, keepdims=True), scale=total, weight=np.ones_like(total))


def differ(got: BF16Bits, want: BF16Bits) -> NDArray[np.bool_]:
    """Where bf16 bits mean different values: NaN equals NaN, zero equals zero."""
    if np.array_equal(got, want):
        return np.zeros(got.shape, np.bool_)
    both_nan = ((got & 0x7FFF) > 0x7F80) & ((want & 0x7FFF) > 0x7F80)
    both_zero = ((got | want) & 0x7FFF) == 0
    return (got != want) & ~both_nan & ~both_zero
