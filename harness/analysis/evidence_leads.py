"""What the documents say of who is ahead: the better of ours beside the best of the others, as Markdown."""

import itertools
from collections.abc import Mapping

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_reasons import withdrawn
from epcross.harness.analysis.evidence_run import OURS, TIMED, EvidenceRun, Panel, names
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Regime

CLOSE = 1.05
"""Ratios below are told with three decimals."""

Calls = list[list[float]]
"""Times of one series, of each call in which it was measured beside another."""


def leads(run: EvidenceRun) -> str:
    """The better of ours beside the best of the others at each number of tokens, a table for each panel and regime.
    Ratios are of times of one call: a run that went on later, on the same GPUs, found them at other clocks."""
    tables, series, counts = [], run.series(), []
    for panel, regime in itertools.product(run.panels(), TIMED):
        times = _by_call(run, panel, regime)
        lines = [
            f"| tokens per rank, {run.words(panel)}, {regime} | ours (us) | best other (us) | other / ours |",
            "| ---: | ---: | ---: | ---: |",
        ]
        for tokens in sorted({each for _, each in times}):
            if lead := _lead({name: calls for (name, at), calls in times.items() if at == tokens}):
                spoken = [
                    f"{series[name][0]} {microseconds(median([us for call in calls for us in call]))}"
                    for name, calls in lead
                ]
                counts += [sum(map(len, calls)) for _, calls in lead]
                lines.append(f"| {tokens} | {' | '.join(spoken)} | {_ratio(lead[1][1], lead[0][1])} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    gone = [f"Left out as withdrawn: {words}."] if (words := withdrawn(run)) else []
    if not tables:
        return " ".join(["nothing of ours stands beside another backend" + "." * bool(gone), *gone])
    n = f"Each median is of n = {span(counts)} repeats, of calls in which both were measured."
    return "\n\n".join([*tables, " ".join([n, *gone])])


def _by_call(run: EvidenceRun, panel: Panel, regime: Regime) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Headline latencies by series and tokens per rank, and then by what was held while they were taken."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    name_of = names(run.rows)
    for row in run.headline_rows(regime, panel):
        assert row.latency_us is not None
        calls = found.setdefault((name_of(row), row.tokens_per_rank), {})
        calls.setdefault(row.allocation_id, []).append(row.latency_us)
    return found


def _lead(times: Mapping[str, Mapping[str, list[float]]]) -> tuple[tuple[str, Calls], tuple[str, Calls]] | None:
    """The fastest of the others and that of ours which is furthest ahead of it, ours first, with the times of those
    calls in which both were measured; None if no two were."""
    best: dict[str, tuple[float, tuple[tuple[str, Calls], tuple[str, Calls]]]] = {}
    for other in (name for name in times if not name.startswith(OURS)):
        for mine in (name for name in times if name.startswith(OURS)):
            shared = sorted(times[mine].keys() & times[other].keys())
            if not shared:
                continue
            ours, theirs = ([own[call] for call in shared] for own in (times[mine], times[other]))
            ratio = _middle(theirs, ours)
            if other not in best or ratio > best[other][0]:
                best[other] = ratio, ((mine, ours), (other, theirs))
    return min(best.values(), key=lambda found: found[0])[1] if best else None


def _middle(above: Calls, below: Calls) -> float:
    """The median over calls of the ratio of medians within each."""
    return median([median(one) / median(other) for one, other in zip(above, below, strict=True)])


def _ratio(above: Calls, below: Calls) -> str:
    """Of medians within a call, and between the ends of both ranges within one. Where it is so close to 1 that two
    decimals would not say who is ahead, it has three."""
    pairs = list(zip(above, below, strict=True))
    low, high = min(min(a) / max(b) for a, b in pairs), max(max(a) / min(b) for a, b in pairs)
    middle = _middle(above, below)
    digits = 3 if middle < CLOSE else 2
    return f"{middle:.{digits}f} [{low:.{digits}f}..{high:.{digits}f}]"
