"""The tables of a report. Each is at most four series wide, so that it fits 100 columns of text."""

import dataclasses
from collections import Counter, defaultdict
from typing import Any

from epcross.harness.analysis.captions import provenance
from epcross.harness.analysis.cells import Cell, Series, by_panel
from epcross.harness.analysis.figures.scene import Scene
from epcross.harness.analysis.known_issues import known_issue_lines, withdrawn_lines
from epcross.harness.analysis.material import Material
from epcross.harness.analysis.table import Footnotes, microseconds
from epcross.harness.record import Record
from epcross.harness.report.document import Block, Bullets, Paragraph, Table
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import CAPTIONED, Status

_SERIES_PER_TABLE = 3
_EXAMPLES = 3


def latencies(scene: Scene, *, flagged: bool) -> list[Table]:
    """Round trips by tokens and series, a table for each EP size, regime and run; headline cells or flagged ones."""
    tables: list[Table] = []
    for key, found in by_panel(scene.cells, by_run=True).items():
        chosen = [cell for cell in found if (cell in scene.flagged if flagged else cell.headline)]
        if not chosen:
            continue
        series = sorted({cell.series for cell in found})
        parts = -(-len(series) // _SERIES_PER_TABLE)
        width = -(-len(series) // parts)  # of about equal width
        for start in range(0, len(series), width):
            part = series[start : start + width]
            suffix = f"_{start // width + 1}" if parts > 1 else ""
            run = f"_run{scene.styles.runs[key[2]]}" if scene.several_runs else ""
            word = "flagged" if flagged else "headline"
            name = f"{word}_ep{key[0]}_{key[1]}{run}{scene.suffix}{suffix}"
            tables.append(_latency_table(scene, key, found, part, name, flagged=flagged))
    return tables


def _latency_table(
    scene: Scene, key: tuple[Any, ...], found: list[Cell], series: list[Series], name: str, *, flagged: bool
) -> Table:
    footnotes = Footnotes()
    by_place = {(cell.tokens, cell.series): cell for cell in found}
    rows = []
    for tokens in sorted({cell.tokens for cell in found}):
        cells = [_cell(by_place.get((tokens, one)), footnotes, flagged=flagged) for one in series]
        rows.append([str(tokens), *cells])
    used = [cell for cell in found if cell.series in series and cell.interval and bool(cell.flags) == flagged]
    flags = join_words(flag for cell in used for flag in cell.flags)
    stars = [f"* every ok repeat is flagged {flags}: no headline"] if flagged else []
    repeats, *rest = provenance([row for cell in used for row in cell.shown] or list(found[0].rows))
    return Table(
        name=name,
        title=f"{scene.panel(*key)}: {scene.phase_words} in us",
        head=["tokens per rank", *(scene.styles[one].label for one in series)],
        rows=rows,
        notes=[*stars, *footnotes.lines(), f"median [lowest..highest] over {repeats}", scene.setting, *rest],
        data=[_numbers(cell) for cell in found if cell.series in series],
        numbers=True,
    )


def _cell(cell: Cell | None, footnotes: Footnotes, *, flagged: bool) -> str:
    if cell is None:
        return "-"
    failures = Counter((row.status, row.reason or "") for row in cell.rows if row.status != Status.OK)
    marks = []
    for (status, reason), count in sorted(failures.items()):
        share = "" if count == len(cell.rows) else f"{count} of {len(cell.rows)} repeats "
        marks.append(footnotes.mark(f"{share}{status}: {reason}"))
    if cell.interval is None:
        return " ".join([*sorted({row.status for row in cell.rows}), *marks])
    if cell.flags and not flagged:
        return " ".join(["flagged", footnotes.mark(f"every ok repeat is flagged {join_words(cell.flags)}"), *marks])
    if not cell.flags and flagged:
        return "headline"
    if cell.flagged_rows and not flagged:
        marks.append(footnotes.mark(f"{cell.flagged_rows} of {len(cell.rows)} repeats left out, flagged"))
    star = "*" if flagged else ""
    ends = f"[{microseconds(cell.lowest_us)}..{microseconds(cell.highest_us)}]"
    return " ".join([f"{microseconds(cell.interval.median_us)}{star} {ends}", *marks])


def _numbers(cell: Cell) -> dict[str, Any]:
    """All that is known of a cell, for the CSV file."""
    numbers: dict[str, Any] = {
        "run_id": cell.series.run_id,
        "point_id": cell.rows[0].point_id,
        "backend": cell.series.backend,
        "variant": cell.series.variant,
        "ep_size": cell.ep_size,
        "regime": cell.regime,
        "tokens_per_rank": cell.tokens,
        "rows": len(cell.rows),
        "ok_rows": sum(row.status == Status.OK for row in cell.rows),
        "shown_rows": len(cell.shown),
        "flags": join_words(cell.flags),
        "statuses": join_words(row.status for row in cell.rows),
    }
    numbers["setting"] = cell.setting
    ends = dataclasses.asdict(cell.interval) if cell.interval else {}
    names = ("median_us", "low_us", "high_us", "kind", "within_launch", "launches", "seeds", "chains")
    numbers |= {name: ends.get(name) for name in names}
    numbers["lowest_us"] = cell.lowest_us if cell.interval else None
    numbers["highest_us"] = cell.highest_us if cell.interval else None
    return numbers


def statuses(material: Material) -> list[Block]:
    """Rows of each backend by status, flags, known issues and failures with their reasons, what is missing and what is
    damaged."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    flags: dict[str, Counter[str]] = defaultdict(Counter)
    for row in material.records:
        counts[row.backend][row.status] += 1
        flags[row.backend].update(row.flags.split())
    if not counts:
        return [Paragraph(text="No unit is stored, so there are no rows."), *_damage(material)]
    seen = [status for status in Status if any(count[status] for count in counts.values())]
    blocks: list[Block] = [
        Table(
            name="statuses",
            title="Rows by status",
            head=["rows of", *seen],
            rows=[[name, *(str(counts[name][status]) for status in seen)] for name in sorted(counts)],
            numbers=True,
        )
    ]
    words = sorted({word for count in flags.values() for word in count})
    if words:
        blocks.append(
            Table(
                name="flags",
                title="Rows by flag",
                head=["flag", *sorted(counts)],
                rows=[[word, *(str(flags[name][word]) for name in sorted(counts))] for word in words],
                notes=[f"{join_words(CAPTIONED)} keep no row out of a headline; every other flag does"],
                numbers=True,
            )
        )
    return [*blocks, *_known_issues(material), *_failures(material), *_damage(material)]


def _known_issues(material: Material) -> list[Block]:
    several = len(material.runs) > 1
    lines = [
        f"run {run.run_id}: {line}" if several else line
        for run in material.runs
        for line in [
            *known_issue_lines(run.records, run.plan.backends),
            *withdrawn_lines(run.records, run.withdrawn),
        ]
    ]
    return [Bullets(entries=lines)] if lines else []


def _failures(material: Material) -> list[Block]:
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for row in material.records:
        if row.status != Status.OK:
            groups[row.backend, row.status, row.reason or ""].append(row)
    if not groups:
        return [Paragraph(text="Every row that is stored is ok.")]
    rows, data = [], []
    for (backend, status, reason), failed in sorted(groups.items()):
        points = list(dict.fromkeys(row.point_id for row in failed))
        more = f" and {len(points) - _EXAMPLES} more" if len(points) > _EXAMPLES else ""
        rows.append([backend, status, str(len(failed)), ", ".join(points[:_EXAMPLES]) + more, reason])
        data.append(
            {"backend": backend, "status": status, "rows": len(failed), "points": " ".join(points), "reason": reason}
        )
    head = ["backend", "status", "rows", "points", "reason"]
    return [Table(name="failures", title="Rows that are not ok, and why", head=head, rows=rows, data=data)]


def _damage(material: Material) -> list[Block]:
    blocks: list[Block] = []
    for run in material.runs:
        if run.missing:
            text = f"{run.run_id}: {run.missing} planned rows are missing. Measure them with"
            blocks.append(Paragraph(text=f"{text} `epcross run --resume {run.directory.path}`."))
        if run.problems:
            blocks += [
                Paragraph(text=f"{run.run_id}: unit files that cannot be used, and are left out:"),
                Bullets(entries=run.problems),
            ]
    return blocks


def floors(material: Material) -> list[Block]:
    """What each run's machine can do at best."""
    rows, data, failed = [], [], []
    for run in material.runs:
        for name, entry in run.floor.items():
            if "error" in entry:
                failed.append(f"{run.run_id}, {name}: {entry['error']}")
                continue
            plain = {key: value for key, value in entry.items() if isinstance(value, int | float | str)}
            data.append({"run_id": run.run_id, "job": name, **plain})
            rows.append([f"{run.run_id}", name, *(_digits(entry.get(key)) for key in _FLOOR_COLUMNS)])
    blocks: list[Block] = []
    if rows:
        blocks.append(
            Table(
                name="floor",
                title="Floor",
                head=["run", "job", *_FLOOR_COLUMNS.values()],
                rows=rows,
                notes=[
                    "empty pair: two calls that do nothing, on a GPU two empty kernels of a graph; flag: half a round "
                    "of ping-pong between neighbours, or between two blocks of one GPU; copy: all ranks at once into "
                    "each other's memory, or within that of one GPU, buffers larger than the last cache; "
                    "GB/s is 10^9 bytes per second"
                ],
                data=data,
                numbers=True,
            )
        )
    if failed:
        blocks += [Paragraph(text="Floors that could not be measured:"), Bullets(entries=failed)]
    return blocks or [Paragraph(text="No floor was measured, so no latency is compared with one.")]


_FLOOR_COLUMNS = {"empty_pair_us": "empty pair (us)", "flag_one_way_us": "flag (us)", "copy_gbps": "copy (GB/s)"}


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
