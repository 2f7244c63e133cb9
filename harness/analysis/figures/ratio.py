"""How many times as long as its best peer each series takes: below 1 it is the fastest, by that much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epcross.harness.analysis.cells import MARGIN, Cell, by_panel, trials
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_axis
from epcross.harness.analysis.figures.scene import Scene, by_series, entry, shown_rows
from epcross.harness.measuring.stats import IntervalKind

NAME, TITLE = "ratio", "Ratio to the best peer"

_STEPS = (
    (1.6, (1, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 6, 7, 8, 9, 9.5)),
    (4, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)),
    (15, (1, 1.5, 2, 3, 5, 7)),
    (200, (1, 2, 5)),
    (float("inf"), (1,)),
)
"""Up to which ratio of an axis' ends its ticks are these, times powers of ten: enough to read every panel by."""
_BEYOND = 1.8  # how far an axis may go beyond the medians, so that wide intervals do not flatten them


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each EP size, regime and run; rows of two runs are never divided by each other."""
    panels = {key: found for key, found in by_panel(scene.headline, by_run=True).items() if len(by_series(found)) > 1}
    if not panels:
        reason = "it needs two series of one run, EP size and regime whose rows are ok and without flags"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    canvas = Canvas([scene.panel(*key) for key in panels])
    data: list[dict[str, Any]] = []
    cut = False
    for key, found in panels.items():
        panel = scene.panel(*key)
        ax = canvas.panels[panel]
        ax.axhspan(1 / (1 + MARGIN), 1 + MARGIN, color="#000000", alpha=0.10, linewidth=0)
        ax.axhline(1.0, color="#000000", linewidth=0.8)
        middles: list[float] = []
        ends: list[float] = []
        for number, (series, points) in enumerate(by_series(found).items()):
            pairs = [(point, peer) for point in points if (peer := best_peer(point, found)) is not None]
            if not pairs:
                continue
            style = scene.styles[series]
            x = [point.tokens for point, _ in pairs]
            ratios = [ratio(point, peer) for point, peer in pairs]
            canvas.line(panel, scene.key(series), x, [one.value for one in ratios], style)
            beside = 1.04 ** (number - (len(by_series(found)) - 1) / 2)  # so that bars do not hide each other
            for tokens, one in zip(x, ratios, strict=True):
                ax.plot([tokens * beside] * 2, [one.low, one.high], color=style.color, linewidth=1.1, alpha=0.75)
            middles += [one.value for one in ratios]
            ends += [end for one in ratios for end in (one.low, one.high)]
            for (point, peer), one in zip(pairs, ratios, strict=True):
                numbers = {"best_peer": peer.series.name, "ratio": one.value, "low": one.low, "high": one.high}
                data.append(entry(scene, panel, point, **numbers))
        token_axis(ax, (point.tokens for point in found))
        cut = _ratio_axis(ax, middles, ends) or cut
    canvas.y_label("time over best peer (ratio)")
    sentence = (
        "median over the least median of the other series at the same tokens, in the same run; bars: 95 % interval "
        f"(launches, seeds and chains resampled, widened for few launches); grey: within the margin of {MARGIN:.0%}"
    )
    if cut:
        sentence += "; bars that reach the frame go on beyond it, and the figure's CSV file has their ends"
    used = [cell for found in panels.values() for cell in found if best_peer(cell, found) is not None]
    caption = scene.caption(sentence, rows=shown_rows(used))
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=caption, data=data)


def best_peer(cell: Cell, found: Sequence[Cell]) -> Cell | None:
    """The fastest other series at the tokens of `cell`; None if there is none."""
    peers = [peer for peer in found if peer.tokens == cell.tokens and peer.series != cell.series and peer.interval]
    return min(peers, key=lambda peer: peer.interval.median_us if peer.interval else 0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of one cell over that of another, with its 95 % interval."""

    value: float
    low: float
    high: float
    objection: str  # why no difference may be called on so little; empty if one may


def ratio(cell: Cell, peer: Cell) -> Ratio:
    """Cell over peer, both with numbers; launches and seeds that they share are drawn together (see `resample`)."""
    from epcross.harness.analysis import resample

    both = [trials(cell.shown), trials(peer.shown)]
    base = resample.support(both)
    own, other = (one.medians_us() for one in both)
    drawn_own, drawn_other = resample.resampled_medians(both)
    drawn = drawn_own / drawn_other
    if base.kind is IntervalKind.BOOTSTRAP:
        drawn = resample.widened(own / other, drawn, base.launches)
    low, high = resample.ends(drawn[0], base.kind)
    return Ratio(value=float(own[0] / other[0]), low=low, high=high, objection=base.objection)


def _ratio_axis(ax: Any, middles: Sequence[float], ends: Sequence[float]) -> bool:
    """Set a logarithmic axis that shows the medians well; whether ends of intervals lie outside it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_yscale("log")
    low = max(min([*middles, 1]) / _BEYOND, min([*ends, 1]) / 1.1)
    high = min(max([*middles, 1]) * _BEYOND, max([*ends, 1]) * 1.1)
    ax.set_ylim(low, high)
    span = high / low
    steps = next(steps for below, steps in _STEPS if span < below)
    ticks = [10.0**power * step for power in range(-4, 6) for step in steps]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return any(end < low or end > high for end in ends)
