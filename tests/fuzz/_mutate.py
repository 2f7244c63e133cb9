"""Fuzzing within a time limit: valid inputs are damaged at random, from a seed that a failure names."""

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

CASE_LIMIT_S = 10.0
"""No reader of a small file may take longer."""

SECONDS = [pytest.param(2.0, id="short"), pytest.param(30.0, id="long", marks=pytest.mark.slow)]
"""Each fuzz test is short in `make test`, and long in `make test-slow`."""

_ODD = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\n",
    b"-1",
    b"1e999",
    b"nan",
    b"99999999999999999999",
    b"\xef\xbb\xbf",
    b'"',
    b"[" * 60,
)


def damaged(data: bytes, drawn: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """`data` after one to four random changes; `words` are what its readers might stumble over."""
    for _ in range(drawn.randint(1, 4)):
        first, last = sorted(drawn.randint(0, len(data)) for _ in range(2))
        short = min(last, first + drawn.randint(0, 8))
        match drawn.randrange(7):
            case 0:
                data = data[:first]
            case 1:
                data = data[:first] + data[last:]
            case 2:
                data = data[:first] + data[first:last] * 2 + data[last:]
            case 3 if data:
                at = drawn.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :]
            case 4:
                data = data[:first] + drawn.randbytes(drawn.randint(1, 12)) + data[short:]
            case _:
                data = data[:first] + drawn.choice([*_ODD, *words]) + data[short:]
    return data


def altered(value: Any, drawn: random.Random) -> Any:
    """A JSON value with one to three parts replaced, removed or added: well-formed, and not what it should be."""
    for _ in range(drawn.randint(1, 3)):
        value = _altered_once(value, drawn)
    return value


def _altered_once(value: Any, drawn: random.Random) -> Any:
    odd = [None, True, -1, 2**70, 1.5, "", "word", [], {}, [[]], {"a": 1}, "\0", [None], float("1e300")]
    if isinstance(value, dict) and value and drawn.random() < 0.85:
        key = drawn.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        match drawn.randrange(5):
            case 0:
                return rest
            case 1:
                return {**rest, key + "x": value[key]}
            case _:
                return {**value, key: _altered_once(value[key], drawn)}
    if isinstance(value, list) and value and drawn.random() < 0.85:
        at = drawn.randrange(len(value))
        match drawn.randrange(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], _altered_once(value[at], drawn), *value[at + 1 :]]
    return drawn.choice(odd)


def fuzz(seconds: float, case: Callable[[random.Random], object], allowed: tuple[type[Exception], ...]) -> int:
    """Run `case` with the seeds 0, 1, 2, ... until the time is over, and at least `LEAST_SEEDS` of them; returns how
    many were refused.

    Any other exception than `allowed`, an error without words, or a case that takes too long fails the test.
    """
    refused = 0
    for seed in _seeds(seconds):
        try:
            with _limited():
                case(random.Random(seed))
        except allowed as error:
            if not str(error).strip():
                raise AssertionError(f"seed {seed}: {type(error).__name__} without a word") from error
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return refused


LEAST_SEEDS = 24
"""Run whatever the time: how much a test sees must not depend on how busy the machine is."""


def _seeds(seconds: float) -> Iterator[int]:
    end, seed = time.monotonic() + seconds, 0
    while seed < LEAST_SEEDS or time.monotonic() < end:
        yield seed
        seed += 1


@contextmanager
def _limited() -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise RuntimeError(f"it took more than {CASE_LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, CASE_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
