"""What the documents say of a committed run in which kernels of this repository stand beside others, as Markdown."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from epcross.harness.analysis.captions import repeats
from epcross.harness.analysis.crossover import MARGIN, State, find
from epcross.harness.analysis.evidence_reasons import reasons
from epcross.harness.analysis.evidence_run import OURS, TIMED, EvidenceRun, Panel, names
from epcross.harness.analysis.frame import NO_WEIGHTS, load
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import HEADLINES

_MISSING = "-"
_NO_CALL = "the two were never measured in one call"
_UNTOLD = "cannot be told"
_NOT_APART = f"not surely more than {MARGIN:.0%} apart"  # equal within the margin, or with an interval that reaches it


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
    return "\n\n".join([*tables, f"Each median is of {repeats(places)}.", *reasons(run)])


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
        sure = [f"{called(line[side])} leads at {spoken_spans(line[f'{side}_leads'])}" for side in _sides(line)]
        return "; ".join([f"{_UNTOLD}: {line['reason']}", *sure, *([f"{_NOT_APART} elsewhere"] if sure else [])])
    if line["state"] == State.NONE_IN_RANGE:
        leader = line["faster_below"] if line["faster_below"] != "equal" else line["faster_above"]
        if leader == "equal":
            return f"never, {_NOT_APART} from {within}"
        span = f"{line['leads_from']:.0f} to {line['leads_to']:.0f}"
        where = "" if span == within else f" at {span}, {_NOT_APART} elsewhere"
        return f"never from {within}: {called(leader)} leads{where}"
    ends = [f"{end:.0f}" if 0 < end < math.inf else "outside the range" for end in (line["low"], line["high"])]
    words = "several times, around" if line["state"] == State.MULTIPLE else "at"
    return (
        f"{words} {line['estimate']:.0f} [{ends[0]}..{ends[1]}]: {called(line['faster_below'])} below,"
        f" {called(line['faster_above'])} above"
    )


def spoken_spans(text: str) -> str:
    """What `crossover.spans` wrote, in words: "1 to 8, 64"."""
    return text.replace(" ", ", ").replace("..", " to ")


def _sides(line: Mapping[str, Any]) -> list[str]:
    return [side for side in ("a", "b") if line[f"{side}_leads"]]


def _of_shared_calls(mine: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The rows of both whose point the other was measured at in the same call, too."""
    keys = ["regime", "tokens_per_rank", "allocation_id"]
    shared = pd.MultiIndex.from_frame(mine[keys]).intersection(pd.MultiIndex.from_frame(other[keys]))
    return pd.concat([own[pd.MultiIndex.from_frame(own[keys]).isin(shared)] for own in (mine, other)])


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
    del wanted["staged"]  # an option of the subject
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    return frame


def _subject(row: Record) -> dict[str, str]:
    stage = {"compute": row.compute, "compute_options": row.compute_options or "{}"} if row.compute else {}
    return {"backend": row.backend, "options": row.options, **stage}


def _name(subject: Mapping[str, str]) -> str:
    return " ".join(subject.values())
