"""Who is fastest at each EP size and number of tokens, and by how much."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epcross.harness.analysis.cells import MARGIN, Cell, by_panel
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted
from epcross.harness.analysis.figures.ratio import best_peer, ratio
from epcross.harness.analysis.figures.scene import Scene, entry, shown_rows
from epcross.harness.analysis.style import text_color

NAME, TITLE = "crossover_map", "Who is fastest where"

_BESIDE = 8  # token counts up to which two panels stand side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The fastest series of one place, and how far ahead of the second it is."""

    cell: Cell
    second: Cell
    lead: float  # the second's median over its own, minus 1
    clear: bool  # beyond the margin, and the interval of the ratio is below 1
    objection: str  # why no difference may be called on so little, whatever the lead; empty if one may


def winners(cells: Sequence[Cell]) -> list[Winner]:
    """The winner at each (run, EP size, regime, tokens) where at least two series have headline numbers."""
    found: list[Winner] = []
    for panel in by_panel([cell for cell in cells if cell.headline], by_run=True).values():
        for tokens in sorted({cell.tokens for cell in panel}):
            here = [cell for cell in panel if cell.tokens == tokens]
            first = min(here, key=lambda cell: cell.interval.median_us if cell.interval else 0)
            second = best_peer(first, here)
            if second is None:
                continue
            found_ratio = ratio(first, second)
            lead = 1 / found_ratio.value - 1
            clear = lead > MARGIN and found_ratio.high < 1 and not found_ratio.objection
            found.append(Winner(cell=first, second=second, lead=lead, clear=clear, objection=found_ratio.objection))
    return found


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each regime and run; a cell that is no clear win is pale."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    found = winners(scene.cells)
    if not found:
        reason = "it needs two series of one run, EP size and regime whose rows are ok and without flags"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    panels: dict[str, list[Winner]] = defaultdict(list)
    for winner in found:
        run = f", run {scene.styles.runs[winner.cell.series.run_id]}" if scene.several_runs else ""
        panels[f"{winner.cell.regime}{run}"].append(winner)
    names = sorted(panels, key=lambda name: not name.startswith("steady"))
    tokens = sorted({winner.cell.tokens for winner in found})
    sizes = sorted({winner.cell.ep_size for winner in found})
    canvas = Canvas(
        names,
        columns=2 if len(tokens) <= _BESIDE else 1,
        height=0.25 + 0.16 * len(sizes),
        width=max(1.0, 0.17 + 0.15 * len(tokens)),
    )
    data: list[dict[str, Any]] = []
    for name in names:
        ax = canvas.panels[name]
        for winner in panels[name]:
            style = scene.styles[winner.cell.series]
            x, y = tokens.index(winner.cell.tokens), sizes.index(winner.cell.ep_size)
            face = style.color if winner.clear else _pale(style.color)
            patch = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5)
            ax.add_patch(patch)
            key = f"{winner.cell.ep_size}/{winner.cell.tokens}"
            canvas.mark(name, key, patch)
            ink = text_color(face)
            ax.plot(x, y + 0.17, marker=style.marker, color=ink, markersize=4.5, linestyle="")
            words = f"{winner.lead:+.0%}" if winner.clear else f"({winner.lead:+.0%})"
            ax.text(x, y - 0.2, words, ha="center", va="center", fontsize=7, color=ink)
            sign = Line2D([], [], marker=style.marker, color=text_color(style.color), markersize=3.5, linestyle="")
            canvas.explain(style.name, (Patch(facecolor=style.color), sign))
            line = entry(
                scene, name, winner.cell, second=winner.second.series.name, lead=winner.lead, clear=winner.clear
            )
            data.append({**line, "key": key})
        ax.grid(visible=False)
        ax.set_xlim(-0.5, len(tokens) - 0.5)
        ax.set_ylim(-0.5, len(sizes) - 0.5)
        ax.set_xticks(range(len(tokens)), [str(token) for token in tokens])
        ax.set_yticks(range(len(sizes)), [f"EP {size}" for size in sizes])
        ax.set_xlabel("tokens per rank")
    sentence = (
        "colour and marker: the series with the least median; number: how much longer the second takes; pale and in "
        f"brackets: within {MARGIN:.0%}, or the 95 % interval of the ratio holds 1, or launches are too few, so no "
        "clear winner; white: fewer than two series"
    )
    rows = shown_rows([cell for winner in found for cell in (winner.cell, winner.second)])
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=scene.caption(sentence, rows=rows), data=data)


def _pale(color: str) -> str:
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * 0.35):02x}" for channel in channels)
