"""The base of our own errors, and those a kernel raises."""


class EpcrossError(Exception):
    """Base of every error we raise on purpose. Its message is finished: value, what is allowed, next step."""

    exit_code = 1


class WaitExpired(EpcrossError):
    """A bounded wait ran out; the message names rank, peer, phase and epoch."""


class BuildError(EpcrossError):
    """A kernel could not be compiled; the message holds the compiler's own words."""
