"""What every figure shares: a grid of panels, one legend, and the proof that what was drawn is what the data hold.

Figures are made without pyplot, so nothing global is kept and no display is looked for.
"""

import base64
import html
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epcross.harness.analysis.style import SeriesStyle, theme
from epcross.harness.errors import InputError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

_PANEL_INCHES = (3.5, 2.75)
_AXIS_LETTERS = 44  # beside each other below a panel
_TITLE_LETTERS = 42  # of a line that fits a panel
_LEGEND_LINES, _LINE_INCHES = 2, 0.21  # of a legend that the usual height has room for, and what each more takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A finished figure: the drawing, the words under it, and the numbers it shows."""

    name: str  # of its files
    title: str
    caption: tuple[str, ...]
    drawing: "Drawing"
    data: tuple[dict[str, Any], ...]  # one for each mark; `panel` and `key` say where it is drawn

    @property
    def width_inches(self) -> float:
        """How wide the drawing is."""
        return float(self.drawing.get_size_inches()[0])

    def save(self, path: Path | str) -> Path:
        """Write it as what the name of `path` ends in: .pdf, .svg or .png. The caption is `caption`.

        Raises:
            InputError: another ending.
        """
        path = Path(path)
        if path.suffix not in _FORMATS:
            raise InputError(f"{path}: figures are saved as {', '.join(_FORMATS)}; name it so")
        path.write_bytes(_FORMATS[path.suffix](self))
        return path

    def _repr_html_(self) -> str:
        """What a notebook shows: the drawing, and under it the words it must not be seen without."""
        image = base64.b64encode(svg(self)).decode()
        return (
            f'<figure style="margin: 0; max-width: {self.width_inches:.2f}in">'
            f'<img style="width: 100%" alt="{html.escape(self.title)}" src="data:image/svg+xml;base64,{image}">'
            f"<figcaption><small>{'<br>'.join(map(html.escape, self.caption))}</small></figcaption></figure>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Omitted:
    """A figure that the data do not allow, and why."""

    name: str
    title: str
    reason: str

    def save(self, path: Path | str) -> Path:
        """There is nothing to write.

        Raises:
            InputError: always, with the reason.
        """
        raise InputError(f"{path} is not written: there is no figure '{self.name}', because {self.reason}")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<p>{html.escape(self.title)}: left out, because {html.escape(self.reason)}.</p>"


class NotDrawn(AssertionError):
    """A figure shows other series than its data hold: an error of ours, never of the data."""


class Canvas:
    """A figure in the making. Every artist that stands for data gets the id `panel|key`; `finish` compares."""

    def __init__(self, panels: Sequence[str], *, columns: int = 2, height: float = 1.0, width: float = 1.0) -> None:
        from matplotlib.figure import Figure as Drawing

        columns = min(columns, len(panels))
        rows = -(-len(panels) // columns)
        size = (_PANEL_INCHES[0] * columns * width, _PANEL_INCHES[1] * rows * height + 0.5)
        self.drawing = Drawing(figsize=size, layout="constrained")
        grid = self.drawing.subplots(rows, columns, squeeze=False)
        axes = list(grid.flat)
        for unused in axes[len(panels) :]:
            unused.remove()
        self.panels: dict[str, Axes] = dict(zip(panels, axes, strict=False))
        for title, ax in self.panels.items():
            ax.set_title(textwrap.fill(title, _TITLE_LETTERS))
        self._first_column = axes[: len(panels) : columns]
        self._legend: dict[str, Any] = {}  # label -> artist

    def mark(self, panel: str, key: str, artist: "Artist") -> None:
        """Say that `artist` stands for the data of `key` in `panel`."""
        artist.set_gid(f"{panel}|{key}")

    def line(self, panel: str, key: str, x: Sequence[float], y: Sequence[float], style: SeriesStyle) -> None:
        """Draw one series and put it into the legend."""
        (artist,) = self.panels[panel].plot(
            x,
            y,
            color=style.color,
            marker=style.marker,
            linestyle=style.line,
            fillstyle=style.fill,
            markersize=4.5,
            linewidth=1.3,
            markeredgewidth=0.9,
            label=style.label,
        )
        self.mark(panel, key, artist)
        self._legend.setdefault(style.label, artist)

    def y_label(self, text: str) -> None:
        """Label the y axes of all panels, once for each line of panels."""
        for ax in self._first_column:
            ax.set_ylabel(text)

    def explain(self, label: str, artist: Any) -> None:
        """Put an artist that is no series (a floor, a band) into the legend."""
        self._legend.setdefault(label, artist)

    def finish(self, *, name: str, title: str, caption: Iterable[str], data: Iterable[dict[str, Any]]) -> Figure:
        """The figure, once it is proven to show every series of `data` and no other.

        Raises:
            NotDrawn: it does not.
        """
        data = tuple(data)
        held = {f"{entry['panel']}|{entry['key']}" for entry in data}
        shown = drawn(self.drawing)
        if held != shown:
            raise NotDrawn(f"{name}: not drawn: {sorted(held - shown)}; drawn without data: {sorted(shown - held)}")
        if self._legend:
            width, height = self.drawing.get_size_inches()
            below = -(-len(self._legend) // self._legend_columns()) - _LEGEND_LINES
            self.drawing.set_size_inches(width, height + max(0, below) * _LINE_INCHES)  # panels keep their height
            self.drawing.legend(
                list(self._legend.values()),
                list(self._legend),
                loc="outside lower center",
                ncols=self._legend_columns(),
                frameon=False,
                handlelength=3,
            )
        self.drawing.draw_without_rendering()
        self.drawing.set_layout_engine("none")  # it is found once, not again for each file format
        return Figure(name=name, title=title, caption=tuple(caption), drawing=self.drawing, data=data)

    def _legend_columns(self) -> int:
        """As many columns as fit side by side, by a cautious width of a letter, in lines of about equal length."""
        widths = [0.6 + 0.075 * len(label) for label in self._legend]
        most = max(1, int(self.drawing.get_size_inches()[0] / max(widths)))
        lines = -(-len(widths) // most)
        return -(-len(widths) // lines)


def drawn(drawing: "Drawing") -> set[str]:
    """The ids of the artists of `drawing` that stand for data."""
    return {gid for ax in drawing.axes for artist in ax.get_children() if (gid := artist.get_gid())}


def token_axis(ax: "Axes", tokens: Iterable[int]) -> None:
    """A logarithmic x axis with a label at each number of tokens measured, as far as they have room."""
    from matplotlib.ticker import FixedLocator, NullLocator

    values = sorted({token for token in tokens if token > 0})
    ax.set_xscale("log", base=2)
    shown = values if len(values) <= 9 else values[:: -(-len(values) // 9)]
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([str(value) for value in shown], rotation=_turn(shown))
    if values:
        ax.set_xlim(values[0] / 1.25, values[-1] * 1.25)
    ax.set_xlabel("tokens per rank")


def _turn(tokens: Sequence[int]) -> int:
    """By how many degrees labels of a logarithmic axis turn, so that neighbours do not meet."""
    steps = [math.log2(more / less) for less, more in itertools.pairwise(tokens)]
    letters = [(len(str(less)) + len(str(more))) / 2 for less, more in itertools.pairwise(tokens)]
    whole = sum(steps)
    meet = any(step / whole * _AXIS_LETTERS < letter + 1 for step, letter in zip(steps, letters, strict=True))
    return 45 if meet else 0


def token_bars(ax: "Axes", tokens: Sequence[int]) -> int:
    """An x axis with one place and label for each number of tokens; by how many degrees labels turn to have room."""
    turned = 90 if len(tokens) > 8 else 0
    ax.set_xticks(range(len(tokens)), [str(value) for value in tokens], rotation=turned)
    ax.set_xlabel("tokens per rank")
    ax.grid(visible=False, axis="x")
    return turned


def microsecond_axis(ax: "Axes") -> None:
    """A logarithmic y axis in plain numbers; 2 and 5 are labelled too where few powers of ten are in view."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e6 else f"{value:.0e}"))
    ax.yaxis.set_minor_locator(LogLocator(base=10, subs=range(2, 10), numticks=50))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="y", which="minor", left=True, length=2, color="#888888")


def svg(figure: Figure) -> bytes:
    """The figure as SVG; the same data give the same bytes."""
    return _saved(figure, format="svg", metadata={"Date": None, "Creator": "epcross", "Title": figure.title})


def pdf(figure: Figure) -> bytes:
    """The figure as PDF; the same data give the same bytes."""
    return _saved(figure, format="pdf", metadata={"CreationDate": None, "Creator": "epcross", "Title": figure.title})


def png(figure: Figure) -> bytes:
    """The figure as PNG at 200 dots per inch."""
    return _saved(figure, format="png", dpi=200, metadata={"Software": "epcross"})


_FORMATS: Mapping[str, Callable[[Figure], bytes]] = {".pdf": pdf, ".svg": svg, ".png": png}


def _saved(figure: Figure, **how: Any) -> bytes:
    sink = io.BytesIO()
    with theme():
        figure.drawing.savefig(sink, **how)
    return sink.getvalue()
