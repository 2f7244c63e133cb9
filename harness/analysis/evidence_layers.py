"""What the documents say of a committed run of layers, as Markdown: how much of each is communication."""

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_run import EvidenceRun
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Phase, Regime

SHOWN = (1, 8, 128, 2048)
"""Tokens per rank: those of the published shares, and one more step size of decoding and one of prefill."""


def shares(run: EvidenceRun) -> str:
    """Layer, communication and their quotient of each series, in steady state, a table for each panel."""
    tables, series, counts = [], run.series(), []
    for panel in run.panels():
        layers, parts = (
            run.times_us(Regime.STEADY, panel, phases=(phase,)) for phase in (Phase.LAYER, Phase.LAYER_COMM)
        )
        lines = [
            f"| {run.words(panel)}, steady | tokens per rank | layer (us) | of it communication (us) | share |",
            "| :--- | ---: | ---: | ---: | ---: |",
        ]
        for name, (label, _) in series.items():
            for tokens in SHOWN:
                key = name, tokens
                if key in layers and key in parts:
                    counts += [len(layers[key]), len(parts[key])]
                    whole, part = median(layers[key]), median(parts[key])
                    cells = microseconds(whole), microseconds(part), f"{part / whole:.2f}"
                    lines.append(f"| {label} | {tokens} | {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    if not tables:
        return "no layer of this run was timed with and without its exchange"
    return "\n\n".join([*tables, f"Each median is of n = {span(counts)} repeats."])
