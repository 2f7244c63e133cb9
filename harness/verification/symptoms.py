"""What a wrong sum looks like: the usual faults of a combine, each tried on the first token that is wrong.

A guess for the words of a mismatch, made after it is found; nothing is judged by it.
"""

from collections.abc import Iterator

import numpy as np

from epcross.harness.backends.base import BF16Bits, Float32
from epcross.harness.terms import WeightsBy
from epcross.harness.workload.batches import GroupBatch, slot_scale
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.tape import Payload
from epcross.kernels.codecs import bf16_to_float, decode

_TOLD = 2  # faults that a guess may leave open: two ranks' partials are often of one weight
_NEAR = 2.0**-6  # roundings of bf16 that a faulty combine may make besides


def symptom(gb: GroupBatch, rank: int, slots: Slots, weights_by: WeightsBy, token: int, got: BF16Bits) -> str:
    """What `got`, the sums [hidden] of a token of `rank`, agree with, as words behind a mismatch whose first it is.

    Empty if with none of the faults known here, or with many, or if its partials are arbitrary bits.
    """
    if gb.payload is Payload.ADVERSARIAL:
        return ""
    at, hidden = np.array([token]), gb.point.model.hidden
    source = np.full(1, rank)
    row = decode(gb.point.dispatch_format, gb.rows(source, at), gb.scales(source, at), hidden)[0]
    sums = bf16_to_float(np.ascontiguousarray(got))
    if not np.isfinite(sums).all():
        return ""
    faults = _faults(gb, rank, slots, weights_by, token)
    found = list(dict.fromkeys(words for words, factor in faults if _agree(sums, row * factor)))
    return f"; the first is {' or '.join(found)}" if 0 < len(found) <= _TOLD else ""


def _agree(sums: Float32, guess: Float32) -> bool:
    return bool((np.abs(sums - guess) <= _NEAR * np.abs(guess)).all())


def _faults(
    gb: GroupBatch, rank: int, slots: Slots, weights_by: WeightsBy, token: int
) -> Iterator[tuple[str, np.float32]]:
    """Each fault in words, and what it would multiply the token's row by."""
    ids = gb.ids[rank][token]
    weights, valid = gb.weights[rank][token][ids >= 0], ids[ids >= 0]
    owner, scale = slots.slot_rank[valid], slot_scale(slots)[valid]
    ranks = np.unique(owner)
    if weights_by is WeightsBy.COMBINE:  # all selections of a rank have the partial of its first
        scale = np.array([scale[np.argmax(owner == one)] for one in owner], np.float32)
    terms = weights * scale
    yield "as if no partial were added", np.float32(0)
    if len(ranks) > 1:
        for one in ranks:
            yield f"as if the partial of rank {one} were missing", terms[owner != one].sum()
    for one in ranks:
        yield f"as if the partial of rank {one} were added twice", terms.sum() + terms[owner == one].sum()
    yield "as if weights were not multiplied", scale.sum()
    twice = sum((terms[owner == one].sum() * weights[owner == one].sum() for one in ranks), np.float32(0))
    yield "as if weights were multiplied twice", np.float32(twice)
    yield "as if weights were multiplied twice", (terms * weights).sum()
