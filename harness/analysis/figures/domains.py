"""Latencies of several domains side by side, published ones among them: a panel for each domain and phase."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, microsecond_axis, token_axis
from epcross.harness.analysis.frame import NO_WEIGHTS, NOT_REPORTED
from epcross.harness.analysis.inputs import LAYOUT, STAGING
from epcross.harness.analysis.looks import LINES, shipped
from epcross.harness.analysis.style import FILLS, SeriesStyle
from epcross.harness.errors import InputError
from epcross.harness.planning.schema import MARKERS, BackendConfig
from epcross.harness.planning.tokens import counted
from epcross.harness.terms import CAPTIONED, Domain, Flag

if TYPE_CHECKING:
    import pandas as pd

NAME, TITLE = "domains", "Latencies by domain"

LABELS: Mapping[str, str] = {
    "backend": "{}", "hardware": "{}", "model": "{}", "ep_size": "EP {}", "regime": "{}", "dispatch_format": "{} out",
    "combine_format": "{} back", "hidden": "hidden {}", "top_k": "top {}", "num_experts": "{} experts",
    "routing": "{} routing", "compute": "+ {}", "weight_format": "{} weights", STAGING: "{}", LAYOUT: "layout {}",
    "options": "{}", "machine": "machine {}",
    "source": "source {}", "run_id": "run {}",
}  # fmt: skip
"""Column -> how it reads. What differs inside a domain names its series; what does not is said in the caption."""

_TOLD = ("backend", "options", "machine", "source", "run_id")
"""Columns that the caption does not repeat: they stand in labels, or in a sentence of their own."""

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#7f3c8d")
"""Told apart by everyone. Source: Okabe and Ito, Color Universal Design (2008), without yellow; two of our own."""


def draw(frame: "pd.DataFrame") -> Figure | Omitted:
    """The ok latencies of `frame` against tokens per rank. Series of two domains never share a panel.

    Args:
        frame: rows as `frame.load`, `published.load` or `published.beside` gives them, selected to what is to be seen.
            Several repeats of a point are drawn as their median.

    Raises:
        InputError: two published values would stand at one place, since nothing in their columns sets them apart.
    """
    rows = frame[frame["latency_us"].notna() & frame["tokens_per_rank"].notna()]
    if rows.empty:
        return Omitted(name=NAME, title=TITLE, reason="no row has a latency and a number of tokens per rank")
    panels = {
        (str(domain), str(phase)): own for (domain, phase), own in rows.groupby(["domain", "phase"], observed=True)
    }
    canvas = Canvas([_title(*key) for key in panels])
    data: list[dict[str, Any]] = []
    styles: dict[str, SeriesStyle] = {}
    counts: dict[str, list[int]] = {}  # domain -> repeats behind each mark
    for key, own in panels.items():
        panel = _title(*key)
        names = _differing(rows[rows["domain"] == key[0]])
        for label, series in _series(own, names).items():
            config = shipped(str(series["backend"].iloc[0])) if key[0] != Domain.PUBLISHED else None
            style = styles.get(label) or styles.setdefault(label, _style(label, config, list(styles.values())))
            tokens, medians, sizes = _curve(series, label)
            counts.setdefault(key[0], []).extend(sizes)
            canvas.line(panel, label, tokens, medians, style)
            common = {"panel": panel, "key": label, "domain": key[0], "phase": key[1], "series": label}
            data += [
                {**common, "tokens_per_rank": count, "median_us": median}
                for count, median in zip(tokens, medians, strict=True)
            ]
        token_axis(canvas.panels[panel], own["tokens_per_rank"].astype(int))
        microsecond_axis(canvas.panels[panel])
    canvas.y_label("latency (us)")
    return canvas.finish(name=NAME, title=TITLE, caption=_caption(rows, counts), data=data)


def _title(domain: str, phase: str) -> str:
    return f"{phase.replace('_', ' ')}, domain {domain}"


def _differing(rows: "pd.DataFrame") -> list[str]:
    """The columns that name series: the backend, and each that has several values and is no mere copy of another."""
    several = [name for name in LABELS if name in rows and rows[name].nunique(dropna=False) > 1]
    names: list[str] = []
    for name in several:
        known = rows.groupby(names, observed=True, dropna=False).ngroups if names else 1
        if rows.groupby([*names, name], observed=True, dropna=False).ngroups > known:
            names.append(name)
    return names if "backend" in names else ["backend", *names]


def _series(rows: "pd.DataFrame", names: Sequence[str]) -> dict[str, "pd.DataFrame"]:
    found = {}
    for values, own in rows.groupby(list(names), observed=True, dropna=False):
        words = [LABELS[name].format(value) for name, value in zip(names, values, strict=True) if _stated(value)]
        found[", ".join(words)] = own
    return found


def _stated(value: object) -> bool:
    return str(value) not in (NOT_REPORTED, NO_WEIGHTS, "<NA>", "nan", "")  # nor what a row has not by nature


def _curve(rows: "pd.DataFrame", label: str) -> tuple[list[int], list[float], list[int]]:
    """Tokens per rank, the median there, and of how many rows it is."""
    places = rows.groupby(rows["tokens_per_rank"].astype(int))["latency_us"]
    published = rows["domain"] == Domain.PUBLISHED
    if published.all() and (counts := places.size())[counts > 1].any():
        tokens = ", ".join(str(count) for count in counts[counts > 1].index)
        raise InputError(
            f"{label} has several published values at {counted(tokens)} per rank, and no column tells them apart; read "
            "their `note` and select one"
        )
    medians = places.median()
    sizes = [int(size) for size in places.size()]
    return [int(count) for count in medians.index], [float(value) for value in medians], sizes


def _style(label: str, config: BackendConfig | None, others: Sequence[SeriesStyle]) -> SeriesStyle:
    """Colour and marker of a backend that ships with epcross; of its other series the marker is another."""
    number = len(others)
    color = config.color if config else _COLORS[number % len(_COLORS)]
    marker = config.marker if config and config.marker else MARKERS[number % len(MARKERS)]
    taken = {other.marker for other in others if other.color == color}
    if marker in taken:
        marker = next((one for one in MARKERS if one not in taken), marker)
    return SeriesStyle(
        label=label,
        name=label,
        color=color,
        marker=marker,
        line=LINES[MARKERS.index(marker) % len(LINES)],
        fill=FILLS[number // len(_COLORS) % len(FILLS)],
    )


def _caption(rows: "pd.DataFrame", counts: Mapping[str, Sequence[int]]) -> list[str]:
    lines = []
    for domain, own in rows.groupby("domain", observed=True):
        same = [
            LABELS[name].format(own[name].iloc[0])
            for name in LABELS
            if name in own and name not in _TOLD and own[name].nunique(dropna=False) == 1 and _stated(own[name].iloc[0])
        ]
        if domain == Domain.PUBLISHED:
            taken = f"single values as {', '.join(sorted(own['source'].unique()))} state them, without intervals"
        else:
            n = " to ".join(str(end) for end in dict.fromkeys((min(counts[domain]), max(counts[domain]))))
            taken = f"medians of n = {n} repeats; run {', '.join(sorted(own['run_id'].unique()))}"
            if flagged := _flagged(own):
                taken += f"; flagged rows among them: {flagged}"
        lines.append(f"domain {domain}: {taken}" + (f"; all of {', '.join(same)}" if same else ""))
    if len(lines) > 1:
        lines.append("rows of two domains are not compared: they stand side by side so that their shapes can be seen")
    return lines


def _flagged(rows: "pd.DataFrame") -> str:
    """How many rows carry each flag that keeps them out of headlines, in words; empty if none does."""
    barred = [flag for flag in Flag if flag not in CAPTIONED and f"is_{flag}" in rows]
    counts = {flag: int(rows[f"is_{flag}"].sum()) for flag in barred}
    return ", ".join(f"{count} {flag}" for flag, count in counts.items() if count)
