"""A process group of one, for what one process does on one GPU."""

from tests.contract.threads import Shared, ThreadGroup


def alone() -> ThreadGroup:
    return ThreadGroup(0, Shared(1))
