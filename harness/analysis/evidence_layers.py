"""What the documents say of a committed run of layers or expert stages, as Markdown: how much of each layer is
communication, and our expert stage beside the best of the others."""

import itertools

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_run import EvidenceRun
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Phase, Regime

OUR_STAGE = "compute=gather_gemm"
"""As series are named that differ in their stage."""

SHOWN = (1, 8, 128, 2048)
"""Tokens per rank: those of the published shares, and one more step size of decoding and one of prefill."""


def shares(run: EvidenceRun) -> str:
    """Layer, communication and their quotient of each series, a table for each panel and each of the two ways in which
    communication is told apart: by periods (steady), and by spans of kernels."""
    tables, series, counts = [], run.series(), []
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
                    counts += [len(layers[key]), len(parts[key])]
                    whole, part = median(layers[key]), median(parts[key])
                    cells = microseconds(whole), microseconds(part), f"{part / whole:.2f}"
                    lines.append(f"| {label} | {tokens} | {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    if not tables:
        return "no layer of this run was timed with and without its exchange"
    return "\n\n".join([*tables, f"Each median is of n = {span(counts)} repeats."])


def stages(run: EvidenceRun) -> str:
    """Our expert stage beside the fastest other one on the same rows, in steady state; above 1 ours is the faster."""
    tables, counts = [], []
    labels = {name: label for name, (label, _) in run.series().items()}
    for panel in run.panels():
        times = run.times_us(Regime.STEADY, panel, phases=(Phase.EXPERTS,))
        lines = [
            f"| tokens per rank, {run.words(panel)}, steady | ours (us) | best other (us) | other / ours |",
            "| ---: | ---: | ---: | ---: |",
        ]
        for tokens in sorted({at for _, at in times}):
            here = {name: each for (name, at), each in times.items() if at == tokens}
            mine = [name for name in here if OUR_STAGE in name.split()]
            others = sorted(here.keys() - set(mine), key=lambda name: median(here[name]))
            if len(mine) != 1 or not others:
                continue
            ours, best = here[mine[0]], here[others[0]]
            counts += [len(ours), len(best)]
            ends = f"[{min(best) / max(ours):.2f}..{max(best) / min(ours):.2f}]"
            lines.append(
                f"| {tokens} | {microseconds(median(ours))} | {labels[others[0]]} {microseconds(median(best))}"
                f" | {median(best) / median(ours):.2f} {ends} |"
            )
        if len(lines) > 2:
            tables.append("\n".join(lines))
    if not tables:
        return "our expert stage stands beside no other in this run"
    return "\n\n".join([*tables, f"Each median is of n = {span(counts)} repeats."])
