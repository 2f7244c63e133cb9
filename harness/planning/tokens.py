"""How many tokens each rank has, and the capacity that follows."""

import math
from collections.abc import Sequence

from epcross.harness.planning.typed import Mismatch


def tokens_of_ranks(
    tokens_per_rank: int | Sequence[int], ep_size: int, token_skew: float = 1.0, empty_ranks: int = 0
) -> tuple[int, ...]:
    """Tokens of each rank.

    A list is taken as it is. A number is the mean of the ranks that have any: the last `empty_ranks` have none, and
    over the others tokens rise linearly so that the largest is `token_skew` times the mean, rounded up; opposite
    ranks add up to twice the mean, so the total does not depend on the skew.

    Raises:
        Mismatch: the list has another length than `ep_size`, or a value is out of its range.
    """
    if not isinstance(tokens_per_rank, int):
        if len(tokens_per_rank) != ep_size:
            raise Mismatch(
                f"tokens_per_rank={list(tokens_per_rank)} lists {len(tokens_per_rank)} ranks, but ep_size={ep_size}; "
                "give one number for all ranks or one for each"
            )
        if token_skew != 1.0 or empty_ranks != 0:
            raise Mismatch("tokens_per_rank as a list says it all; leave out token_skew and empty_ranks")
        return tuple(tokens_per_rank)
    if not 1.0 <= token_skew <= 2.0:
        raise Mismatch(f"token_skew={token_skew} must lie between 1 and 2; for more, list the tokens of each rank")
    if not 0 <= empty_ranks < ep_size:
        raise Mismatch(f"empty_ranks={empty_ranks} must lie between 0 and {ep_size - 1} at ep_size={ep_size}")
    filled = ep_size - empty_ranks
    tokens = [tokens_per_rank] * filled
    for low in range(filled // 2):
        # 1 at the outermost pair, falling linearly to 0 in the middle
        distance = 1 - 2 * low / (filled - 1)
        # rounding away what binary fractions add, so that 10 * 1.1 is 11 and not 12
        extra = math.ceil(round(tokens_per_rank * (token_skew - 1) * distance, 6))
        tokens[low] -= extra
        tokens[filled - 1 - low] += extra
    return (*tokens, *[0] * empty_ranks)


def nominal_tokens(tokens_per_rank: int | Sequence[int]) -> int:
    """The x of figures: the given number, or the mean of a list, rounded up."""
    if isinstance(tokens_per_rank, int):
        return tokens_per_rank
    return math.ceil(sum(tokens_per_rank) / max(1, len(tokens_per_rank)))


def nominal_words(nominal: int, least: int, total: int, ep_size: int) -> str:
    """`nominal_tokens` for people: of a list whose mean was rounded up, that mean.

    Args:
        least, total: tokens of the emptiest rank, and of all ranks.
    """
    mean = total / ep_size
    emptied = least == 0 and total % nominal == 0  # a number of tokens on some ranks, and none on the others
    return f"{mean:.3g}" if nominal - 1 < mean < nominal and not emptied else str(nominal)


def counted(tokens: int | str) -> str:
    """A number of tokens, or several numbers as text, with the noun: `1 token`, `8 tokens`, `1, 8 tokens`."""
    return f"{tokens} token{'s' * (str(tokens) != '1')}"


def capacity(tokens: Sequence[int], max_tokens_per_rank: int | None, capacity_factor: float) -> int:
    """Rows that every rank reserves per source: as given, or the fullest rank times the factor, rounded up.

    Raises:
        Mismatch: both are given, or the factor is below 1.
    """
    if max_tokens_per_rank is not None:
        if capacity_factor != 1.0:
            raise Mismatch(
                f"max_tokens_per_rank={max_tokens_per_rank} and capacity_factor={capacity_factor} say two things; "
                "give one of them"
            )
        return max_tokens_per_rank
    if capacity_factor < 1.0:
        raise Mismatch(f"capacity_factor={capacity_factor} must be at least 1: every rank's tokens must fit")
    return math.ceil(round(max(tokens) * capacity_factor, 6))
