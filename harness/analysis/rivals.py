"""Which series of a setting may be set against each other, and at how many tokens per rank one overtakes the other."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epcross.harness.analysis.cells import Cell, Series, by_panel
from epcross.harness.analysis.crossover import find
from epcross.harness.analysis.figures.scene import Scene, by_series


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """Two headline series of one run, EP size and regime, and what `crossover.find` says of them."""

    ep_size: int
    regime: str
    first: Series
    second: Series
    points: tuple[Cell, ...]  # of both, where both have one; those of the first come first
    line: Mapping[str, Any]  # a line of `crossover.find`; its names are those of the series

    @property
    def run_id(self) -> str:
        """The run both were measured in."""
        return self.first.run_id

    @property
    def called(self) -> bool:
        """Whether anything is said at all; if not, `line["reason"]` says why."""
        return not self.line["reason"]

    @property
    def estimate(self) -> float | None:
        """Tokens per rank at which the ratio of the medians crosses 1; None if it does not."""
        return None if math.isnan(self.line["estimate"]) else float(self.line["estimate"])


def rivals(scene: Scene, of: Collection[str] = ()) -> list[Rivals]:
    """Every pair of headline series, by EP size, regime and run; only pairs of one of the backends `of` and one that is
    none of them, if any are named."""
    found = []
    for (ep_size, regime, _), cells in by_panel(scene.headline, by_run=True).items():
        for (first, own), (second, other) in itertools.combinations(by_series(cells).items(), 2):
            subjects = [_subject(points) for points in (own, other)]
            if subjects[0] == subjects[1]:
                continue  # one backend under two loads: other conditions, no rivals
            if of and (first.backend in of) == (second.backend in of):
                continue
            names = {
                " ".join(subject.values()): scene.styles[series].name
                for subject, series in zip(subjects, (first, second), strict=True)
            }
            shared = {cell.tokens for cell in own} & {cell.tokens for cell in other}
            points = tuple(cell for cell in (*own, *other) if cell.tokens in shared)
            for line in find(scene.rows([*own, *other]), *subjects).to_dict("records"):
                named = {name: names.get(line[name], line[name]) for name in ("a", "b", "faster_below", "faster_above")}
                found.append(
                    Rivals(
                        ep_size=ep_size,
                        regime=regime,
                        first=first,
                        second=second,
                        points=points,
                        line={**line, **named},
                    )
                )
    return found


def _subject(points: Sequence[Cell]) -> dict[str, str]:
    row = points[0].rows[0]
    subject = {"backend": row.backend, "options": row.options}
    if row.compute:
        subject |= {"compute": row.compute, "compute_options": row.compute_options or "{}"}
    return subject
