"""How series look: colour, marker and line of `looks`, labels as a run's plan recorded them, and never colour alone."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from epcross.harness.analysis.cells import Series
from epcross.harness.analysis.looks import Line, looks
from epcross.harness.analysis.material import Run

FILLS = ("full", "none", "left", "right", "bottom", "top")
FLOOR_COLOR = "#222222"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesStyle:
    """One series' looks: those of its backend and variant, and the fill of the marker by run."""

    label: str  # with the letter of the run where there are several
    name: str  # without it
    color: str
    marker: str
    line: Line
    fill: str


class Styles(Mapping[Series, SeriesStyle]):
    """The looks of every series of a report: the same in each of its figures."""

    def __init__(self, runs: Iterable[Run], series: Iterable[Series]) -> None:
        runs = list(runs)
        self.runs = {
            run.run_id: chr(ord("A") + number) if number < 26 else str(number) for number, run in enumerate(runs)
        }
        configs = {name: config for run in reversed(runs) for name, config in run.plan.backends.items()}
        ordered = sorted(set(series))
        found = looks(
            ((one.backend, one.variant) for one in ordered), {name: config.color for name, config in configs.items()}
        )
        self._styles = {}
        for one in ordered:
            look, config = found[one.backend, one.variant], configs.get(one.backend)
            label = f"{config.label if config else one.backend} {one.variant}".rstrip()
            self._styles[one] = SeriesStyle(
                name=label,
                label=f"{label} ({self.runs[one.run_id]})" if len(runs) > 1 else label,
                color=look.color,
                marker=look.marker,
                line=look.line,
                fill=FILLS[list(self.runs).index(one.run_id) % len(FILLS)],
            )

    def __getitem__(self, series: Series) -> SeriesStyle:
        return self._styles[series]

    def __iter__(self) -> Iterator[Series]:
        return iter(self._styles)

    def __len__(self) -> int:
        return len(self._styles)


@contextmanager
def theme() -> Iterator[None]:
    """The looks of axes and text, for as long as a figure is drawn or saved; nothing global is changed."""
    import matplotlib as mpl
    import seaborn as sns

    looks: dict[Any, Any] = {
        **sns.axes_style("whitegrid"),
        **sns.plotting_context("paper"),
        "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "grid.linewidth": 0.5,
        "axes.edgecolor": "#888888",
        "pdf.fonttype": 42,  # text stays text, as publishers ask
        "svg.hashsalt": "epcross",  # the same data give the same bytes
        "figure.dpi": 100,
    }
    with mpl.rc_context(looks):
        yield


def text_color(background: str) -> str:
    """Black or white, whichever reads better on `background` ("#rrggbb"). Source: WCAG 2 relative luminance."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.179 else "white"
