"""The oracle: what dispatch and combine must give, for all ranks in one process. Obviously right; slow is fine.

Every list is over ranks. T = tokens of a rank, K = top_k, N = rows that arrive at a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epcross.kernels.codecs import bf16_to_float, decode, float_to_bf16
from epcross.kernels.formats import RowFormat

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BF16Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What one rank holds after dispatch, sorted by (source, token)."""

    source: Int32  # [N]
    token: Int32  # [N]
    ids: Int32  # [N, K] slots of this rank, -1 elsewhere
    weights: Float32  # [N, K], 0 where ids is -1
    rows: Bytes  # [N, padded_row_bytes]
    scales: Bytes  # [N, padded_scale_bytes]


def dispatch(
    ids: Sequence[Int32],
    weights: Sequence[Float32],
    rows: Sequence[Bytes],
    scales: Sequence[Bytes],
    slot_rank: Int32,
    ep_size: int,
) -> list[Landed]:
    """Send each token once to every rank that holds a slot it chose."""
    landed = []
    for rank in range(ep_size):
        arrived = []
        for source in range(ep_size):
            for token, chosen in enumerate(ids[source]):
                here = [slot if slot >= 0 and slot_rank[slot] == rank else -1 for slot in chosen.tolist()]
                if max(here, default=-1) >= 0:
                    kept = [w if slot >= 0 else 0 for slot, w in zip(here, weights[source][token], strict=True)]
                    arrived.append((source, token, here, kept, rows[source][token], scales[source][token]))
        columns = list(zip(*arrived, strict=True)) or [()] * 6
        top_k = ids[0].shape[1]
        landed.append(
            Landed(
                source=np.array(columns[0], np.int32),
                token=np.array(columns[1], np.int32),
                ids=np.array(columns[2], np.int32).reshape(-1, top_k),
                weights=np.array(columns[3], np.float32).reshape(-1, top_k),
                rows=np.array(columns[4], np.uint8).reshape(-1, rows[0].shape[1]),
                scales=np.array(columns[5], np.uint8).reshape(len(arrived), scales[0].shape[1]),
            )
        )
    return landed


def expert_partials(
    landed: Landed, row_format: RowFormat, hidden: int, slot_scale: Float32, weighted: bool
) -> BF16Bits:
    """What experts that scale by a constant make of the rows of one rank, [N, hidden].

    Args:
        slot_scale: the factor of each slot's expert [num_slots].
        weighted: add the experts' outputs, each times its weight; otherwise give the output of the token's first expert
            on this rank, unweighted.
    """
    values = decode(row_format, landed.rows, landed.scales, hidden)
    partials = np.zeros((len(values), hidden), np.uint16)
    for n in range(len(values)):
        local = [(slot, w) for slot, w in zip(landed.ids[n], landed.weights[n], strict=True) if slot >= 0]
        factor = np.float32(0)
        for slot, weight in local if weighted else local[:1]:
            factor = np.float32(factor + slot_scale[slot] * (weight if weighted else np.float32(1)))
        partials[n] = float_to_bf16(values[n] * factor)
    return partials


@np.errstate(invalid="ignore")  # signalling NaNs are legal partials
def combine(
    ids: Sequence[Int32],
    weights: Sequence[Float32],
    landed: Sequence[Landed],
    partials: Sequence[BF16Bits],
    slot_rank: Int32,
    accumulate: str = "fp32",
    weighted: bool = False,
) -> list[BF16Bits]:
    """Add the partials of each token, ranks ascending, rounding to bf16 once at the end.

    Args:
        accumulate: "fp32", or "bf16" to round after every addition.
        weighted: multiply in the weights here: the partial of a rank counts once for each of the token's selections on
            that rank, in the token's order, each time multiplied by its weight. Otherwise it counts once, as it is.
    """
    place = [
        {(s, t): n for n, (s, t) in enumerate(zip(here.source.tolist(), here.token.tolist(), strict=True))}
        for here in landed
    ]
    outputs = []
    for source in range(len(ids)):
        sums = np.zeros((len(ids[source]), partials[0].shape[1]), np.float32)
        for token, chosen in enumerate(ids[source]):
            for rank in range(len(landed)):
                local = [k for k, slot in enumerate(chosen.tolist()) if slot >= 0 and slot_rank[slot] == rank]
                for k in local if weighted else local[:1]:
                    term = bf16_to_float(partials[rank][place[rank][source, token]])
                    if weighted:
                        term = term * weights[source][token, k]
                    sums[token] = sums[token] + term
                    if accumulate == "bf16":
                        sums[token] = bf16_to_float(float_to_bf16(sums[token]))
        outputs.append(float_to_bf16(sums))
    return outputs
