"""What the documents say of a committed run in which kernels of this repository stand beside others, as Markdown."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from epcross.harness.analysis.captions import repeats, span
from epcross.harness.analysis.crossover import MARGIN, State, find
from epcross.harness.analysis.evidence_run import OURS, TIMED, EvidenceRun, Panel, names
from epcross.harness.analysis.frame import NO_WEIGHTS, load
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import HEADLINES, Regime, Status

_MISSING = "-"
_NO_CALL = "the two were never measured in one call"
_REASONS = 3  # of a backend's points, in a status
_UNTOLD = "cannot be told"
_NEXT_LINE = " | "  # of what a process wrote before it ended


def medians(run: EvidenceRun) -> str:
    """A table for each panel and regime, a line for each series; of how much; then why others have none."""
    tables, series, places = [], run.series(), []
    for panel in run.panels():
        for regime in TIMED:
            times = run.times_us(regime, panel)
            if not times:
                continue
            places += run.shown(regime, panel).values()
            tokens = sorted({each for _, each in times})
            labels = {name: label for name, (label, _) in series.items() if any(own == name for own, _ in times)}
            lines = [
                f"| {run.words(panel)}, {regime}: median (us) at tokens per rank | {' | '.join(map(str, tokens))} |",
                f"| :--- |{' ---: |' * len(tokens)}",
            ]
            for name, label in labels.items():
                cells = [microseconds(median(times[name, at])) if (name, at) in times else _MISSING for at in tokens]
                lines.append(f"| {label} | {' | '.join(cells)} |")
            tables.append("\n".join(lines))
    return "\n\n".join([*tables, f"Each median is of {repeats(places)}.", *_reasons(run)])


def leads(run: EvidenceRun) -> str:
    """The better of ours beside the best of the others at each number of tokens, in steady state. Ratios are of times
    of one call: a run that went on later, on the same GPUs, found them at other clocks."""
    tables, series, counts = [], run.series(), []
    for panel in run.panels():
        times = _by_call(run, panel)
        lines = [
            f"| tokens per rank, {run.words(panel)}, steady | ours (us) | best other (us) | other / ours |",
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
    if not tables:
        return "nothing of ours stands beside another backend"
    n = f"Each median is of n = {span(counts)} repeats, of calls in which both were measured."
    return "\n\n".join([*tables, n])


def crossings(run: EvidenceRun) -> str:
    """At how many tokens per rank each of ours and each other backend change the lead, by `crossover.find`; others of
    which the same is said share a line. Expert weights of another format are set beside ours only where a backend has
    none of the same, and the line says so."""
    told = _crossings(run)
    if told and len({outcome for *_, outcome in told}) == 1 and told[0][-1].startswith(_UNTOLD):
        return f"Whether any lead changes {told[0][-1]}."
    others: dict[tuple[str, str, str], list[str]] = {}
    for mine, other, where, outcome in told:
        others.setdefault((mine, where, outcome), []).append(other)
    lines = [
        f"| ours | other | where | the lead changes at (tokens per rank), {MARGIN:.0%} counting as equal |",
        "| :--- | :--- | :--- | :--- |",
    ]
    lines += [f"| {mine} | {'; '.join(each)} | {where} | {words} |" for (mine, where, words), each in others.items()]
    return "\n".join(lines)


def _crossings(run: EvidenceRun) -> list[tuple[str, str, str, str]]:
    """Ours, the other, where, and what `find` says of the two."""
    frame = load(run.folder)
    frame = frame[(frame["run_id"] == run.run.run_id) & frame["phase"].isin(HEADLINES) & frame["regime"].isin(TIMED)]
    labels = {name: label for name, (label, _) in run.series().items()}
    subjects = {panel: _subjects(run, panel) for panel in run.panels()}
    told = []
    for panel, here in subjects.items():
        for mine in (name for name in labels if name.startswith(OURS) and name in here):
            for other in (name for name in labels if not name.startswith(OURS)):
                there = _panel_of(other, panel, subjects)
                if there is None:
                    continue
                pair = here[mine], subjects[there][other]
                rows = _of_shared_calls(_rows(frame, panel, pair[0]), _rows(frame, there, pair[1]))
                spoken = dict(zip(map(_name, pair), (labels[mine], labels[other]), strict=True))
                where = run.words(panel) + (f", against {there.weight_format} weights" if there != panel else "")
                if rows.empty:
                    told.append((labels[mine], labels[other], where, f"{_UNTOLD}: {_NO_CALL}"))
                    continue
                told += [
                    (labels[mine], labels[other], f"{where}, {line['regime']}", crossing(line, spoken))
                    for line in find(rows, *pair, mixed_formats=there != panel).to_dict("records")
                ]
    return told


def crossing(line: Mapping[str, Any], spoken: Mapping[str, str]) -> str:
    """One line of `crossover.find`, in words."""

    def called(name: str) -> str:
        return spoken.get(name, name)

    within = f"{line['tokens_low']} to {line['tokens_high']}"
    if line["reason"]:
        return f"{_UNTOLD}: {line['reason']}"
    if line["state"] == State.NONE_IN_RANGE:
        leader = line["faster_below"] if line["faster_below"] != "equal" else line["faster_above"]
        if leader == "equal":
            return f"never, equal from {within}"
        span = f"{line['leads_from']:.0f} to {line['leads_to']:.0f}"
        where = "" if span == within else f" at {span}, equal elsewhere"
        return f"never from {within}: {called(leader)} leads{where}"
    ends = [f"{end:.0f}" if 0 < end < math.inf else "outside the range" for end in (line["low"], line["high"])]
    words = "several times, around" if line["state"] == State.MULTIPLE else "at"
    return (
        f"{words} {line['estimate']:.0f} [{ends[0]}..{ends[1]}]: {called(line['faster_below'])} below,"
        f" {called(line['faster_above'])} above"
    )


def again(run: EvidenceRun) -> str:
    """How far medians of one series differ from one start of its processes to the next: what no comparison can see.
    Says of how many series, starts and repeats, since those that were started once have no part in it."""
    by_launch: dict[tuple[Any, ...], dict[tuple[str, int], list[float]]] = {}
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
    return (
        f"{len(labels)} of the {len(series)} series ({'; '.join(labels)}) have points with more than one start: the"
        f" first and the last of {starts} starts, compared at {len(compared)} points by the medians of n = {n} repeats"
        f" each, differ by more than {MARGIN:.0%} at {sum(share > MARGIN for share in apart.values())}; half of them by"
        f" less than {median(list(apart.values())):.1%}, and the largest is {apart[worst]:.1%}"
        f" ({series[worst[0]][0]}, {worst[1]}, {worst[2]}, {worst[3]} tokens per rank){once}"
    )


Calls = list[list[float]]
"""Times of one series, of each call in which it was measured beside another."""


def _by_call(run: EvidenceRun, panel: Panel) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Steady headline latencies by series and tokens per rank, and then by what was held while they were taken."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    name_of = names(run.rows)
    for row in run.headline_rows(Regime.STEADY, panel):
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
    """Of medians within a call, and between the ends of both ranges within one."""
    pairs = list(zip(above, below, strict=True))
    low, high = min(min(a) / max(b) for a, b in pairs), max(max(a) / min(b) for a, b in pairs)
    return f"{_middle(above, below):.2f} [{low:.2f}..{high:.2f}]"


def _of_shared_calls(mine: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The rows of both whose point the other was measured at in the same call, too."""
    keys = ["regime", "tokens_per_rank", "allocation_id"]
    shared = pd.MultiIndex.from_frame(mine[keys]).intersection(pd.MultiIndex.from_frame(other[keys]))
    return pd.concat([own[pd.MultiIndex.from_frame(own[keys]).isin(shared)] for own in (mine, other)])


