"""What the documents say of a committed run of layers, as Markdown: how much of each is communication."""

from collections.abc import Iterable

from epcross.harness.analysis.evidence_run import EvidenceRun, Panel, names, panel_of
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import Flag, Phase, Regime, Status

SHOWN = (1, 8, 128, 2048)
"""Tokens per rank: those of the published shares, and one more step size of decoding and one of prefill."""


def shares(run: EvidenceRun) -> str:
    """Layer, communication and their quotient of each series, in steady state, a table for each panel."""
    tables = []
    for panel in run.panels():
        layers, parts = (_medians(run, panel, phase) for phase in (Phase.LAYER, Phase.LAYER_COMM))
        lines = [
            f"| {run.words(panel)}, steady | tokens per rank | layer (us) | of it communication (us) | share |",
            "| :--- | ---: | ---: | ---: | ---: |",
        ]
        for name, (label, _) in run.series().items():
            for tokens in SHOWN:
                whole, part = layers.get((name, tokens)), parts.get((name, tokens))
                if whole is not None and part is not None:
                    cells = microseconds(whole), microseconds(part), f"{part / whole:.2f}"
                    lines.append(f"| {label} | {tokens} | {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    return "\n\n".join(tables) or "no layer of this run was timed with and without its exchange"


def _medians(run: EvidenceRun, panel: Panel, phase: Phase) -> dict[tuple[str, int], float]:
    """By series and tokens per rank, over all repeats."""
    name_of, found = names(run.rows), dict[tuple[str, int], list[float]]()
    for row in _rows(run, phase):
        if panel_of(row) == panel and row.latency_us is not None:
            found.setdefault((name_of(row), row.tokens_per_rank), []).append(row.latency_us)
    return {key: median(times) for key, times in found.items()}


def _rows(run: EvidenceRun, phase: Phase) -> Iterable[Record]:
    """As `EvidenceRun.headline_rows`, of any phase of layers."""
    return (
        row
        for row in run.rows
        if row.phase == phase
        and row.regime == Regime.STEADY
        and row.status == Status.OK
        and set(row.flags.split()) <= {Flag.WITHIN_LAUNCH}
    )
