"""A comparison of two runs as a terminal shows it, in at most `WIDTH` columns."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from epcross.harness.analysis.compare import DECIDED, Verdict, described, exit_code
from epcross.harness.analysis.factors import shared, varying
from epcross.harness.analysis.table import WIDTH, Footnotes, microseconds
from epcross.harness.measuring.stats import MIN_LAUNCHES, MIN_TRIALS

_STYLES = {Verdict.SLOWER: "red", Verdict.FASTER: "green", Verdict.UNCLEAR: "yellow"}


def compare_table(
    compared: pd.DataFrame, frame_a: pd.DataFrame, frame_b: pd.DataFrame, *, shown: int = 40
) -> RenderableType:
    """The first `shown` lines of what `compare` returned, its footnotes, and what it comes to."""
    runs = [", ".join(sorted(map(str, rows["run_id"].unique()))) or "no rows" for rows in (frame_a, frame_b)]
    parts: list[RenderableType] = [Text(f"A: {runs[0]}"), Text(f"B: {runs[1]}")]
    footnotes = Footnotes()
    everywhere = _said_by_all(compared)
    lines = compared.head(shown).to_dict("records")
    alike, usual, own = _words(lines, described([frame_a, frame_b])) if lines else ([], [], [])
    regimes, sizes = {line["regime"] for line in lines}, {line["ep_size"] for line in lines}
    alike = [*(f"EP {size}" for size in sizes if len(sizes) == 1), *(regimes if len(regimes) == 1 else ()), *alike]
    parts += [Text(f"all lines: {', '.join(alike)}")] * bool(alike)
    parts += [Text(f"where a line says nothing else: {', '.join(usual)}")] * bool(usual)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column("backend", overflow="fold", max_width=20)
    table.add_column("phase", overflow="fold", max_width=17)
    varied = any(own)
    if varied:
        table.add_column("varied", overflow="fold", ratio=1)
    for name in (*["EP"] * (len(sizes) > 1), "tokens", "A us", "B us", "B / A", "interval"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold", max_width=15)
    for line, factors in zip(lines, own, strict=True):
        words = [line["reason"], "" if line["note"] == everywhere else line["note"]]
        marks = " ".join(footnotes.mark(sentence) for sentence in words if sentence)
        verdict = Verdict(line["verdict"])
        table.add_row(
            Text(line["backend"]),
            Text(line["phase"] if len(regimes) == 1 else f"{line['phase']} {line['regime']}"),
            *([Text(factors)] * varied),
            *[str(line["ep_size"])] * (len(sizes) > 1),
            str(line["tokens_per_rank"]),
            *(_time(line[name]) for name in ("a_us", "b_us")),
            *_ratio(line["ratio"], line["low"], line["high"]),
            Text(f"{verdict} {marks}".strip(), style=_STYLES.get(verdict, "")),
        )
    parts.append(table if len(compared) else Text("Neither run has a point."))
    if len(compared) > shown:
        parts.append(Text(f"... and {len(compared) - shown} more; --json lists all"))
    parts += [Text(line, style="dim") for line in footnotes.lines()]
    parts += [Text(f"at all points {everywhere}")] * bool(everywhere)
    return Constrain(Group(*parts, *(Text(line) for line in _caption(compared))), WIDTH)


def _words(
    lines: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str], list[str]]:
    """What all `lines` share, what most of them have, and what each has besides, of what tells `points` apart."""
    columns = varying(points)
    place = {point["point_id"]: number for number, point in enumerate(points)}
    own: list[list[str]] = [[] for _ in lines]
    alike, usual = shared(points), []
    for words in columns.values():
        here = [words[place[line["point_id"]]] for line in lines]
        (most, count), *others = Counter(here).most_common()
        if not others:
            alike += [most] * bool(most)
            continue
        common = all(here) and 2 * count >= len(here)  # where a line has none, silence would tell nothing
        usual += [most] * common
        for told, word in zip(own, here, strict=True):
            told += [word] * bool(word and not (common and word == most))
    return alike, usual, [", ".join(told) for told in own]


def _caption(compared: pd.DataFrame) -> list[str]:
    lines = []
    decided = compared[compared["verdict"].isin([str(verdict) for verdict in DECIDED])]
    if len(decided):
        least = [int(decided[name].min()) for name in ("launches", "seeds", "chains")]
        lines.append(
            "B / A: ratio of medians [95 % interval, resampled over launches, then seeds, then chains]; "
            f"at least {least[0]} launches x {least[1]} seeds x {least[2]} chains"
        )
        if (decided["interval"] == "range").any():
            lines.append(f"of fewer than {MIN_TRIALS} trials the range is given instead")
        if decided["within_launch"].any():
            lines.append(
                f"within_launch: fewer than {MIN_LAUNCHES} launches; intervals are widened for it, so few verdicts "
                "are possible. Take more launches to decide"
            )
    if not compared["headline"].astype(bool).all():
        lines.append("dispatch and combine alone are diagnostics: shown, not judged, since waiting moves between them")
    if note := compared.attrs.get("note"):
        lines.append(note)
    if exit_code(compared) == 3 and (flags := compared.attrs.get("flags")):
        keep = " ".join(f"--keep {flag}" for flag in flags)
        lines.append(f"flagged rows are used too, with what their flags say against them, by {keep}")
    return [*lines, *_sums(compared)]


def _sums(compared: pd.DataFrame) -> list[str]:
    if compared.empty:
        return ["Nothing could be compared."]
    judged = compared[compared["headline"].astype(bool)]
    counts = judged["verdict"].value_counts()
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in map(str, Verdict) if verdict in counts)
    margin = f"{compared['margin'].iloc[0]:.1%}".replace(".0%", "%").replace("%", " %")
    meaning = {
        0: "no round trip or layer is slower, as far as it can be told",
        1: "slower",
        3: "no round trip or layer could be compared",
    }[exit_code(compared)]
    return [f"round trips and layers at a margin of {margin}: {words or 'none'}", f"Verdict: {meaning}"]


def _time(value_us: float) -> str:
    return "" if math.isnan(value_us) else microseconds(value_us)


def _ratio(ratio: float, low: float, high: float) -> tuple[str, str]:
    if math.isnan(ratio):
        return "", ""
    return _number(ratio), f"{_number(low)}..{_number(high)}"


def _number(ratio: float) -> str:
    """Three digits that matter: 0.0012, 0.98, 1.23, 12.3, 123."""
    if not 0.1 <= ratio < 1e4:
        return f"{ratio:.2g}"
    return f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f}"


def _said_by_all(compared: pd.DataFrame) -> str:
    """The note that all points found in both runs share: said once instead of in each line."""
    notes = set(compared.loc[compared["ratio"].notna(), "note"])
    return notes.pop() if len(notes) == 1 else ""
