"""What the documents say of a committed run of layers or expert stages, as Markdown: how much of each layer is
communication, and our expert stage beside the best of the others."""

import itertools
from collections.abc import Iterable, Sequence

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_leads import PAIRED, Turns, by_turn, in_shared_turns, leaders, middle, ratio_of
from epcross.harness.analysis.evidence_run import EvidenceRun, Panel
from epcross.harness.analysis.inputs import LAYOUT, option_words
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import Phase, Regime
from epcross.kernels.experts.formats import Layout

OUR_STAGE = "compute=gather_gemm"
_WAYS = (Regime.STEADY, Regime.SPANS)
"""In which communication is told apart."""

MEMORY_GBPS = {"NVIDIA H200": 4800.0, "NVIDIA H100 80GB HBM3": 3350.0}
"""Nominal bandwidth of a GPU's memory, in 10^9 bytes per second, by the name that the driver gives it. Source: NVIDIA's
data sheets of H200 and H100 (SXM)."""

BY_EXPERT = option_words(LAYOUT, Layout.EXPERT_MAJOR)
"""As series are named that differ in their stage, and in how rows lie."""

SHOWN = (1, 8, 128, 2048)
"""Tokens per rank: those of the published shares, and one more step size of decoding and one of prefill."""


def shares(run: EvidenceRun) -> str:
    """Layer, communication and their quotient of each series, a table for each panel and each of the two ways in which
    communication is told apart: by periods (steady), and by spans of kernels. Communication is that of the rank which
    waits least, since that of others holds what they wait for weights that this one reads; and as rows have it, waiting
    included."""
    tables, series, counts = [], run.series(), []
    for panel, regime in itertools.product(run.panels(), _WAYS):
        layers, parts = (run.shown(regime, panel, phases=(phase,)) for phase in (Phase.LAYER, Phase.LAYER_COMM))
        lines = [
            f"| {run.words(panel)}, {regime} | tokens per rank | layer (us) | communication, rank that waits least (us)"
            " | share | with waiting (us) | share |",
            "| :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, (label, _) in series.items():
            for tokens in SHOWN:
                key = name, tokens
                if key in layers and key in parts:
                    counts += [len(layers[key]), len(parts[key])]
                    whole, least, part = _columns(layers[key], parts[key])
                    cells = [microseconds(median(whole))]
                    for each in (least, part):
                        ends = f"[{microseconds(min(each))}..{microseconds(max(each))}]"
                        cells += [f"{microseconds(median(each))} {ends}", f"{median(each) / median(whole):.2f}"]
                    lines.append(f"| {label} | {tokens} | {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    if not tables:
        return "no layer of this run was timed with and without its exchange"
    rows = [row for phase in (Phase.LAYER, Phase.LAYER_COMM) for row in run.headline_rows(phases=(phase,))]
    ways = "; ".join(sorted({f"{row.regime}: {row.estimator}" for row in rows if row.regime in _WAYS}))
    told = f"Each median is of n = {span(counts)} repeats. Waiting included, {ways}."
    if any(row.regime == Regime.SPANS and row.n_samples > 1 for row in rows):
        told += " Of spans the rank that waits least is that of the pair in which it waits least, too."
    return "\n\n".join([*tables, told])


def _columns(layers: Sequence[Record], parts: Sequence[Record]) -> tuple[list[float], list[float], list[float]]:
    whole, part = ([row.latency_us for row in rows if row.latency_us is not None] for rows in (layers, parts))
    return whole, [row.latency_min_us for row in parts if row.latency_min_us is not None], part


def bound(run: EvidenceRun) -> str:
    """How long it takes to read the weights of the experts that were chosen, once, at the nominal rate of the GPU's
    memory; and how much longer the best of the others takes, which no layer that reads them can pass by more."""
    gpus = {gpu.get("name") for gpu in run.run.environment.get("gpus") or ()}
    rate = MEMORY_GBPS.get(next(iter(gpus))) if len(gpus) == 1 else None
    if rate is None:
        return f"the nominal rate of this memory is not known here: {', '.join(sorted(map(str, gpus))) or 'no GPU'}"
    tables: dict[Panel, list[str]] = {}
    for panel, regime, tokens, (ours, other) in leaders(run):
        read = [row.expert_weight_bytes for row in run.shown(regime, panel)[ours[0], tokens] if row.expert_weight_bytes]
        if regime is not Regime.STEADY or not read:
            continue
        heads = [
            f"| tokens per rank, {run.words(panel)}, steady | weights to read (GB) | at {rate / 1e3:g} TB/s (us) "
            "| ours (us) | best other (us) | other / reading alone |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        read_us = median(read) / (rate * 1e3)
        ours_us, other_us = (_median(turns) for _, turns in (ours, other))
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
        times = by_turn(run, panel, Regime.STEADY)
        lines = [
            f"| tokens per rank, {run.words(panel)}, steady | ours (us) | best other, same rows (us) | other / ours "
            "| best, rows by expert (us) | other / ours |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for tokens in sorted({at for _, at in times}):
            here = {name: turns for (name, at), turns in times.items() if at == tokens}
            mine = [name for name in here if OUR_STAGE in name.split()]
            if len(mine) != 1 or len(here) == 1:
                continue
            cells = [str(tokens), microseconds(_median(here[mine[0]].values()))]
            for wanted in (False, True):
                rivals = {
                    name: pair
                    for name in here
                    if name != mine[0] and (BY_EXPERT in name) is wanted
                    if (pair := in_shared_turns(here[name], here[mine[0]]))[0]
                }
                best = min(rivals, key=lambda name: middle(*rivals[name]), default=None)
                if best is None:
                    cells += ["-", "-"]
                    continue
                cells += [_timed(labels[best], rivals[best][0]), ratio_of(*rivals[best])]
                counts += [sum(map(len, turns)) for turns in rivals[best]]
            lines.append(f"| {' | '.join(cells)} |")
        if len(lines) > 2:
            tables.append("\n".join(lines))
    if not tables:
        return "our expert stage stands beside no other in this run"
    return "\n\n".join([*tables, f"Each median is of n = {span(counts)} repeats. {PAIRED}"])


def _timed(label: str, turns: Turns) -> str:
    """The stage alone of a label, and its median."""
    stage = next((word.removeprefix("compute=") for word in label.split() if word.startswith("compute=")), label)
    return f"{stage} {microseconds(_median(turns))}"


def _median(turns: Iterable[Sequence[float]]) -> float:
    return median([us for turn in turns for us in turn])
