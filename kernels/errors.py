"""The base of our own errors, and those a kernel raises."""

from collections.abc import Iterable


class EpcrossError(Exception):
    """Base of every error we raise on purpose. Its message is finished: value, what is allowed, next step."""

    exit_code = 1


class WaitExpired(EpcrossError):
    """A bounded wait ran out; the message names rank, peer, phase and epoch."""


class BuildError(EpcrossError):
    """A kernel could not be compiled; the message holds the compiler's own words."""


class InvalidArguments(EpcrossError, ValueError):
    """Arguments that cannot be served, all of them: `problems` has one sentence for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class NoCrossover(EpcrossError):
    """No entry says which protocol is faster here; the message says how to get one, or do without."""


class DoesNotFit(EpcrossError):
    """A workspace is larger than the memory that is free; the message has both sizes."""


class NotOneDomain(EpcrossError):
    """Ranks that cannot map each other's memory, or are not set up to; the message says which."""
