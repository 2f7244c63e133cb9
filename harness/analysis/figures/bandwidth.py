"""How much of the machine's copy bandwidth an exchange reaches, by the byte view that the floor shares with it."""

from typing import Any

from epcross.harness.analysis.cells import by_panel
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, token_axis
from epcross.harness.analysis.figures.scene import Scene, by_series, entry, shown_rows
from epcross.harness.analysis.style import FLOOR_COLOR

NAME, TITLE = "bandwidth", "Bandwidth against the floor"
VIEW = "wire_bytes"


def draw(scene: Scene) -> Figure | Omitted:
    """One panel for each EP size and regime, with the copy bandwidth of each run as a line."""
    cells = [cell for cell in scene.headline if cell.wire_bytes]
    floors = {
        (cell.series.run_id, cell.ep_size): floor["copy_gbps"]
        for cell in cells
        if (floor := scene.material.floor(cell.series.run_id, cell.ep_size)) and floor.get("copy_gbps")
    }
    if not floors:
        reason = "no run measured a floor" if cells else "no round trip that is ok and without flags moves rows"
        return Omitted(name=NAME + scene.suffix, title=TITLE, reason=reason)
    cells = [cell for cell in cells if (cell.series.run_id, cell.ep_size) in floors]
    panels = by_panel(cells, by_run=False)
    canvas = Canvas([scene.panel(*key) for key in panels])
    data: list[dict[str, Any]] = []
    for key, found in panels.items():
        panel = scene.panel(*key)
        ax = canvas.panels[panel]
        for series, points in by_series(found).items():
            values = []
            for point in points:
                assert point.interval is not None
                gbps = point.wire_bytes / point.interval.median_us / 1e3
                values.append(gbps)
                floor = floors[series.run_id, point.ep_size]
                data.append(
                    entry(
                        scene,
                        panel,
                        point,
                        view=VIEW,
                        wire_bytes=point.wire_bytes,
                        wire_gbps=gbps,
                        copy_gbps=floor,
                        percent_of_floor=100 * gbps / floor,
                    )
                )
            canvas.line(panel, scene.key(series), [point.tokens for point in points], values, scene.styles[series])
        for run_id in sorted({cell.series.run_id for cell in found}):
            line = ax.axhline(floors[run_id, key[0]], color=FLOOR_COLOR, linestyle=":", linewidth=1.2)
            canvas.explain("floor: all ranks copy", line)
        token_axis(ax, (point.tokens for point in found))
        ax.set_ylim(bottom=0)
    canvas.y_label(f"{VIEW} per second (GB/s)")
    sentence = (
        f"view {VIEW}: rows to other ranks and their partials back, summed over ranks, over the median round trip; "
        "GB/s is 10^9 bytes per second; the floor copies buffers larger than the last cache, so small exchanges that "
        "stay in a cache may exceed it"
    )
    caption = scene.caption(sentence, rows=shown_rows(cells))
    return canvas.finish(name=NAME + scene.suffix, title=TITLE, caption=caption, data=data)
