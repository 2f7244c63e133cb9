"""The figure of a committed run, as an SVG whose bytes depend on its rows alone."""

import io
from typing import Any

from epcross.harness.analysis.evidence_run import EvidenceRun, what
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Regime

_MARKERS = "osD^vP"
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
    """Round trip against tokens per rank, one panel for each EP size and regime: medians, bands from the lowest to the
    highest repeat."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    panels = [
        (ep_size, regime)
        for ep_size in run.ep_sizes()
        for regime in (Regime.STEADY, Regime.ENTRY)
        if run.headline_rows(regime, ep_size)
    ]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (ep_size, regime) in zip(axes, panels, strict=True):
            _draw(axis, run, ep_size, regime)
        axes[0].set_ylabel(f"{what(run)} (us)")
        axes[0].legend(frameon=False)
        sink = io.BytesIO()
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    return sink.getvalue()


def _draw(axis: Any, run: EvidenceRun, ep_size: int, regime: Regime) -> None:
    times = run.times_us(regime, ep_size)
    for number, (name, (label, color)) in enumerate(run.series().items()):
        tokens = [tokens for backend, tokens in times if backend == name]
        if not tokens:
            continue
        series = [times[name, each] for each in tokens]
        axis.plot(
            tokens,
            [median(each) for each in series],
            color=color,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            label=label,
        )
        lowest, highest = [min(each) for each in series], [max(each) for each in series]
        axis.fill_between(tokens, lowest, highest, color=color, alpha=0.2, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({tokens for _, tokens in times})
    axis.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) > 8 else 0)
    axis.set_title(f"EP {ep_size}, {regime}")
    axis.set_xlabel("tokens per rank")