def _reasons(run: EvidenceRun) -> list[str]:
    """A sentence for each backend that has points without a number: how many, by status, with the commonest reasons."""
    points: dict[str, dict[str, dict[str, str]]] = {}
    for row in sorted(run.rows, key=lambda row: (row.tokens_per_rank, row.dispatch_format)):
        if row.phase in HEADLINES and row.regime in TIMED and row.status != Status.OK:
            reason = (row.reason or "no reason given").split(_NEXT_LINE)[0]  # the rest is in the rows
            points.setdefault(row.backend, {}).setdefault(row.status, {})[row.point_id] = reason
    sentences = []
    for backend in (name for name in run.backends if name in points):
        words = []
        for status, each in sorted(points[backend].items()):
            told = Counter(each.values()).most_common(_REASONS)
            words += [f"{_points(count)} {status} ({reason})" for reason, count in told]
            if rest := len(each) - sum(count for _, count in told):
                words.append(f"{_points(rest)} {status} for other reasons")
        sentences.append(f"{run.backends[backend]['label']}: {'; '.join(words)}.")
    return sentences


def _points(count: int) -> str:
    return f"{count} {'point' if count == 1 else 'points'}"


def _subjects(run: EvidenceRun, panel: Panel) -> dict[str, dict[str, str]]:
    """Series of a panel, as `crossover.find` takes them."""
    name_of = names(run.rows)
    rows = [row for row in run.headline_rows(panel=panel) if row.run_id == run.run.run_id and row.regime in TIMED]
    return {name_of(row): _subject(row) for row in rows}


def _panel_of(name: str, panel: Panel, subjects: Mapping[Panel, Mapping[str, object]]) -> Panel | None:
    """Where a series has rows to be held against those of `panel`: there, or with other expert weights."""
    if name in subjects[panel]:
        return panel
    alike = (each for each in subjects if each._replace(weight_format=panel.weight_format) == panel)
    return next((each for each in alike if name in subjects[each]), None)


def _rows(frame: pd.DataFrame, panel: Panel, subject: Mapping[str, str]) -> pd.DataFrame:
    """Those of one series in one panel."""
    wanted = {**panel._asdict(), "weight_format": panel.weight_format or NO_WEIGHTS, **subject}
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    return frame


def _subject(row: Record) -> dict[str, str]:
    stage = {"compute": row.compute, "compute_options": row.compute_options or "{}"} if row.compute else {}
    return {"backend": row.backend, "options": row.options, **stage}


def _name(subject: Mapping[str, str]) -> str:
    return " ".join(subject.values())
