"""Where the spread of the repeats comes from: between launches, between seeds of a launch, between chains of a seed."""

from typing import Any

from epcross.harness.analysis.cells import by_panel
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_bars
from epcross.harness.analysis.figures.scene import Scene, by_series, entry, shown_rows
from epcross.harness.analysis.levels import Levels, levels

NAME, TITLE = "variance", "Variance by level"

_COLORS = {"launch": "#4a3d8f", "seed": "#35a7a0", "chain": "#e8d174"}


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each EP size, regime and series; one bar for each number of tokens, its total above it."""
    known: dict[int, Levels] = {}
    for cell in scene.headline:
        values = {(row.launch, row.seed, row.chain): row.latency_us for row in cell.shown if row.latency_us is not None}
        found = levels(values)
        if found.shares():
            known[id(cell)] = found
    cells = [cell for cell in scene.headline if id(cell) in known]
    if not cells:
        reason = "it needs points with several repeats that are ok, without flags, and not all equal"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    panels = {
        (key, series): points
        for key, found in by_panel(cells, by_run=False).items()
        for series, points in by_series(found).items()
    }
    titles = {key: f"{scene.styles[key[1]].label}\n{scene.panel(*key[0])}" for key in panels}
    canvas = Canvas(list(titles.values()), columns=3, height=0.9, width=0.72)
    data: list[dict[str, Any]] = []
    for key, points in panels.items():
        panel = titles[key]
        ax = canvas.panels[panel]
        turned = token_bars(ax, [point.tokens for point in points])
        for position, point in enumerate(points):
            bottom = 0.0
            for level, share in known[id(point)].shares().items():
                (bar,) = ax.bar(position, share, bottom=bottom, color=_COLORS[level], width=0.75, edgecolor="white")
                bottom += share
                canvas.mark(panel, f"{level}/{point.tokens}", bar)
                canvas.explain(level, bar)
                line = entry(
                    scene,
                    panel,
                    point,
                    level=level,
                    share_percent=share,
                    spread_percent=known[id(point)].spread_percent,
                )
                data.append({**line, "key": f"{level}/{point.tokens}"})
            spread = known[id(point)].spread_percent
            words = f"{spread:.1f}" if spread < 9.95 else f"{spread:.0f}"
            ax.text(position, 103, words, ha="center", va="bottom", fontsize=7, rotation=turned)
        ax.set_ylim(0, 123 if turned else 118)
        ax.set_yticks([0, 25, 50, 75, 100])
    canvas.y_label("share of variance (%)")
    absent = sorted(
        {name for found in known.values() for name in ("launch", "seed", "chain") if getattr(found, name) is None}
    )
    sentences = [
        "variance components of log latency (nested, method of moments, negative ones counted as 0); number above a "
        "bar: standard deviation of one repeat in % of its latency"
    ]
    if absent:
        words = " and ".join(absent)
        sentences.append(f"only one {words} was taken in each group, so that level is not told from the one above it")
    caption = scene.caption(*sentences, rows=shown_rows(cells))
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=caption, data=data)
