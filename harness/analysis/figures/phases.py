"""Where the time of one pair goes when it is timed from a common start: dispatch, combine, and what is left."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from epcross.harness.analysis.cells import Cell, headline_flags
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_bars
from epcross.harness.analysis.figures.scene import Scene, by_series, entry
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import Phase, Regime, Status

NAME, TITLE = "phases", "Share of phases"

_COLORS = {"dispatch": "#0b5394", "combine": "#f1a340", "rest": "#d9d9d9"}


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each EP size and series, one bar for each number of tokens."""
    entries = [cell for cell in scene.headline if cell.regime == Regime.ENTRY]
    spans = _spans(scene)
    shares = [(cell, share) for cell in entries if (share := _shares(_whole(cell, spans), spans)) is not None]
    if not shares:
        reason = "it needs dispatch, combine and round trip of the same repeat, ok and without flags, in regime entry"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    known = {id(cell): share for cell, share in shares}
    panels = {
        (ep_size, series): points
        for ep_size in sorted({cell.ep_size for cell, _ in shares})
        for series, points in by_series([cell for cell, _ in shares if cell.ep_size == ep_size]).items()
    }
    titles = {key: f"{scene.styles[key[1]].label}, EP {key[0]}" for key in panels}
    canvas = Canvas(list(titles.values()), columns=3, height=0.85, width=0.72)
    data: list[dict[str, Any]] = []
    beyond = False
    for key, points in panels.items():
        panel = titles[key]
        ax = canvas.panels[panel]
        x = range(len(points))
        bottom = [0.0] * len(points)
        for phase, color in _COLORS.items():
            heights = [max(known[id(point)][phase], 0.0) for point in points]
            bars = ax.bar(x, heights, bottom=bottom, color=color, width=0.75, linewidth=0.5, edgecolor="white")
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
            for point, bar in zip(points, bars, strict=True):
                canvas.mark(panel, f"{phase}/{point.tokens}", bar)
                line = entry(scene, panel, point, phase=phase, share_percent=known[id(point)][phase])
                data.append({**line, "key": f"{phase}/{point.tokens}"})
            canvas.explain(phase, bars[0])
        beyond = beyond or any(known[id(point)]["rest"] < 0 for point in points)
        ax.axhline(100, color="#000000", linewidth=0.8)
        ax.set_ylim(0, max(105, 1.03 * max(bottom)))
        token_bars(ax, [point.tokens for point in points])
    canvas.y_label("share of round trip (%)")
    sentences = [
        "median over repeats of each phase's share of the round trip of the same repeat; rest: what neither covers, "
        "such as identity experts; a diagnostic: waiting moves between dispatch and combine"
    ]
    if beyond:
        sentences.append("above 100 %: each phase is the maximum over ranks, and not the same rank is slowest in both")
    used = [row for cell, _ in shares for row in _whole(cell, spans)]
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=scene.caption(*sentences, rows=used), data=data)


Spans = dict[tuple[str, str, int], dict[str, Record]]


def _spans(scene: Scene) -> Spans:
    """The ok rows without flags of dispatch and combine: (run_id, point_id, repeat) -> phase -> row."""
    spans: Spans = defaultdict(dict)
    for row in scene.material.records:
        phase = row.phase in (Phase.DISPATCH, Phase.COMBINE)
        if phase and row.regime == Regime.ENTRY and row.status == Status.OK and not headline_flags(row):
            spans[row.run_id, row.point_id, row.repeat][row.phase] = row
    return spans


def _whole(cell: Cell, spans: Spans) -> list[Record]:
    """The shown rows of `cell` of whose repeat both phases have a time, too."""
    return [
        row
        for row in cell.shown
        if row.latency_us and all(part and part.latency_us for part in _parts(row, spans).values())
    ]


def _parts(row: Record, spans: Spans) -> dict[Phase, Record | None]:
    found = spans.get((row.run_id, row.point_id, row.repeat), {})
    return {phase: found.get(phase) for phase in (Phase.DISPATCH, Phase.COMBINE)}


def _shares(rows: Sequence[Record], spans: Spans) -> dict[str, float] | None:
    """Percent of the round trip that dispatch, combine and the rest take; None without `rows` that have all three."""
    dispatch, combine = [], []
    for row in rows:
        for part, shares in zip(_parts(row, spans).values(), (dispatch, combine), strict=True):
            if part and part.latency_us and row.latency_us:
                shares.append(100 * part.latency_us / row.latency_us)
    if not dispatch:
        return None
    shares = {"dispatch": median(dispatch), "combine": median(combine)}
    return {**shares, "rest": 100 - sum(shares.values())}
