"""A counter-based integer generator: word i of a stream is a pure function of the stream's key and i.

No state is carried, so any rank, process or machine computes any part of a batch alone and in any order. Only wrapping
64-bit integer arithmetic is used; no library's generator, whose streams may change from version to version.

Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) with the
finaliser constants of Stafford's variant 13, as in Vigna's public-domain splitmix64.c.
"""

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def mix(words: UInt64) -> UInt64:
    """The SplitMix64 finaliser: a bijection of 64-bit words, element by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return words ^ (words >> np.uint64(31))


def key(*parts: int) -> int:
    """One 64-bit key of several integers; their order and number matter."""
    state = len(parts)
    for part in parts:
        state = ((state ^ (part & _MASK)) + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * _MULTIPLIERS[0]) & _MASK  # `mix` of one Python integer
        state = ((state ^ (state >> 27)) * _MULTIPLIERS[1]) & _MASK
        state ^= state >> 31
    return state


def words(stream: int, first: int, count: int) -> UInt64:
    """Words [first, first + count) of the stream with this key; key 0 is SplitMix64 seeded with 0."""
    counters = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    return mix(counters * np.uint64(_GAMMA) + np.uint64(stream))


def below(drawn: UInt64, bounds: UInt64 | int) -> UInt64:
    """Integers in [0, bound) for bounds of at most 2**32, by multiply and shift; off by less than bound / 2**32."""
    return ((drawn >> np.uint64(32)) * np.asarray(bounds, np.uint64)) >> np.uint64(32)


def shuffle(stream: int, first: int, rows: int, size: int) -> NDArray[np.int64]:
    """`rows` permutations of range(size), [rows, size]; row i is the same whatever `first` it is reached from."""
    drawn = words(stream, first * size, rows * size).reshape(rows, size)
    # the index in the low bits makes the order total, so that no sorting method can matter
    bits = np.uint64(max(1, (size - 1).bit_length()))
    order = np.sort((drawn >> bits << bits) | np.arange(size, dtype=np.uint64), axis=1)
    return (order & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
