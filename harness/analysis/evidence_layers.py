"""What the documents say of a committed run of layers, as Markdown: how much of each is communication."""

import itertools

from epcross.harness.analysis.evidence_run import EvidenceRun
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Phase, Regime

SHOWN = (1, 8, 128, 2048)
"""Tokens per rank: those of the published shares, and one more step size of decoding and one of prefill."""


def shares(run: EvidenceRun) -> str:
    """Layer, communication and their quotient of each series, a table for each panel and each of the two ways in which
    communication is told apart: by periods (steady), and by spans of kernels."""
    tables, series = [], run.series()
    for panel, regime in itertools.product(run.panels(), (Regime.STEADY, Regime.SPANS)):
        layers, parts = (run.times_us(regime, panel, phases=(phase,)) for phase in (Phase.LAYER, Phase.LAYER_COMM))
        lines = [
            f"| {run.words(panel)}, {regime} | tokens per rank | layer (us) | of it communication (us) | share |",
            "| :--- | ---: | ---: | ---: | ---: |",
        ]
        for name, (label, _) in series.items():
            for tokens in SHOWN:
                key = name, tokens
                if key in layers and key in parts:
                    whole, part = median(layers[key]), median(parts[key])
                    cells = microseconds(whole), microseconds(part), f"{part / whole:.2f}"
                    lines.append(f"| {label} | {tokens} | {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    return "\n\n".join(tables) or "no layer of this run was timed with and without its exchange"
