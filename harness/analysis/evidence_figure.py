"""The figure of a committed run, as an SVG whose bytes depend on its rows alone."""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.analysis.evidence_layers import OUR_STAGE
from epcross.harness.analysis.evidence_run import OURS, TIMED, EvidenceRun, Key, Panel, what
from epcross.harness.analysis.looks import LINES, looks
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import Phase, Regime

_COLUMNS, _COLUMNS_OF_MANY = 4, 2  # panels beside each other
_INSIDE = 6  # so many series have their legend inside the first panel, and more beside the panels
HIGHEST = 2.0
"""Multiples of ours above this are out of the panel: what is twice as slow needs no figure."""

_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2)  # of the scale
_TITLE = 30  # letters of a line
_NARROW = 7  # so many ticks are turned, lest they meet
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "epcross",  # else ids are random
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def round_trip_figure(run: EvidenceRun) -> bytes:
    """Round trip against tokens per rank, panels as in `EvidenceRun.panels` for each regime: medians, bands from the
    lowest to the highest repeat. Layers and expert stages, which read weights for most of their time and so lie close
    together over two decades, are drawn in multiples of ours; a panel without any of ours is left out."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    panels = list(drawn(run))
    many = len(run.series()) > _INSIDE
    columns = min(len(panels), _COLUMNS_OF_MANY if many else _COLUMNS)
    lines = -(-len(panels) // columns)
    with mpl.rc_context(_STYLE):
        size = ((4.6 if many else 3.6) * columns + 2.0 * many, (3.9 if many else 3.2) * lines)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
        for axis, (regime, panel) in zip(axes, panels, strict=False):
            _draw(axis, run, regime, panel)
        if is_relative(run):
            _scale(axes[0])  # which all others share
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        for axis in axes[::columns]:
            axis.set_ylabel(f"{what(run)}, multiple of ours" if is_relative(run) else f"{what(run)} (us)")
        if many or is_relative(run):
            lines = {str(line.get_label()): line for axis in axes for line in axis.get_lines()}
            order = [label for label, _ in run.series().values() if label in lines]
            figure.legend([lines[label] for label in order], order, loc="outside right center", frameon=False)
        else:
            axes[0].legend(frameon=False)
        sink = io.BytesIO()
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    return sink.getvalue()


def drawn(run: EvidenceRun) -> dict[tuple[Regime, Panel], dict[Key, list[Record]]]:
    """The rows behind each mark of each panel of the figure, which its caption is about as well: of multiples of ours
    those at token counts of which ours has a time."""
    found = {}
    for panel in run.panels():
        for regime in TIMED:
            shown = run.shown(regime, panel)
            if is_relative(run):
                unit_us = _ours_us(run.times_us(regime, panel))
                shown = {(name, tokens): rows for (name, tokens), rows in shown.items() if tokens in unit_us}
            if shown:
                found[regime, panel] = shown
    return found


def undrawn(run: EvidenceRun) -> list[str]:
    """Panels with rows to rest on that the figure has not, in words."""
    there = {panel for _, panel in drawn(run)}
    return [run.words(panel) for panel in run.panels() if panel not in there and _is_timed(run, panel)]


def cut(run: EvidenceRun) -> str:
    """What of the figure lies beyond its frame, in words; empty if nothing does."""
    if not is_relative(run):
        return ""
    middles, highest = [], []
    for (regime, panel), marks in drawn(run).items():
        unit_us = _ours_us(run.times_us(regime, panel))
        for (_, tokens), rows in marks.items():
            ratios = [row.latency_us / unit_us[tokens] for row in rows if row.latency_us is not None]
            middles.append(median(ratios))
            highest.append(max(ratios))
    beyond = [ratio for ratio in middles if ratio > HIGHEST]
    if beyond:
        return (
            f"lines are cut at {HIGHEST:g} times ours, and {len(beyond)} of {len(middles)} medians lie above, up to"
            f" {max(beyond):.3g} times"
        )
    return f"bands are cut at {HIGHEST:g} times ours" if any(ratio > HIGHEST for ratio in highest) else ""


def _is_timed(run: EvidenceRun, panel: Panel) -> bool:
    return any(run.headline_rows(regime, panel) for regime in TIMED)


def _draw(axis: Any, run: EvidenceRun, regime: Regime, panel: Panel) -> None:
    times, series = run.times_us(regime, panel), run.series()
    unit_us = _ours_us(times) if is_relative(run) else {}
    variants: Counter[str] = Counter()  # of a backend, drawn so far: they share its colour
    found = looks(map(_who, series), {_who(name)[0]: color for name, (_, color) in series.items()})
    for name, (label, _) in series.items():
        tokens = [at for backend, at in times if backend == name and at in (unit_us or (at,))]
        if not tokens:
            continue
        look = found[_who(name)]
        latencies = [[us / unit_us.get(each, 1.0) for us in times[name, each]] for each in tokens]
        axis.plot(
            tokens,
            [median(each) for each in latencies],
            color=look.color,
            marker=look.marker,
            linestyle=LINES[variants[_who(name)[0]]],
            markersize=5,
            linewidth=2.2 if _is_ours(name) else 1.1,
            zorder=3 if _is_ours(name) else 2,
            label=label,
        )
        variants[_who(name)[0]] += 1
        lowest, highest = [min(each) for each in latencies], [max(each) for each in latencies]
        axis.fill_between(tokens, lowest, highest, color=look.color, alpha=0.2, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({tokens for _, tokens in times})
    axis.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) >= _NARROW else 0)
    axis.set_title(textwrap.fill(f"{run.words(panel)}, {regime}", _TITLE))
    axis.set_xlabel("tokens per rank")


def _scale(axis: Any) -> None:
    """Ticks and ends of multiples of ours."""
    low, high = axis.get_ylim()
    high = min(high, HIGHEST)
    axis.set_ylim(low, high)
    ticks = [ratio for ratio in _RATIOS if low <= ratio <= high]
    axis.set_yticks(ticks, [f"{ratio:g}" for ratio in ticks])
    axis.minorticks_off()


def is_relative(run: EvidenceRun) -> bool:
    """Whether its figure shows multiples of ours in place of microseconds."""
    return any(row.phase != Phase.ROUND_TRIP for row in run.headline_rows())


def _is_ours(name: str) -> bool:
    return name.startswith(OURS) or OUR_STAGE in name.split()


def _ours_us(times: Mapping[Key, Sequence[float]]) -> dict[int, float]:
    """The median of our fastest, by tokens per rank; of tokens at which any of ours was measured."""
    found: dict[int, float] = {}
    for (name, tokens), each in times.items():
        if _is_ours(name):
            found[tokens] = min(median(each), found.get(tokens, math.inf))
    return found


def _who(name: str) -> tuple[str, str]:
    """Backend and variant of a series."""
    backend, _, variant = name.partition(" ")
    return backend, variant
