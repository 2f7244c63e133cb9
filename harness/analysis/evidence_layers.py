"""What the documents say of a committed run of layers or expert stages, as Markdown: how much of each layer is
communication, and our expert stage beside the best of the others."""

import itertools
from collections.abc import Sequence

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_leads import leaders
from epcross.harness.analysis.evidence_run import EvidenceRun, Panel
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.terms import Phase, Regime

OUR_STAGE = "compute=gather_gemm"
_READ_AND_WRITTEN = 2
"""A copy moves each byte over the memory's pins twice."""

BY_EXPERT = "layout=expert_major"
"""As series are named that differ in their stage, and in how rows lie."""

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


def bound(run: EvidenceRun) -> str:
    """How long it takes to read the weights of the experts that were chosen, once, at the rate at which the floor's
    copies within the GPU's memory read and write; and by how much a layer that does nothing else would pass the best of
    the others."""
    tables: dict[Panel, list[str]] = {}
    for panel, regime, tokens, (ours, other) in leaders(run):
        rates = [entry["device_copy_gbps"] for entry in run.floor.values() if entry.get("ep_size") == panel.ep_size]
        read = [row.expert_weight_bytes for row in run.shown(regime, panel)[ours[0], tokens] if row.expert_weight_bytes]
        if regime is not Regime.STEADY or len(rates) != 1 or not read:
            continue
        heads = [
            f"| tokens per rank, {run.words(panel)}, steady | weights to read (GB) | their reading alone (us) "
            "| ours (us) | best other (us) | other / reading alone |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        read_us = median(read) / (_READ_AND_WRITTEN * rates[0] * 1e3)
        ours_us, other_us = (median([us for call in calls for us in call]) for _, calls in (ours, other))
        times = map(microseconds, (read_us, ours_us, other_us))
        cells = [f"{median(read) / 1e9:.3g}", *times, f"{other_us / read_us:.2f}"]
        tables.setdefault(panel, heads).append(f"| {tokens} | {' | '.join(cells)} |")
    if not tables:
        return "no layer of ours stands beside another in this run"
    return "\n\n".join(map("\n".join, tables.values()))


def stages(run: EvidenceRun) -> str:
    """Our expert stage beside the fastest other one, in steady state: on the same rows, and on rows that an exchange
    has already brought to each expert's place, which ours would gather; above 1 ours is the faster."""
    tables, counts = [], []
    labels = {name: label for name, (label, _) in run.series().items()}
    for panel in run.panels():
        times = run.times_us(Regime.STEADY, panel, phases=(Phase.EXPERTS,))
        lines = [
            f"| tokens per rank, {run.words(panel)}, steady | ours (us) | best other, same rows (us) | other / ours "
            "| best, rows by expert (us) | other / ours |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for tokens in sorted({at for _, at in times}):
            here = {name: each for (name, at), each in times.items() if at == tokens}
            mine = [name for name in here if OUR_STAGE in name.split()]
            others = sorted(here.keys() - set(mine), key=lambda name: median(here[name]))
            if len(mine) != 1 or not others:
                continue
            ours = here[mine[0]]
            cells = [str(tokens), microseconds(median(ours))]
            for wanted in (False, True):
                best = next((name for name in others if (BY_EXPERT in name.split()) is wanted), None)
                cells += ["-", "-"] if best is None else [_timed(labels[best], here[best]), _ratio(here[best], ours)]
                counts += [] if best is None else [len(here[best]), len(ours)]
            lines.append(f"| {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    if not tables:
        return "our expert stage stands beside no other in this run"
    return "\n\n".join([*tables, f"Each median is of n = {span(counts)} repeats."])


def _timed(label: str, times: Sequence[float]) -> str:
    """The stage alone of a label, and its median."""
    stage = next((word.removeprefix("compute=") for word in label.split() if word.startswith("compute=")), label)
    return f"{stage} {microseconds(median(times))}"


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Of medians, and between the ends of both ranges."""
    ends = f"[{min(above) / max(below):.2f}..{max(above) / min(below):.2f}]"
    return f"{median(above) / median(below):.2f} {ends}"
