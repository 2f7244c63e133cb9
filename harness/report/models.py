"""What is concluded from the medians: fixed cost and bandwidth of each series, and where two of them cross over."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.analysis.cells import Cell, by_panel
from epcross.harness.analysis.figures.scene import Scene, by_series
from epcross.harness.analysis.table import microseconds
from epcross.harness.report.document import Table

_FIT_NUMBERS = (
    "fixed_us", "fixed_low_us", "fixed_high_us", "bandwidth_gbps", "bandwidth_low_gbps", "bandwidth_high_gbps",
    "half_bytes", "residual_rms", "residual_max", "points", "trials", "launches", "within_launch", "interval",
    "problem",
)  # fmt: skip
_CROSSOVER_NUMBERS = (
    "a", "b", "state", "reason", "bracket_low", "bracket_high", "estimate", "low", "high", "faster_below",
    "faster_above", "leads_from", "leads_to", "a_leads", "b_leads", "medians_lead", "agreement", "margin", "points",
    "trials", "launches", "within_launch", "interval",
)  # fmt: skip


def fits(scene: Scene) -> list[Table]:
    """One line for each headline series: what a call costs at least, and what its bytes cost."""
    from epcross.harness.analysis.fit import VIEW, fit

    rows, data = [], []
    for key, found in by_panel(scene.headline, by_run=True).items():
        for series, points in by_series(found).items():
            label = scene.styles[series].name
            for line in fit(scene.rows(points)).to_dict("records"):
                data.append({**_place(scene, key, points), **{name: line[name] for name in _FIT_NUMBERS}})
                if line["problem"]:
                    rows.append([scene.panel(*key), label, f"no fit: {line['problem']}", "", ""])
                    continue
                fixed = _range(line["fixed_us"], line["fixed_low_us"], line["fixed_high_us"])
                names = ("bandwidth_gbps", "bandwidth_low_gbps", "bandwidth_high_gbps")
                rows.append(
                    [
                        scene.panel(*key),
                        label,
                        fixed,
                        _range(*(line[n] for n in names)),
                        f"{100 * line['residual_max']:.0f}",
                    ]
                )
    if not rows:
        return []
    notes = [
        f"latency = fixed + {VIEW} / bandwidth, fitted to the medians by relative error; {VIEW}: one copy for each "
        "token and destination rank, own rank included, out and back, over all ranks; [95 % interval], widened for few "
        "launches",
        "a large worst error says that a line is no good model there, such as where rows outgrow a cache",
    ]
    head = ["where", "series", "fixed (us)", "bandwidth (GB/s)", "worst error (%)"]
    return [
        Table(
            name=f"fits{scene.suffix}", title="Fixed cost and bandwidth", head=head, rows=rows, notes=notes, data=data
        )
    ]


def crossovers(scene: Scene) -> list[Table]:
    """One line for each pair of headline series of one run, EP size and regime."""
    from epcross.harness.analysis.crossover import MARGIN
    from epcross.harness.analysis.rivals import rivals

    rows, data = [], []
    for pair in rivals(scene):
        key, line = (pair.ep_size, pair.regime, pair.run_id), pair.line
        data.append({**_place(scene, key, pair.points), **{name: line.get(name) for name in _CROSSOVER_NUMBERS}})
        rows.append([scene.panel(*key), f"{line['a']} / {line['b']}", *_verdict(line)])
    if not rows:
        return []
    notes = [
        f"tokens per rank at which the ratio of the medians crosses 1 [95 % interval]; equal within {MARGIN:.0%}; "
        "bracket: the measured token counts around it; last column: who is faster on either side; ambiguous: the "
        "launches at hand do not tell whether the lead changes, though at some counts they may tell who leads; by "
        "medians: who leads by the medians alone, in the order of the tokens",
    ]
    head = ["where", "pair", "state", "tokens", "bracket", "below, above"]
    return [Table(name=f"crossovers{scene.suffix}", title="Crossovers", head=head, rows=rows, notes=notes, data=data)]


def _verdict(line: Mapping[str, Any]) -> list[str]:
    known = not math.isnan(line["estimate"])
    low = f"{line['low']:.3g}" if line["low"] >= line["tokens_low"] else f"below {line['tokens_low']}"
    high = f"{line['high']:.3g}" if line["high"] <= line["tokens_high"] else f"above {line['tokens_high']}"
    tokens = f"{line['estimate']:.3g} [{low}..{high}]" if known else "-"
    bracketed = not math.isnan(line["bracket_low"])
    bracket = f"{line['bracket_low']:g}..{line['bracket_high']:g}" if bracketed else "-"
    sides = [line["faster_below"], line["faster_above"]]
    sure = [f"{line[side]} leads at {line[f'{side}_leads']}" for side in ("a", "b") if line[f"{side}_leads"]]
    if line["reason"]:
        led = [line[side] for side in line["medians_lead"].split()] or ["equal"]
        sides = [f"not told; by medians {', '.join(led)}", *sure]
    return [str(line["state"]), tokens, bracket, "; ".join(sides) if line["reason"] else ", ".join(sides)]


def _place(scene: Scene, key: tuple[Any, ...], points: Sequence[Cell]) -> dict[str, Any]:
    series = points[0].series
    options = json.loads(points[0].rows[0].options)
    words = " ".join(f"{name}={value}" for name, value in options.items())
    return {
        "run_id": series.run_id,
        "ep_size": key[0],
        "regime": key[1],
        "series": series.name,
        "options": words,
        "setting": scene.setting,
    }


def _range(value: float, low: float, high: float) -> str:
    return f"{_short(value)} [{_short(low)}..{_short(high)}]"


def _short(value: float) -> str:
    if math.isinf(value):
        return "inf"
    return "?" if math.isnan(value) else microseconds(value)
