"""What stands under every table and figure: how often, how, where and inside which window a number was taken."""

from collections.abc import Sequence

from epcross.harness.measuring.stats import MIN_LAUNCHES
from epcross.harness.record import Record
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import Domain


def provenance(rows: Sequence[Record]) -> list[str]:
    """Sentences on `rows`: n of each point (launches x seeds x chains), estimator, boundary, domain and run ids."""
    taken: dict[tuple[str, str, str], list[Record]] = {}
    for row in rows:
        taken.setdefault((row.run_id, row.point_id, row.phase), []).append(row)
    launches, seeds, chains = (
        [len({getattr(row, name) for row in own}) for own in taken.values()] for name in ("launch", "seed", "chain")
    )
    n = _span([len(own) for own in taken.values()])
    lines = [
        f"n = {n} repeats ({_span(launches)} launches x {_span(seeds)} seeds x {_span(chains)} chains)",
        f"each repeat: {_estimators(rows)}",
    ]
    if min(launches) < MIN_LAUNCHES:
        lines.append(f"within_launch: fewer than {MIN_LAUNCHES} launches, so the variance between launches is not seen")
    lines += boundaries(rows)
    domains = ", ".join(sorted({row.domain for row in rows}))
    lines.append(f"domain {domains}; run {', '.join(sorted({row.run_id for row in rows}))}")
    if {row.domain for row in rows} == {Domain.CPU}:
        lines[-1] += "; processes over shared memory, not comparable with GPU numbers"
    return lines


def _span(counts: Sequence[int]) -> str:
    """One number, or from the fewest to the most: points need not have been taken equally often."""
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


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
