"""What stands under every table and figure: how often, how, where and inside which window a number was taken."""

from collections.abc import Iterable, Sequence

from epcross.harness.measuring.stats import MIN_LAUNCHES
from epcross.harness.record import Record
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import Domain, Flag


def provenance(rows: Sequence[Record]) -> list[str]:
    """Sentences on `rows`: n of each point (launches x seeds x chains), estimator, boundary, domain and run ids.

    n is that of the rows given, so give those that are shown and no others; one without a latency does not count.
    """
    taken: dict[tuple[str, str, str], list[Record]] = {}
    for row in rows:
        if row.latency_us is not None:
            taken.setdefault((row.run_id, row.point_id, row.phase), []).append(row)
    lines = [repeats(taken.values()), f"each repeat: {_estimators(rows)}"]
    if taken and fewest_launches(taken.values()) < MIN_LAUNCHES:
        lines.append(f"within_launch: fewer than {MIN_LAUNCHES} launches, so the variance between launches is not seen")
    if capped := power(row for own in taken.values() for row in own):
        lines.append(f"power_capped: {capped}")
    lines += boundaries(rows)
    domains = ", ".join(sorted({row.domain for row in rows}))
    lines.append(f"domain {domains}; run {', '.join(sorted({row.run_id for row in rows}))}")
    if {row.domain for row in rows} == {Domain.CPU}:
        lines[-1] += "; processes over shared memory, not comparable with GPU numbers"
    return lines


def repeats(places: Iterable[Sequence[Record]]) -> str:
    """`n = 9 to 18 repeats (1 to 2 launches x 3 seeds x 3 chains)`, of rows grouped by the place they are shown at."""
    places = list(places)
    if not places:
        return "n = 0 repeats: none is ok"
    launches = _some([len(_launches(own)) for own in places], "launch", "launches")
    seeds = _some([len({row.seed for row in own}) for own in places], "seed", "seeds")
    chains = _some([len({row.chain for row in own}) for own in places], "chain", "chains")
    return f"n = {_some([len(own) for own in places], 'repeat', 'repeats')} ({launches} x {seeds} x {chains})"


def power(rows: Iterable[Record]) -> str:
    """How many of `rows` ran at the power limit of a GPU, and how slow it then was, in words; empty if none did."""
    rows = list(rows)
    capped = [row for row in rows if Flag.POWER_CAPPED in row.flags.split()]
    if not capped:
        return ""
    clocks = [row.sm_clock_mhz for row in capped if row.sm_clock_mhz is not None]
    lowest = f", at SM clocks down to {min(clocks)} MHz" if clocks else ""
    return f"{len(capped)} of {len(rows)} repeats at the power limit of a GPU{lowest}"


def fewest_launches(places: Iterable[Sequence[Record]]) -> int:
    """Launches behind the place that has the fewest."""
    return min(len(_launches(own)) for own in places)


def _some(counts: Sequence[int], one: str, many: str) -> str:
    return f"{span(counts)} {one if max(counts) == 1 else many}"


def _launches(rows: Sequence[Record]) -> set[tuple[str, int]]:
    return {(row.run_id, row.launch) for row in rows}


def span(counts: Iterable[int]) -> str:
    """One number, or from the fewest to the most: points need not have been taken equally often."""
    ordered = sorted(counts)
    return " to ".join(str(end) for end in dict.fromkeys((ordered[0], ordered[-1])))


def _estimators(rows: Sequence[Record]) -> str:
    """How a latency follows from the samples; by regime where there are several."""
    found = sorted({(row.regime, row.estimator) for row in rows if row.estimator}, reverse=True)
    several = len({regime for regime, _ in found}) > 1
    return "; ".join(f"{regime}, {words}" if several else words for regime, words in found) or "no time was taken"


def boundaries(rows: Sequence[Record]) -> list[str]:
    """What lies inside the window: what all backends share, then what each has besides."""
    words = {row.backend: frozenset(row.boundary.split()) for row in rows if row.boundary is not None}
    if not words:
        return []
    common = frozenset.intersection(*words.values())
    besides = [f"{name} also {join_words(own - common)}" for name, own in sorted(words.items()) if own - common]
    return ["; ".join([f"inside the window: {join_words(common) or 'nothing in common'}", *besides])]
