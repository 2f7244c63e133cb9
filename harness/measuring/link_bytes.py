"""Bytes counted on the links beside the bytes that a pair must send: whether they agree, and if not, what they are.

What must be sent is rows with scales, and partials back, one for each (token, other rank). What a protocol adds is not
in it: ids and weights (`metadata_bytes` with each row), headers, flags and padding (`protocol_bytes`, which also has
what a rank writes to itself, as re-arming is).
"""

from typing import NamedTuple

from epcross.harness.point import Point
from epcross.harness.record import Record
from epcross.kernels.formats import row_size

MARGIN = 0.03
"""Share by which counted bytes and those that must be sent may differ and agree all the same."""

NEAR = 0.10
"""Share by which counted bytes may differ from a known count and be told as so many times that."""

ROUNDED = 0.01
"""Counts are means over sets, rounded, so off by up to a half. Rows before schema version 7 hold nothing else of what
must be sent: they are judged where a half is less than this share."""


class Moved(NamedTuple):
    """What counted bytes are."""

    what: str
    times: float | None = None  # as much as that; 1: about that, None: it has no size

    def __str__(self) -> str:
        """As a clause."""
        if self.times is None:
            return self.what
        return f"about {self.what}" if self.times == 1 else f"{self.times:.2f} times {self.what}"


def pair_row_bytes(point: Point) -> int:
    """A row with its scales and a partial, as they travel."""
    formats = (point.dispatch_format, point.combine_format)
    return sum(row_size(row_format, point.model.hidden).padded_bytes for row_format in formats)


def wire_bytes(row: Record) -> float:
    """What must cross in a pair that was counted; in older rows the view of that name, of a round trip."""
    rounded = (row.pairs_remote_sum or 0) * (row.padded_bytes + row.combine_row_bytes)
    return rounded if row.nvlink_wire_bytes is None else row.nvlink_wire_bytes


def ratio(row: Record) -> float | None:
    """Counted over `wire_bytes`, of bytes sent; None where nothing was counted, nothing must be sent, or a count that
    was rounded could make a difference."""
    wire = wire_bytes(row)
    known = row.nvlink_wire_bytes is not None or not _is_coarse(row.pairs_remote_sum)
    return row.nvlink_tx_bytes / wire if wire and known and row.nvlink_tx_bytes is not None else None


def moved(row: Record) -> Moved | None:
    """What the counted bytes are where they are further than `MARGIN` from `wire_bytes`; None where they are not, or it
    cannot be told."""
    counted, received = row.nvlink_tx_bytes, row.nvlink_rx_bytes or 0
    if counted is None or ratio(row) is None:
        return None
    wire = wire_bytes(row)
    if _close(counted, wire) and _close(received, wire):
        return None
    if not _close(received, counted):
        return Moved("what was sent did not arrive at these GPUs, or came from others, so other traffic was counted")
    if counted < wire:
        return Moved("less than must cross, so the rest of it went another way, or counters stood still")
    known = _known(row)
    for what, size in known.items():
        if _close(counted, size):
            return Moved(what, 1)
    what = min(known, key=lambda each: abs(counted - known[each]))
    # what is so near to the rows alone is already told by the ratio
    if abs(counted - wire) <= NEAR * wire or abs(counted - known[what]) > NEAR * known[what]:
        return Moved("more than rows, such as small stores, or other traffic")
    rounded = what == _BY_SELECTION and _is_coarse(row.selections_remote_sum)
    return Moved(what, 1 if rounded else counted / known[what])


def difference(row: Record) -> str | None:
    """`moved`, as a sentence."""
    what, share = moved(row), ratio(row)
    if what is None or share is None:
        return None
    words = f"{row.nvlink_tx_bytes} sent, {row.nvlink_rx_bytes or 0} received"
    return f"counted bytes of a pair ({words}) are {share:.3f} times wire_bytes ({wire_bytes(row):.0f}): {what}"


_BY_SELECTION = "a row for each selection, not for each rank"


def _known(row: Record) -> dict[str, float]:
    """Counts of bytes that libraries are known to move in a pair, and what they are."""
    size, others, wire = row.padded_bytes + row.combine_row_bytes, row.ep_size - 1, wire_bytes(row)
    return {
        "rows with ids and weights": wire * (size + row.metadata_bytes) / size,
        _BY_SELECTION: (row.selections_remote_sum or 0) * size,
        "every row to every rank": row.tokens_total * others * size,
        # NCCL's LL protocol: four bytes of data and four of flag. Source: src/include/device.h of NCCL, ncclLLFifoLine
        "twice the rows, as of a protocol with a flag beside every word": 2 * wire,
        "full capacity to every rank": row.ep_size * row.max_tokens_per_rank * others * size,
        "room for each selection of full capacity": row.ep_size * row.max_tokens_per_rank * row.top_k * size,
    }


def _is_coarse(count: int | None) -> bool:
    return ROUNDED * (count or 0) <= 0.5


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= MARGIN * other
