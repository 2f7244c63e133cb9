"""Claims at a glance: what was found of each, by a shipped kernel, by that of this repository, or by arithmetic."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted
from epcross.harness.analysis.style import text_color
from epcross.harness.claims.claim import Way
from epcross.harness.claims.findings import Judgement
from epcross.harness.claims.verdict import Verdict

NAME, TITLE = "verdicts", "Claims and what was found"

COLORS: Mapping[Verdict, str] = {
    Verdict.INSIDE: "#0072b2",
    Verdict.EXCEEDED: "#56b4e9",
    Verdict.OUTSIDE: "#d55e00",
    Verdict.INCONCLUSIVE: "#f0e442",
    Verdict.NOT_COMPARABLE: "#bdbdbd",
    Verdict.NOT_MEASURED: "#f4f4f4",
}
"""Told apart by everyone; each cell says its verdict in words too. Source: Okabe and Ito (2008)."""

_PLACES: Mapping[Way, tuple[float, float]] = {
    Way.REPRODUCES: (0.0, 1.0),
    Way.REPLICATES: (1.0, 2.0),
    Way.CHECKS: (0.0, 2.0),  # a fact is not measured, so it has no kernel
}
"""From where to where the cell of a way goes."""

_HEADS = {-0.4: "bounds", 0.5: "kernel as shipped\n(reproduces)", 1.5: "kernel of this repository\n(replicates)"}
_LETTERS = 68  # of a statement in one line
_INCHES = 0.34  # of one claim


def draw(judgements: Sequence[Judgement], note: str = "") -> Figure | Omitted:
    """One line for each claim, with the verdict of each way to judge it, and the number where there is one.

    Args:
        judgements: as `evaluate` gives them.
        note: what was judged by, for the caption.
    """
    if not judgements:
        return Omitted(name=NAME, title=TITLE, reason="there is no claim")
    claims = {one.claim.id: one.claim for one in judgements}
    places = {name: number for number, name in enumerate(reversed(claims))}
    canvas = Canvas([""], height=_INCHES * (len(claims) + 1) / 2.75, width=2.2)
    ax = canvas.panels[""]
    data: list[dict[str, Any]] = []
    for one in judgements:
        key = f"{one.claim.id}/{one.way}"
        _cell(canvas, key, one, places[one.claim.id])
        line = {"claim": one.claim.id, "way": str(one.way), "bounds": str(one.claim.bounds)}
        found = {"verdict": str(one.verdict), "found": one.found, "reason": one.reason}
        data.append({"panel": "", "key": key, **line, **found})
    for name, claim in claims.items():
        ax.text(-0.4, places[name], str(claim.bounds), ha="center", va="center", fontsize=7)
        ax.text(-3.95, places[name], name, va="center", fontsize=7, fontweight="bold")
        ax.text(-3.6, places[name], _statement(claim.statement), va="center", fontsize=7)
    ax.set_xlim(-4.0, 2.0)
    ax.set_ylim(-0.5, len(claims) - 0.5)
    ax.set_xticks(list(_HEADS), list(_HEADS.values()))
    ax.xaxis.tick_top()
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=7)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)
    counts = {verdict: sum(one.verdict is verdict for one in judgements) for verdict in Verdict}
    caption = [
        "bounds were written before anything was measured; a cell across both columns is a fact that follows from "
        "published numbers alone",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count),
    ]
    return canvas.finish(name=NAME, title=TITLE, caption=[*caption, note] if note else caption, data=data)


def _cell(canvas: Canvas, key: str, one: Judgement, y: int) -> None:
    from matplotlib.patches import Rectangle

    ax, face = canvas.panels[""], COLORS[one.verdict]
    left, right = _PLACES[one.way]
    patch = Rectangle((left + 0.02, y - 0.43), right - left - 0.04, 0.86, facecolor=face, edgecolor="#bbbbbb")
    patch.set_linewidth(0.5)
    ax.add_patch(patch)
    canvas.mark("", key, patch)
    words = f"{one.verdict}\n{one.found}" if one.found else str(one.verdict)
    ax.text((left + right) / 2, y, words, ha="center", va="center", fontsize=7, color=text_color(face))


def _statement(text: str) -> str:
    """At most two lines."""
    lines = textwrap.wrap(text, _LETTERS)
    return "\n".join(
        lines if len(lines) < 3 else [lines[0], textwrap.shorten(" ".join(lines[1:]), _LETTERS, placeholder=" ...")]
    )
