"""How far ranks lie apart, from the samples: the slowest rank's time over the fastest's."""

from typing import TYPE_CHECKING, Any

from epcross.harness.analysis.cells import by_panel
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_axis
from epcross.harness.analysis.figures.scene import Scene, by_series, entry
from epcross.harness.record import Record
from epcross.harness.terms import HEADLINES

if TYPE_CHECKING:
    import pandas as pd

NAME, TITLE = "skew", "Skew between ranks"


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each EP size and regime."""
    spread = rank_spread(scene.material.samples)
    known: dict[int, float] = {}
    used: list[Record] = []
    for cell in scene.headline:
        sampled = [row for row in cell.shown if (row.run_id, row.point_id, row.repeat) in spread]
        if sampled and cell.ep_size > 1:
            values = sorted(spread[row.run_id, row.point_id, row.repeat] for row in sampled)
            known[id(cell)] = values[len(values) // 2]
            used += sampled
    cells = [cell for cell in scene.headline if id(cell) in known]
    if not cells:
        reason = "no samples of two ranks or more lie behind rows that are ok and without flags"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    panels = by_panel(cells, by_run=False)
    canvas = Canvas([scene.panel(*key) for key in panels])
    data: list[dict[str, Any]] = []
    for key, found in panels.items():
        panel = scene.panel(*key)
        ax = canvas.panels[panel]
        for series, points in by_series(found).items():
            values = [known[id(point)] for point in points]
            canvas.line(panel, scene.key(series), [point.tokens for point in points], values, scene.styles[series])
            data += [entry(scene, panel, point, spread_percent=known[id(point)]) for point in points]
        token_axis(ax, (point.tokens for point in found))
        ax.set_yscale("symlog", linthresh=0.01) if max(known.values()) > 1000 else ax.set_ylim(bottom=0)
    canvas.y_label("slowest over fastest rank, minus 1 (%)")
    sentence = (
        "for each iteration, how much longer the slowest rank takes than the fastest; median over iterations, then "
        "over repeats; in regime steady a chain gives one period for each rank, and ranks that wait for each other "
        "agree"
    )
    caption = scene.caption(sentence, rows=used)
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=caption, data=data)


def rank_spread(samples: "pd.DataFrame") -> dict[tuple[str, str, int], float]:
    """(run_id, point_id, repeat) -> median over iterations of 100 (slowest / fastest - 1) of the round trips."""
    trips = samples[samples["phase"].isin(HEADLINES)]
    if trips.empty:
        return {}
    place = ["run_id", "point_id", "repeat"]
    ends = trips.groupby([*place, "iteration"], observed=True)["value_us"].agg(["min", "max"]).reset_index()
    ends["percent"] = 100 * (ends["max"] / ends["min"] - 1)
    medians = ends.groupby(place, observed=True)["percent"].median().reset_index()
    keys = zip(medians["run_id"].astype(str), medians["point_id"].astype(str), medians["repeat"].tolist(), strict=True)
    return dict(zip(keys, medians["percent"].tolist(), strict=True))
