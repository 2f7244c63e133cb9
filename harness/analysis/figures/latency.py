"""Latency against tokens per rank, with the floor of the machine and, where they are known, fitted lines."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epcross.harness.analysis.captions import provenance
from epcross.harness.analysis.cells import Cell, by_panel
from epcross.harness.analysis.figures.canvas import Canvas, Figure, Omitted, microsecond_axis, token_axis
from epcross.harness.analysis.figures.scene import Scene, by_series, entry, shown_rows
from epcross.harness.analysis.style import FLOOR_COLOR
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import Phase

FLOOR_WORDS = "floor: two flags + wire bytes copied"


def draw(scene: Scene) -> Figure | Omitted:
    """The headline figure: rows without flags."""
    name, title = f"latency{scene.suffix}", "Latency against tokens per rank"
    if not scene.headline:
        return Omitted(name=name, title=title, reason=f"no {scene.phase_words} is ok and without flags")
    caption = scene.caption(*_SENTENCES, rows=shown_rows(scene.headline))
    return _draw(scene, scene.headline, name, title, caption, fitted=_is_exchange(scene) and not scene.several_runs)


def draw_flagged(scene: Scene) -> Figure | Omitted:
    """The same of points whose every row is flagged, in panels that say so: never beside headlines."""
    name, title = f"latency_flagged{scene.suffix}", "Flagged points: no headline"
    if not scene.flagged:
        return Omitted(name=name, title=title, reason="no point has flagged rows only")
    flags = join_words(flag for cell in scene.flagged for flag in cell.flags)
    warning = f"every row here is flagged {flags}: it measures the machine as much as the exchange"
    caption = [warning, *_SENTENCES, scene.setting, *provenance(shown_rows(scene.flagged))]
    return _draw(scene, scene.flagged, name, title, caption, fitted=False)


_SENTENCES = ("line: median of the repeats; band: lowest..highest repeat",)


def _draw(
    scene: Scene, cells: Sequence[Cell], name: str, title: str, caption: Sequence[str], *, fitted: bool
) -> Figure:
    from matplotlib.lines import Line2D

    panels = by_panel(cells, by_run=False)
    titles = {key: _panel_title(scene, key, found) for key, found in panels.items()}
    canvas = Canvas(list(titles.values()))
    data: list[dict[str, Any]] = []
    floor_line, has_fit = None, False
    for key, found in panels.items():
        panel = titles[key]
        ax = canvas.panels[panel]
        for series, points in by_series(found).items():
            style = scene.styles[series]
            intervals = [point.interval for point in points if point.interval is not None]
            x = [point.tokens for point in points]
            middle = [one.median_us for one in intervals]
            low, high = [point.lowest_us for point in points], [point.highest_us for point in points]
            ax.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)
            canvas.line(panel, scene.key(series), x, middle, style)
            for point, one in zip(points, intervals, strict=True):
                data.append(
                    entry(
                        scene,
                        panel,
                        point,
                        median_us=one.median_us,
                        low_us=one.low_us,
                        high_us=one.high_us,
                        interval=str(one.kind),
                        lowest_us=point.lowest_us,
                        highest_us=point.highest_us,
                        trials=one.trials,
                        launches=one.launches,
                        flags=join_words(point.flags),
                    )
                )
            if fitted:
                has_fit = _draw_fits(scene, canvas, panel, points) or has_fit
        floors = _floors(scene, found) if _is_exchange(scene) else {}
        for tokens_us in floors.values():
            (line,) = ax.plot(
                *zip(*sorted(tokens_us.items()), strict=True), color=FLOOR_COLOR, linestyle=":", linewidth=1.2
            )
            floor_line = line
        token_axis(ax, (point.tokens for point in found))
        microsecond_axis(ax)
    canvas.y_label(f"{scene.phase_words} (us)")
    words = [*caption]
    if has_fit:
        from epcross.harness.analysis.fit import VIEW

        canvas.explain("fit: fixed + bytes / bandwidth", Line2D([], [], color="#555555", linewidth=0.7))
        words.insert(1, f"thin lines: fixed cost + {VIEW} / bandwidth, fitted to the medians by relative error")
    if floor_line is not None:
        canvas.explain(FLOOR_WORDS, floor_line)
        words.insert(
            1, "floor: what moving the flags and the bytes alone costs, at this machine's copy bandwidth for buffers "
            "beyond the last cache; rows that stay in a cache can be faster than it"
        )  # fmt: skip
    return canvas.finish(name=name, title=title, caption=words, data=data)


def _is_exchange(scene: Scene) -> bool:
    """Fits and floors are about what is moved, which is not all that a layer does."""
    return scene.phase is Phase.ROUND_TRIP


def _draw_fits(scene: Scene, canvas: Canvas, panel: str, points: Sequence[Cell]) -> bool:
    """Draw the fitted model of one series through the bytes of its points; whether there was one."""
    from epcross.harness.analysis.fit import fit

    fits = fit(scene.rows(points))
    done = False
    for fixed_us, bandwidth_gbps in zip(fits["fixed_us"], fits["bandwidth_gbps"], strict=True):
        if len(fits) > 1 or math.isnan(fixed_us):
            continue
        tokens = np.geomspace(max(points[0].tokens, 1), points[-1].tokens, 60)
        moved = np.interp(tokens, [point.tokens for point in points], [point.rank_bytes for point in points])
        color = scene.styles[points[0].series].color
        canvas.panels[panel].plot(
            tokens, fixed_us + moved / bandwidth_gbps / 1e3, color=color, linewidth=0.7, alpha=0.9
        )
        done = True
    return done


def _panel_title(scene: Scene, key: tuple[Any, ...], found: Sequence[Cell]) -> str:
    flags = join_words(flag for cell in found for flag in cell.flags)
    title = scene.panel(*key)
    return f"{title}\n{flags}: no headline" if flags else title


def _floors(scene: Scene, found: Sequence[Cell]) -> Mapping[str, dict[int, float]]:
    """For each run with a floor: tokens -> least time of two flags and the wire bytes, in microseconds."""
    floors: dict[str, dict[int, float]] = {}
    for cell in found:
        floor = scene.material.floor(cell.series.run_id, cell.ep_size)
        if floor and floor.get("flag_one_way_us") and floor.get("copy_gbps"):
            flags_us = 2 * floor["flag_one_way_us"]
            floors.setdefault(cell.series.run_id, {})[cell.tokens] = (
                flags_us + cell.wire_bytes / floor["copy_gbps"] / 1e3
            )
    return floors
