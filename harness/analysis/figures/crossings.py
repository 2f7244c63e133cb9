"""Where one series overtakes another, for every pair and EP size: who leads on either side, and how sure that is."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from epcross.harness.analysis.crossover import MARGIN, State, ends_of
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_axis
from epcross.harness.analysis.figures.scene import Scene, entry, shown_rows
from epcross.harness.analysis.rivals import Rivals, rivals
from epcross.harness.analysis.style import text_color

NAME, TITLE = "crossings", "Where one overtakes another"

_EQUAL, _UNKNOWN = "#c8c8c8", "#ffffff"
_CROSSING = "x"  # no series has it
_HALF = 0.3  # of a strip's height
_SCREEN = 16  # so many strips fit a screen; with more the scale stands at the top, too
_BEYOND = 1.12  # by this factor a strip or part goes beyond its outermost token counts


def draw(scene: Scene, of: Collection[str] = ()) -> Figure | Omitted:
    """One panel for each regime and run, one strip over tokens per rank for each pair and EP size.

    Args:
        of: backends that are set against all others, and these not among themselves; empty: every pair.
    """
    found = rivals(scene, of)
    if not found:
        reason = "it needs two series of one run, EP size and regime whose rows are ok and without flags"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    panels: dict[str, list[Rivals]] = {}
    for pair in found:
        panels.setdefault(_panel(scene, pair), []).append(pair)
    names = sorted(panels, key=lambda name: not name.startswith("steady"))
    # one pair after the other, each over EP, and the first on top
    found = sorted(found, key=lambda pair: (*_order(pair, of), pair.ep_size))
    strips = list(dict.fromkeys(_strip(pair) for pair in found))[::-1]
    canvas = Canvas(names, height=0.3 + 0.11 * len(strips), width=1.0 if len(names) > 1 else 1.6)
    data: list[dict[str, Any]] = []
    for column, name in enumerate(names):
        ax = canvas.panels[name]
        for pair in panels[name]:
            _draw_strip(scene, canvas, name, pair, strips.index(_strip(pair)))
            numbers = (
                "state", "reason", "estimate", "low", "high", "faster_below", "faster_above", "leads_from", "leads_to",
                "a_leads", "b_leads", "medians_lead", "agreement",
            )  # fmt: skip
            line = entry(scene, name, pair.points[0], second=pair.second.name, **{n: pair.line[n] for n in numbers})
            data.append({**line, "key": _strip(pair), "tokens_per_rank": None})
        token_axis(ax, sorted({point.tokens for pair in panels[name] for point in pair.points}))
        ax.set_ylim(-0.6, len(strips) - 0.4)
        ax.set_yticks(range(len(strips)), [name.replace(" or ", "\nor ") for name in strips] if column % 2 == 0 else [])
        ax.grid(visible=False, axis="y")
        if len(strips) > _SCREEN:
            ax.tick_params(axis="x", top=True, labeltop=True)
    sentence = (
        "colour and marker: the series whose median is lower there, beyond the margin of "
        f"{MARGIN:.0%} and by the 95 % interval over resampled launches, seeds and chains; grey: neither, beyond the "
        "last batch that one leads; cross and bar: tokens at "
        "which the ratio of the medians crosses 1, and their interval, with an arrow where it leaves the range "
        "measured; white: the launches at hand do not tell"
    )
    used = {id(cell): cell for pair in found for cell in pair.points}
    caption = scene.caption(sentence, rows=shown_rows(list(used.values())))
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=caption, data=data)


def _order(pair: Rivals, of: Collection[str]) -> tuple[str, str]:
    """The names of a pair, one of the backends `of` first."""
    names = pair.line["a"], pair.line["b"]
    return names if pair.first.backend in of or pair.second.backend not in of else names[::-1]


def _panel(scene: Scene, pair: Rivals) -> str:
    run = f", run {scene.styles.runs[pair.run_id]}" if scene.several_runs else ""
    return f"{pair.regime}{run}"


def _strip(pair: Rivals) -> str:
    return f"{pair.line['a']} or {pair.line['b']}, EP {pair.ep_size}"


def _draw_strip(scene: Scene, canvas: Canvas, panel: str, pair: Rivals, y: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    ax, line = canvas.panels[panel], pair.line
    first, last = line["tokens_low"] / _BEYOND, line["tokens_high"] * _BEYOND
    frame = Rectangle(
        (first, y - _HALF), last - first, 2 * _HALF, facecolor=_UNKNOWN, edgecolor="#888888", linewidth=0.7
    )
    ax.add_patch(frame)
    canvas.mark(panel, _strip(pair), frame)
    styles = {scene.styles[one].name: scene.styles[one] for one in (pair.first, pair.second)}
    for left, right, leader in _parts(line, first, last):
        style = styles.get(leader)
        color = style.color if style else _EQUAL
        ax.add_patch(Rectangle((left, y - _HALF), right - left, 2 * _HALF, facecolor=color, linewidth=0))
        swatch = Patch(facecolor=color)
        if style is None:
            canvas.explain("equal", swatch)
            continue
        ink = text_color(color)
        ax.plot((left * right) ** 0.5, y, marker=style.marker, color=ink, markersize=4.5, linestyle="")
        sign = Line2D([], [], marker=style.marker, color=ink, markersize=3.5, linestyle="")
        canvas.explain(f"{leader} leads", (swatch, sign))
    if not pair.called:
        canvas.explain("cannot be told", Patch(facecolor=_UNKNOWN, edgecolor="#888888", linewidth=0.7))
    if pair.estimate is None:
        return
    low, high = max(line["low"], first), min(line["high"], last)
    ax.plot([low, high], [y, y], color="#000000", linewidth=1.0, solid_capstyle="butt")
    for end, inside, sign in ((low, line["low"] >= first, "<"), (high, line["high"] <= last, ">")):
        ax.plot(end, y, marker="|" if inside else sign, color="#000000", markersize=5, linestyle="")
    ax.plot(pair.estimate, y, marker=_CROSSING, color="#000000", markersize=5.5, markeredgewidth=1.4, linestyle="")
    sign = Line2D([], [], marker=_CROSSING, color="#000000", markersize=5.5, markeredgewidth=1.4, linewidth=1.0)
    canvas.explain("crossing, 95 % interval", sign)


def _parts(line: Any, first: float, last: float) -> Sequence[tuple[float, float, str]]:
    """What may be coloured: (from, to, who leads); nothing inside the interval of a crossing."""
    below, above = line["faster_below"], line["faster_above"]
    if line["state"] == State.NONE_IN_RANGE:
        return _led(line, first, last)
    if line["state"] not in (State.CROSSED, State.MULTIPLE):
        return _sure(line)
    low, high = max(line["low"], first), min(line["high"], last)
    return [part for part in ((first, low, below), (high, last, above)) if part[0] < part[1]]


def _sure(line: Any) -> Sequence[tuple[float, float, str]]:
    """The parts of a strip of which a lead is sure, though it is not how often the lead changes."""
    return [
        (low / _BEYOND, high * _BEYOND, line[side])
        for side in ("a", "b")
        for low, high in ends_of(line[f"{side}_leads"])
    ]


def _led(line: Any, first: float, last: float) -> Sequence[tuple[float, float, str]]:
    """The parts of a strip without a crossing: one lead, and no lead on either side of it."""
    leader = next((side for side in (line["faster_below"], line["faster_above"]) if side != "equal"), "equal")
    if math.isnan(line["leads_from"]):
        return [(first, last, "equal")]
    low = first if line["leads_from"] == line["tokens_low"] else line["leads_from"]
    high = last if line["leads_to"] == line["tokens_high"] else line["leads_to"]
    parts = ((first, low, "equal"), (low, high, leader), (high, last, "equal"))
    return [part for part in parts if part[0] < part[1]]
