"""Bytes counted on the links beside the bytes that a pair must send: whether they agree, and if not, what they are.

The view `wire_bytes` is rows with scales, and partials back, one for each (token, other rank). What a protocol adds is
not in it: ids and weights (`metadata_bytes` with each row), headers, flags and padding (`protocol_bytes`, which also
has what a rank writes to itself, as re-arming is).
"""

from epcross.harness.point import Point
from epcross.harness.record import Record
from epcross.kernels.formats import row_size

MARGIN = 0.03
"""Share by which the counters and `wire_bytes` may differ and agree all the same."""


def pair_row_bytes(point: Point) -> int:
    """A row with its scales and a partial, as they travel."""
    formats = (point.dispatch_format, point.combine_format)
    return sum(row_size(row_format, point.model.hidden).padded_bytes for row_format in formats)


def wire_bytes(row: Record) -> int:
    """The view of that name, of a round trip."""
    return (row.pairs_remote_sum or 0) * (row.padded_bytes + row.combine_row_bytes)


def ratio(row: Record) -> float | None:
    """Counted over `wire_bytes`, of bytes sent; None where nothing was counted or nothing must be sent."""
    wire = wire_bytes(row)
    return row.nvlink_tx_bytes / wire if wire and row.nvlink_tx_bytes is not None else None


def difference(row: Record) -> str | None:
    """What the counted bytes are, as a sentence, where they are further than `MARGIN` from `wire_bytes`; else None."""
    counted, share = row.nvlink_tx_bytes, ratio(row)
    if counted is None or share is None:
        return None
    sides = ("sent", counted), ("received", row.nvlink_rx_bytes or 0)
    if all(_close(size, wire_bytes(row)) for _, size in sides):
        return None
    words = ", ".join(f"{size} {side}" for side, size in sides)
    found = f"counted bytes of a pair ({words}) are {share:.3f} times wire_bytes ({wire_bytes(row)}): "
    if not _close(row.nvlink_rx_bytes or 0, counted):
        return found + "what was sent did not arrive at these GPUs, or came from others, so other traffic was counted"
    fitting = [what for what, size in _known(row).items() if _close(counted, size)]
    return found + (f"about {fitting[0]}" if fitting else "more than rows, such as small stores, or other traffic")


def _known(row: Record) -> dict[str, float]:
    """Counts of bytes that libraries are known to move in a pair, and what they are."""
    size, others = row.padded_bytes + row.combine_row_bytes, row.ep_size - 1
    return {
        "rows with ids and weights": (row.pairs_remote_sum or 0) * (size + row.metadata_bytes),
        "a row for each selection, not for each rank": (row.selections_remote_sum or 0) * size,
        "every row to every rank": row.tokens_total * others * size,
        # NCCL's LL protocol: four bytes of data and four of flag. Source: src/include/device.h of NCCL, ncclLLFifoLine
        "twice the rows, as of a protocol with a flag beside every word": 2 * wire_bytes(row),
        "full capacity to every rank": row.ep_size * row.max_tokens_per_rank * others * size,
        "room for each selection of full capacity": row.ep_size * row.max_tokens_per_rank * row.top_k * size,
    }


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= MARGIN * other
