"""What the documents say of who is ahead: the better of ours beside the best of the others, as Markdown."""

import itertools
from collections.abc import Iterator, Mapping

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

Timed = tuple[str, Calls]
"""A series, and its times."""


def leads(run: EvidenceRun) -> str:
    """The better of ours beside the best of the others at each number of tokens, a table for each panel and regime.
    Ratios are of times of one call: a run that went on later, on the same GPUs, found them at other clocks."""
    tables: dict[tuple[Panel, Regime], list[str]] = {}
    series, counts = run.series(), []
    for panel, regime, tokens, lead in leaders(run):
        heads = [
            f"| tokens per rank, {run.words(panel)}, {regime} | ours (us) | best other (us) | other / ours |",
            "| ---: | ---: | ---: | ---: |",
        ]
        spoken = [
            f"{series[name][0]} {microseconds(median([us for call in calls for us in call]))}" for name, calls in lead
        ]
        counts += [sum(map(len, calls)) for _, calls in lead]
        line = f"| {tokens} | {' | '.join(spoken)} | {_ratio(lead[1][1], lead[0][1])} |"
        tables.setdefault((panel, regime), heads).append(line)
    gone = [f"Left out as withdrawn: {words}."] if (words := withdrawn(run)) else []
    if not tables:
        return " ".join(["nothing of ours stands beside another backend" + "." * bool(gone), *gone])
    n = f"Each median is of n = {span(counts)} repeats, of calls in which both were measured."
    return "\n\n".join([*map("\n".join, tables.values()), " ".join([n, *gone])])


def leaders(run: EvidenceRun) -> Iterator[tuple[Panel, Regime, int, tuple[Timed, Timed]]]:
    """Panel, regime and tokens per rank, and who is told to lead there: ours and the best other, with their times."""
    for panel, regime in itertools.product(run.panels(), TIMED):
        times = by_call(run, panel, regime)
        for tokens in sorted({each for _, each in times}):
            if lead := _lead({name: calls for (name, at), calls in times.items() if at == tokens}):
                yield panel, regime, tokens, lead


def by_call(run: EvidenceRun, panel: Panel, regime: Regime) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Headline latencies by series and tokens per rank, and then by what was held while they were taken."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    name_of = names(run.rows)
    for row in run.headline_rows(regime, panel):
        assert row.latency_us is not None
        calls = found.setdefault((name_of(row), row.tokens_per_rank), {})
        calls.setdefault(row.allocation_id, []).append(row.latency_us)
    return found


def _lead(times: Mapping[str, Mapping[str, list[float]]]) -> tuple[Timed, Timed] | None:
    """The fastest of the others and that of ours which is furthest ahead of it, ours first, with the times of those
    calls in which both were measured; None if no two were."""
    best: dict[str, tuple[float, tuple[Timed, Timed]]] = {}
    for other in (name for name in times if not name.startswith(OURS)):
        for mine in (name for name in times if name.startswith(OURS)):
            ours, theirs = in_shared_calls(times[mine], times[other])
            if not ours:
                continue
            ratio = middle(theirs, ours)
            if other not in best or ratio > best[other][0]:
                best[other] = ratio, ((mine, ours), (other, theirs))
    return min(best.values(), key=lambda found: found[0])[1] if best else None


def in_shared_calls(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> tuple[Calls, Calls]:
    """The times of both, of the calls in which both were measured."""
    shared = sorted(one.keys() & other.keys())
    return [one[call] for call in shared], [other[call] for call in shared]


def middle(above: Calls, below: Calls) -> float:
    """The median over calls of the ratio of medians within each."""
    return median([median(one) / median(other) for one, other in zip(above, below, strict=True)])


def _ratio(above: Calls, below: Calls) -> str:
    """Of medians within a call, and between the ends of both ranges within one. Where it is so close to 1 that two
    decimals would not say who is ahead, it has three."""
    pairs = list(zip(above, below, strict=True))
    low, high = min(min(a) / max(b) for a, b in pairs), max(max(a) / min(b) for a, b in pairs)
    ratio = middle(above, below)
    digits = digits_of(ratio)
    return f"{ratio:.{digits}f} [{low:.{digits}f}..{high:.{digits}f}]"


def digits_of(ratio: float) -> int:
    """Decimals with which a ratio is told."""
    return 3 if ratio < CLOSE else 2
