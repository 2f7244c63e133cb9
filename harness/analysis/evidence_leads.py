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

PAIRED = (
    "Ratios are within one launch and seed, and so of the same routing: their median, and from the lowest end of any to"
    " the highest."
)
"""Below tables of ratios."""

Turn = tuple[str, int, int]
"""What is held, launch and seed: within one, two series have the same routing, and have run minutes apart at most."""

Turns = list[list[float]]
"""Times of one series, of each turn in which it was measured beside another."""

Timed = tuple[str, Turns]
"""A series, and its times."""


def leads(run: EvidenceRun) -> str:
    """The better of ours beside the best of the others at each number of tokens, a table for each panel and regime.
    Ratios are of times of one turn: a later launch finds GPUs at other clocks, and another seed has other routing."""
    tables: dict[tuple[Panel, Regime], list[str]] = {}
    series, counts = run.series(), []
    for panel, regime, tokens, lead in leaders(run):
        heads = [
            f"| tokens per rank, {run.words(panel)}, {regime} | ours (us) | best other (us) | other / ours |",
            "| ---: | ---: | ---: | ---: |",
        ]
        spoken = [
            f"{series[name][0]} {microseconds(median([us for turn in turns for us in turn]))}" for name, turns in lead
        ]
        counts += [sum(map(len, turns)) for _, turns in lead]
        line = f"| {tokens} | {' | '.join(spoken)} | {ratio_of(lead[1][1], lead[0][1])} |"
        tables.setdefault((panel, regime), heads).append(line)
    gone = [f"Left out as withdrawn: {words}."] if (words := withdrawn(run)) else []
    if not tables:
        return " ".join(["nothing of ours stands beside another backend" + "." * bool(gone), *gone])
    n = f"Each median is of n = {span(counts)} repeats. {PAIRED}"
    return "\n\n".join([*map("\n".join, tables.values()), " ".join([n, *gone])])


def leaders(run: EvidenceRun) -> Iterator[tuple[Panel, Regime, int, tuple[Timed, Timed]]]:
    """Panel, regime and tokens per rank, and who is told to lead there: ours and the best other, with their times."""
    for panel, regime in itertools.product(run.panels(), TIMED):
        times = by_turn(run, panel, regime)
        for tokens in sorted({each for _, each in times}):
            if lead := _lead({name: turns for (name, at), turns in times.items() if at == tokens}):
                yield panel, regime, tokens, lead


def by_turn(run: EvidenceRun, panel: Panel, regime: Regime) -> dict[tuple[str, int], dict[Turn, list[float]]]:
    """Headline latencies by series and tokens per rank, and then by turn."""
    found: dict[tuple[str, int], dict[Turn, list[float]]] = {}
    name_of = names(run.rows)
    for row in run.headline_rows(regime, panel):
        assert row.latency_us is not None
        turns = found.setdefault((name_of(row), row.tokens_per_rank), {})
        turns.setdefault((row.allocation_id, row.launch, row.seed), []).append(row.latency_us)
    return found


def _lead(times: Mapping[str, Mapping[Turn, list[float]]]) -> tuple[Timed, Timed] | None:
    """The fastest of the others and that of ours which is furthest ahead of it, ours first, with the times of those
    turns in which both were measured; None if no two were."""
    best: dict[str, tuple[float, tuple[Timed, Timed]]] = {}
    for other in (name for name in times if not name.startswith(OURS)):
        for mine in (name for name in times if name.startswith(OURS)):
            ours, theirs = in_shared_turns(times[mine], times[other])
            if not ours:
                continue
            ratio = middle(theirs, ours)
            if other not in best or ratio > best[other][0]:
                best[other] = ratio, ((mine, ours), (other, theirs))
    return min(best.values(), key=lambda found: found[0])[1] if best else None


def in_shared_turns(one: Mapping[Turn, list[float]], other: Mapping[Turn, list[float]]) -> tuple[Turns, Turns]:
    """The times of both, of the turns in which both were measured."""
    shared = sorted(one.keys() & other.keys())
    return [one[turn] for turn in shared], [other[turn] for turn in shared]


def middle(above: Turns, below: Turns) -> float:
    """The median over turns of the ratio of medians within each."""
    return median([median(one) / median(other) for one, other in zip(above, below, strict=True)])


def ratio_of(above: Turns, below: Turns) -> str:
    """Of medians within a turn, and between the ends of both ranges within one. Where it is so close to 1 that two
    decimals would not say who is ahead, it has three."""
    pairs = list(zip(above, below, strict=True))
    low, high = min(min(a) / max(b) for a, b in pairs), max(max(a) / min(b) for a, b in pairs)
    ratio = middle(above, below)
    digits = digits_of(ratio)
    return f"{ratio:.{digits}f} [{low:.{digits}f}..{high:.{digits}f}]"


def digits_of(ratio: float) -> int:
    """Decimals with which a ratio is told."""
    return 3 if ratio < CLOSE else 2
