"""All figures of a report, in the order of its page."""

from epcross.harness.analysis.cells import Cell, cells
from epcross.harness.analysis.figures import bandwidth, crossover_map, latency, phases, ratio, skew, variance
from epcross.harness.analysis.figures.canvas import Figure, Omitted
from epcross.harness.analysis.figures.scene import Scene
from epcross.harness.analysis.material import Material
from epcross.harness.analysis.style import Styles, theme

FIGURES = (latency.draw, ratio.draw, crossover_map.draw, phases.draw, bandwidth.draw, skew.draw, variance.draw,
           latency.draw_flagged)  # fmt: skip
"""Flagged points come last, apart from every headline."""


def scenes(material: Material) -> list[Scene]:
    """The settings that `material` measured, each with its cells."""
    found = cells(material.records)
    styles = Styles(material.runs, (cell.series for cell in found))
    settings: dict[str, list[Cell]] = {}
    for cell in found:
        settings.setdefault(cell.setting, []).append(cell)
    return [
        Scene(
            setting=setting,
            suffix=f"_{number}" if len(settings) > 1 else "",
            cells=members,
            material=material,
            styles=styles,
        )
        for number, (setting, members) in enumerate(settings.items(), 1)
    ]


def draw(scene: Scene) -> list[Figure | Omitted]:
    """Every figure of one setting, or the reason why there is none."""
    with theme():
        return [figure(scene) for figure in FIGURES]
