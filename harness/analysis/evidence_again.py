"""What the documents say of the same series from one start of its processes to the next, as Markdown."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.cells import MARGIN
from epcross.harness.analysis.evidence_run import TIMED, EvidenceRun, names
from epcross.harness.measuring.stats import median
from epcross.harness.planning.tokens import counted

NAMED = 3
"""Series that are named of those which differ; the others are counted."""

Point = tuple[str, str, str, int]
"""Series, panel, regime, tokens per rank."""


def again(run: EvidenceRun) -> str:
    """How far medians of one series differ from one start of its processes to the next: what no comparison can see.
    Says of how many series, starts and repeats, since those that were started once have no part in it, and of which
    series the differences are."""
    by_launch: dict[Point, dict[tuple[str, int], list[float]]] = {}
    series = run.series()
    for panel in run.panels():
        for regime in TIMED:
            for (name, tokens), rows in run.shown(regime, panel).items():
                starts = by_launch.setdefault((name, run.words(panel), regime, tokens), {})
                for row in rows:
                    assert row.latency_us is not None
                    starts.setdefault((row.run_id, row.launch), []).append(row.latency_us)
    compared = {point: [each[start] for start in sorted(each)] for point, each in by_launch.items() if len(each) > 1}
    if not compared:
        return "each series was started once, so nothing can be said of what a second start changes"
    apart = {point: abs(median(each[-1]) / median(each[0]) - 1) for point, each in compared.items()}
    worst = max(apart, key=lambda point: apart[point])
    labels = [label for name, (label, _) in series.items() if name in {point[0] for point in compared}]
    starts = span(len(each) for each in compared.values())
    n = span(len(times) for each in compared.values() for times in each)
    others = len(series) - len(labels)
    once = f"; the other {others} series, started once, tell nothing of it" if others else ""
    beyond = [point for point, share in apart.items() if share > MARGIN]
    return (
        f"{len(labels)} of the {len(series)} series ({'; '.join(labels)}) have points with more than one start: the"
        f" first and the last of {starts} starts, compared at {len(compared)} points by the medians of n = {n} repeats"
        f" each, differ by more than {MARGIN:.0%} at {len(beyond)}{whose(run, beyond, series)}; half of all by less"
        f" than {above(median(list(apart.values())))}, and the largest difference is {apart[worst]:.1%}"
        f" ({series[worst[0]][0]}, {worst[1]}, {worst[2]}, {counted(worst[3])} per rank){once}"
    )


def whose(run: EvidenceRun, points: Iterable[Point], series: Mapping[str, tuple[str, Any]]) -> str:
    """` (26 of them NCCL all-to-all, ...)`: the series with most of these points first."""
    counts = Counter(name for name, *_ in points)
    if not counts:
        return ""
    name_of = names(run.rows)
    # what no graph can hold is enqueued pair by pair, by a host that waits within
    waiting = {name_of(row) for row in run.headline_rows() if row.enqueued == "eager"}
    told = [
        f"{count} of {series[name][0]}{', which the host waits in' if name in waiting else ''}"
        for name, count in counts.most_common(NAMED)
    ]
    if rest := counts.total() - sum(count for _, count in counts.most_common(NAMED)):
        told.append(f"{rest} of others")
    return f" ({'; '.join(told)})"


def above(share: float) -> str:
    """The least percentage with two decimals that is more than `share`."""
    return f"{(math.floor(share * 1e4) + 1) / 1e2:.2f}%"
