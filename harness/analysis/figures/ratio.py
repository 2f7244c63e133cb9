"""How many times as long as its best peer each series takes: below 1 it is the fastest, by that much."""

from collections.abc import Sequence
from typing import Any

from epcross.harness.analysis.cells import MARGIN, Cell, by_panel
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_axis
from epcross.harness.analysis.figures.scene import Scene, by_series, entry, shown_rows

NAME, TITLE = "ratio", "Ratio to the best peer"


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each EP size, regime and run; rows of two runs are never divided by each other."""
    panels = {
        key: found for key, found in by_panel(scene.headline, by_run=True).items() if len(by_series(found)) > 1
    }
    if not panels:
        reason = "it needs two series of one run, EP size and regime whose rows are ok and without flags"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    canvas = Canvas([scene.panel(*key) for key in panels])
    data: list[dict[str, Any]] = []
    for key, found in panels.items():
        panel = scene.panel(*key)
        ax = canvas.panels[panel]
        ax.axhspan(1 / (1 + MARGIN), 1 + MARGIN, color="#000000", alpha=0.10, linewidth=0)
        ax.axhline(1.0, color="#000000", linewidth=0.8)
        for series, points in by_series(found).items():
            pairs = [(point, peer) for point in points if (peer := best_peer(point, found)) is not None]
            if not pairs:
                continue
            style = scene.styles[series]
            x = [point.tokens for point, _ in pairs]
            ratios = [ratio(point, peer) for point, peer in pairs]
            low, middle, high = zip(*ratios, strict=True)
            ax.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)
            canvas.line(panel, scene.key(series), x, middle, style)
            for (point, peer), (least, value, most) in zip(pairs, ratios, strict=True):
                data.append(entry(scene, panel, point, best_peer=peer.series.name, ratio=value, low=least, high=most))
        token_axis(ax, (point.tokens for point in found))
        _ratio_axis(ax)
    canvas.y_label("time over best peer (ratio)")
    sentence = (
        "median over the least median of the other series at the same tokens, in the same run; band: the ends of both "
        f"intervals divided (wide by construction); grey: within the margin of {MARGIN:.0%}"
    )
    used = [cell for found in panels.values() for cell in found]
    caption = scene.caption(sentence, rows=shown_rows(used))
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=caption, data=data)


def best_peer(cell: Cell, found: Sequence[Cell]) -> Cell | None:
    """The fastest other series at the tokens of `cell`; None if there is none."""
    peers = [peer for peer in found if peer.tokens == cell.tokens and peer.series != cell.series and peer.interval]
    return min(peers, key=lambda peer: peer.interval.median_us if peer.interval else 0, default=None)


def ratio(cell: Cell, peer: Cell) -> tuple[float, float, float]:
    """Low end, value and high end of the ratio of two medians, from the ends of their intervals."""
    own, other = cell.interval, peer.interval
    assert own is not None
    assert other is not None
    return own.low_us / other.high_us, own.median_us / other.median_us, own.high_us / other.low_us


def _ratio_axis(ax: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_yscale("log", base=2)
    low, high = ax.get_ylim()
    ticks = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
