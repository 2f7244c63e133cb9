"""The figure of a committed run, as an SVG whose bytes depend on its rows alone."""

import io
from typing import Any

from epcross.harness.analysis.evidence_run import OURS, EvidenceRun, Panel, what
from epcross.harness.analysis.looks import looks
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Regime

_COLUMNS, _COLUMNS_OF_MANY = 4, 2  # panels beside each other
_INSIDE = 6  # so many series have their legend inside the first panel, and more beside the panels
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
    lowest to the highest repeat."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    panels = [
        (regime, panel)
        for panel in run.panels()
        for regime in (Regime.STEADY, Regime.ENTRY)
        if run.headline_rows(regime, panel)
    ]
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
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        for axis in axes[::columns]:
            axis.set_ylabel(f"{what(run)} (us)")
        if many:
            lines = {str(line.get_label()): line for axis in axes for line in axis.get_lines()}
            order = [label for label, _ in run.series().values() if label in lines]
            figure.legend([lines[label] for label in order], order, loc="outside right center", frameon=False)
        else:
            axes[0].legend(frameon=False)
        sink = io.BytesIO()
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    return sink.getvalue()


def _draw(axis: Any, run: EvidenceRun, regime: Regime, panel: Panel) -> None:
    times, series = run.times_us(regime, panel), run.series()
    found = looks(map(_who, series), {_who(name)[0]: color for name, (_, color) in series.items()})
    for name, (label, _) in series.items():
        tokens = [tokens for backend, tokens in times if backend == name]
        if not tokens:
            continue
        look, latencies = found[_who(name)], [times[name, each] for each in tokens]
        axis.plot(
            tokens,
            [median(each) for each in latencies],
            color=look.color,
            marker=look.marker,
            markersize=5,
            linewidth=2.2 if name.startswith(OURS) else 1.1,
            zorder=3 if name.startswith(OURS) else 2,
            label=label,
        )
        lowest, highest = [min(each) for each in latencies], [max(each) for each in latencies]
        axis.fill_between(tokens, lowest, highest, color=look.color, alpha=0.2, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({tokens for _, tokens in times})
    axis.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) >= _NARROW else 0)
    axis.set_title(f"{run.words(panel)}, {regime}")
    axis.set_xlabel("tokens per rank")


def _who(name: str) -> tuple[str, str]:
    """Backend and variant of a series."""
    backend, _, variant = name.partition(" ")
    return backend, variant
