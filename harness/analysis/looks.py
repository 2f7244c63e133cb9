"""One colour and marker for each backend, the same in every figure of every run.

Those of backends that ship with epcross are in its conf/backend; runs keep the colours of their day, which count for
others alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from epcross.harness.planning.library import Library
from epcross.harness.planning.schema import MARKERS, BackendConfig

LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 3)))
"""Of series, in the order of their markers."""

Line = str | tuple[int, tuple[int, ...]]

UNKNOWN_COLOR = "#555555"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How the lines and marks of one series look."""

    color: str
    marker: str
    line: Line


@cache
def shipped(backend: str) -> BackendConfig | None:
    """What epcross itself says of a backend; None of one that came from elsewhere."""
    library = Library(())
    library.load([("backend", backend)], [])
    return library.get("backend", backend)


def looks(series: Iterable[tuple[str, str]], colors: Mapping[str, str]) -> dict[tuple[str, str], Look]:
    """The looks of each (backend, variant). Variants of a backend share its colour; the first has its marker, others
    take one that no backend among these has.

    Args:
        colors: of backends that do not ship with epcross.
    """
    ordered = sorted(set(series))
    configs = {backend: shipped(backend) for backend, _ in ordered}
    own = {backend: config.marker for backend, config in configs.items() if config and config.marker}
    free = [marker for marker in MARKERS if marker not in own.values()]
    found: dict[tuple[str, str], Look] = {}
    seen: set[str] = set()
    for backend, variant in ordered:
        first = backend not in seen and backend in own
        seen.add(backend)
        if first:
            marker = own[backend]
        else:
            marker = free.pop(0)
            free.append(marker)  # of more series than markers some look alike
        config = configs[backend]
        found[backend, variant] = Look(
            color=config.color if config else colors.get(backend, UNKNOWN_COLOR),
            marker=marker,
            line=LINES[MARKERS.index(marker) % len(LINES)],
        )
    return found
