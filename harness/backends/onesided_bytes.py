"""What a rank of the one-sided exchange stores in a round besides rows, scales, ids, weights, partials and sums."""

from epcross.kernels.onesided.layout import VECTOR_BYTES, Layout, Protocol


def sent_bytes(at: Layout, *, tokens: int, rows: int) -> int:
    """What a rank with `tokens` tokens stores to all ranks in a round besides rows, scales, ids, weights and partials,
    if `rows` go out: headers, padding, flags. What is for other ranks crosses the links, and is not in `wire_bytes`."""
    shape = at.shape
    headers = 8 * shape.ep_size * max(tokens, 1)  # one for every (token, rank), sent or not; that of token 0 always
    padding = rows * (16 * shape.record_vectors - shape.row_bytes - shape.scale_bytes - 8 * shape.top_k)
    flags = 2 * 8 * shape.ep_size if at.protocol is Protocol.FENCE else 0  # one for each peer and direction, at least
    return headers + padding + flags


def own_bytes(at: Layout, *, tokens: int, received: int, returned: int) -> int:
    """What a rank with `tokens` tokens stores to its own memory in a round besides what it receives: where each token
    went, and armed words in place of the `received` records and `returned` partials of other ranks. Crosses no link.

    Without the bitmaps of words that were escaped: those depend on the payload, and are few.
    """
    sent = 4 * at.shape.ep_size * tokens
    if at.protocol is Protocol.FENCE:
        return sent
    return sent + VECTOR_BYTES * (received * at.shape.record_vectors + returned * at.shape.partial_vectors)
