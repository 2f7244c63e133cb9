"""What Python has to do for a replay, which runs none: calls that belong to a captured graph.

with capturing() as calls: ...     whoever captures; after each replay it makes every call in `calls`
calls = captured()                 whoever is captured puts calls there, by a key that is its own
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

Calls = dict[Hashable, Callable[[], None]]

_here = threading.local()  # ranks may be threads of one process, in tests


@contextmanager
def capturing() -> Iterator[Calls]:
    """While this thread captures a graph."""
    calls: Calls = {}
    _here.calls = calls
    try:
        yield calls
    finally:
        _here.calls = None


def captured() -> Calls | None:
    """The calls of the graph that this thread is capturing, the same for all of it; None if it captures none."""
    return getattr(_here, "calls", None)
