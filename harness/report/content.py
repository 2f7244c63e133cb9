"""What a report says, and in which order."""

from collections import Counter

from epcross.harness.analysis.cells import MARGIN, PHASE_WORDS, headline_flags
from epcross.harness.analysis.figures.canvas import Figure, Omitted
from epcross.harness.analysis.figures.crossover_map import Winner, winners
from epcross.harness.analysis.figures.scene import Scene
from epcross.harness.analysis.material import Material
from epcross.harness.analysis.plots import draw, scenes
from epcross.harness.planning.tokens import counted
from epcross.harness.report import links, models, tables
from epcross.harness.report.document import Block, Bullets, Document, Paragraph, Picture, Section
from epcross.harness.report.machine import what_was_run
from epcross.harness.terms import Flag, Phase, Status

FLAGGED = "latency_flagged"


def document(material: Material) -> Document:
    """The whole report on `material`."""
    found = scenes(material)
    drawn = [(scene, draw(scene)) for scene in found]
    sections = [
        Section(title="Summary", blocks=_summary(material, found)),
        Section(title="What was run", blocks=what_was_run(material)),
        Section(title="Statuses and flags", blocks=tables.statuses(material)),
        Section(title="Headline numbers", blocks=_headlines(found)),
        *_conclusions(found),
        Section(title="Figures", blocks=_figures(drawn, flagged=False)),
    ]
    if any(scene.flagged for scene in found):
        blocks = [
            *_figures(drawn, flagged=True),
            *(table for scene in found for table in tables.latencies(scene, flagged=True)),
        ]
        sections.append(Section(title="Flagged points", blocks=blocks))
    if counted := links.links(material):
        sections.append(Section(title="Bytes on the links", blocks=counted))
    sections.append(Section(title="Floor of the machine", blocks=tables.floors(material)))
    ids = [run.run_id for run in material.runs]
    sweeps = ", ".join(dict.fromkeys(run.directory.sweep for run in material.runs))
    domains = ", ".join(sorted({str(point.domain) for run in material.runs for point in run.plan.points}))
    subtitle = f"run {ids[0]}" if len(ids) == 1 else f"runs {', '.join(ids)}"
    return Document(title=f"epcross: {sweeps}", subtitle=f"{subtitle}; domain {domains or 'none'}", sections=sections)


def _summary(material: Material, found: list[Scene]) -> list[Block]:
    records = material.records
    statuses = Counter(row.status for row in records)
    lines = [
        f"{len(records)} rows: " + (", ".join(f"{statuses[s]} {s}" for s in Status if statuses[s]) or "none is stored")
    ]
    flagged = sum(row.status == Status.OK and bool(headline_flags(row)) for row in records)
    if flagged:
        lines.append(
            f"{flagged} ok rows carry a flag that keeps them out of every headline; they have a section of their own"
        )
    if any(Flag.WITHIN_LAUNCH in row.flags.split() for row in records):
        lines.append(
            "within_launch: there are fewer than five launches, so no interval here sees what differs between launches"
        )
    missing = sum(run.missing for run in material.runs)
    if missing:
        lines.append(f"{missing} planned rows are missing: a run is not finished, or unit files are damaged")
    if statuses[Status.OK] == 0:
        lines.append("no row is ok, so there are no numbers and no figures")
    best = [sentence for scene in found for sentence in _who_wins(scene, several=len(found) > 1)]
    blocks: list[Block] = [Bullets(entries=lines)]
    if best:
        phases = dict.fromkeys(row.phase for row in records if row.phase in PHASE_WORDS)
        what = " or ".join(PHASE_WORDS[Phase(phase)] for phase in phases)
        words = (
            f"Least median {what}, where it is {MARGIN:.0%} ahead of the second and the 95 % interval of their "
            "ratio excludes 1:"
        )
        blocks += [Paragraph(text=words), Bullets(entries=best)]
    return blocks


def _who_wins(scene: Scene, *, several: bool) -> list[str]:
    places: dict[tuple[str, str], list[Winner]] = {}
    for winner in winners(scene.cells):
        cell = winner.cell
        panel = scene.panel(cell.ep_size, cell.regime, cell.series.run_id)
        why = f" ({winner.objection})" if winner.objection else ""
        name = scene.styles[cell.series].label if winner.clear else f"no clear winner{why}"
        places.setdefault((panel, name), []).append(winner)
    panels: dict[str, list[str]] = {}
    for (panel, name), won in places.items():
        tokens = ", ".join(str(winner.cell.tokens) for winner in won)
        panels.setdefault(panel, []).append(f"{name} at {counted(tokens)} per rank")
    where = f" ({scene.setting})" if several else ""
    return [f"{panel}{where}: {'; '.join(parts)}" for panel, parts in panels.items()]


def _headlines(found: list[Scene]) -> list[Block]:
    blocks: list[Block] = [table for scene in found for table in tables.latencies(scene, flagged=False)]
    if not blocks:
        return [Paragraph(text="No round trip is ok and without flags, so there is no headline number.")]
    return blocks


def _conclusions(found: list[Scene]) -> list[Section]:
    blocks: list[Block] = [table for scene in found for table in (*models.crossovers(scene), *models.fits(scene))]
    return [Section(title="Crossovers and costs", blocks=blocks)] if blocks else []


def _figures(drawn: list[tuple[Scene, list[Figure | Omitted]]], *, flagged: bool) -> list[Block]:
    blocks: list[Block] = []
    for _, figures in drawn:
        chosen = [figure for figure in figures if figure.name.startswith(FLAGGED) == flagged]
        blocks += [Picture(figure=figure) for figure in chosen if isinstance(figure, Figure)]
        omitted = [figure for figure in chosen if isinstance(figure, Omitted)]
        if omitted and not flagged:
            blocks.append(
                Bullets(entries=[f"{figure.title}: left out, because {figure.reason}." for figure in omitted])
            )
    return blocks or [Paragraph(text="There are no round trips, and so no figures.")]
