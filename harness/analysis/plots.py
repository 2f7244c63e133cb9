"""All figures: of a report, in the order of its page, or one by one.

(scene,) = plots.load("results/runs/<run_id>")  # one for each model, routing and pair of formats
plots.figure(scene, "latency")
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epcross.harness.analysis import material as materials
from epcross.harness.analysis.cells import Cell, cells, setting_of
from epcross.harness.analysis.factors import telling
from epcross.harness.analysis.figures import (
    bandwidth,
    crossings,
    crossover_map,
    latency,
    phases,
    ratio,
    skew,
    variance,
)
from epcross.harness.analysis.figures.canvas import Figure, Omitted
from epcross.harness.analysis.figures.scene import Scene
from epcross.harness.analysis.inputs import LAYOUT, STAGING
from epcross.harness.analysis.material import Material
from epcross.harness.analysis.style import Styles, theme
from epcross.harness.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from epcross.harness.claims.findings import Judgement

FIGURES: Mapping[str, Callable[[Scene], Figure | Omitted]] = {
    "latency": latency.draw,
    "ratio": ratio.draw,
    "crossover_map": crossover_map.draw,
    "crossings": crossings.draw,
    "phases": phases.draw,
    "bandwidth": bandwidth.draw,
    "skew": skew.draw,
    "variance": variance.draw,
    "latency_flagged": latency.draw_flagged,
}
"""Name -> what draws it. Flagged points come last, apart from every headline."""


def load(*paths: Path | str) -> list[Scene]:
    """The settings that these runs measured: run directories, or folders of results/measured.

    Raises:
        StoreError: a path is no run, or one of its documents is damaged.
        ConfigError: a run is given twice, or the runs are of several domains.
    """
    return scenes(materials.load([Path(path) for path in paths]))


def figure(scene: Scene, name: str) -> Figure | Omitted:
    """One figure of a setting, or the reason why there is none. A notebook shows it with its caption.

    Raises:
        InputError: no such figure.
    """
    if name not in FIGURES:
        raise InputError(f"there is no figure '{name}'; there are {', '.join(FIGURES)}")
    with theme():
        return FIGURES[name](scene)


def crossings_of(scene: Scene, *backends: str) -> Figure | Omitted:
    """Where each of these backends and each other one of a setting change the lead (see `figures.crossings`).

    Raises:
        InputError: none is named, or the setting has no such backend.
    """
    there = sorted({cell.series.backend for cell in scene.cells})
    unknown = sorted(set(backends) - set(there))
    if unknown or not backends:
        what = f"no backend {', '.join(unknown)} here" if unknown else "no backend is named"
        raise InputError(f"{what}; there are {', '.join(there)}")
    with theme():
        return crossings.draw(scene, backends)


def scenes(material: Material) -> list[Scene]:
    """The settings that `material` measured, each with its cells."""
    found = cells(material.records)
    styles = Styles(material.runs, (cell.series for cell in found))
    settings: dict[str, list[Cell]] = {}
    for cell in found:
        settings.setdefault(cell.setting, []).append(cell)
    firsts = [members[0].rows[0] for members in settings.values()]
    told = telling([setting_of(row) for row in firsts], ("phase", STAGING, LAYOUT))
    return [
        Scene(
            setting=setting,
            suffix=f"_{number}" if len(settings) > 1 else "",
            words=words,
            cells=members,
            material=material,
            styles=styles,
        )
        for number, ((setting, members), words) in enumerate(zip(settings.items(), told, strict=True), 1)
    ]


def draw(scene: Scene) -> list[Figure | Omitted]:
    """Every figure of one setting, or the reason why there is none."""
    with theme():
        return [one(scene) for one in FIGURES.values()]


def domains(frame: "pd.DataFrame") -> Figure | Omitted:
    """Latencies of several domains side by side, published ones among them, never on one line (see `figures.domains`).

    Raises:
        InputError: two published values would stand at one place.
    """
    from epcross.harness.analysis.figures import domains as drawn

    with theme():
        return drawn.draw(frame)


def verdicts(judgements: "Sequence[Judgement]", note: str = "") -> Figure | Omitted:
    """Claims at a glance, as `claims.evaluate` judged them (see `figures.verdicts`)."""
    from epcross.harness.analysis.figures import verdicts as drawn

    with theme():
        return drawn.draw(judgements, note)
