"""What the documents say of how near a pair comes to plain copies of what must cross, as Markdown."""

from collections.abc import Mapping
from typing import Any

from epcross.harness.analysis.evidence_run import EvidenceRun, Panel
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.link_bytes import MARGIN, ratio
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import Regime

LARGE_US = 50.0
"""Copies that take less are latency, not bandwidth: nothing is said of them."""

FAR = 0.25
"""What takes longer than copies by more than this share is bound by something else, and left out."""


def best_gbps(floor: Mapping[str, Any], way: str) -> float | None:
    """What a rank's kernels moved at best by stores (`push`) or loads (`pull`), over numbers of blocks."""
    return max(floor.get(f"{way}_gbps_by_blocks", {}).values(), default=None)


def rates(run: EvidenceRun) -> str:
    """How long copies of a rank's rows take at the rates of the floor, and how much longer those steady pairs took that
    move no other bytes; at each number of tokens at which that is bandwidth."""
    lines = [line for panel in run.panels() for line in _of_panel(run, panel)]
    if not lines:
        return "no pair here is so large that copies bound it"
    head = (
        "| tokens per rank, steady | rows pushed, partials pulled (us) | both pushed (us) |"
        " how much longer than either |"
    )
    note = (
        f"Copies at the fastest rates of the floor, of what a rank sends others and gets back. Compared is what moves"
        f" no more than {MARGIN:.0%} beyond that, by the counters, and takes at most {FAR:.0%} longer than the first."
    )
    return "\n".join([head, "| ---: | ---: | ---: | :--- |", *lines, "", note])


def _of_panel(run: EvidenceRun, panel: Panel) -> list[str]:
    floors = [entry for entry in run.floor.values() if entry.get("ep_size") == panel.ep_size]
    push, pull = (best_gbps(floors[0], way) if len(floors) == 1 else None for way in ("push", "pull"))
    if push is None or pull is None:
        return []
    at: dict[int, dict[str, list[Record]]] = {}
    for (name, tokens), rows in run.shown(Regime.STEADY, panel).items():
        if all((share := ratio(row)) is not None and abs(share - 1) <= MARGIN for row in rows):
            at.setdefault(tokens, {})[name] = rows
    lines, labels = [], {name: label for name, (label, _) in run.series().items()}
    for tokens, series in sorted(at.items()):
        row = next(iter(series.values()))[0]
        sent = (row.pairs_sent_remote_max or 0) * row.padded_bytes
        back = (row.pairs_received_remote_max or 0) * row.combine_row_bytes
        copies_us, pushed_us = _us(sent, push) + _us(back, pull), _us(sent, push) + _us(back, push)
        if copies_us >= LARGE_US:
            took_us = {labels[name]: median([row.latency_us or 0.0 for row in rows]) for name, rows in series.items()}
            near = sorted((us, label) for label, us in took_us.items() if us <= (1 + FAR) * copies_us)
            told = "; ".join(f"{label} {us / copies_us - 1:.0%}, {us / pushed_us - 1:.0%}" for us, label in near)
            place = f"{tokens}, {run.words(panel)}"
            if told:
                lines.append(f"| {place} | {microseconds(copies_us)} | {microseconds(pushed_us)} | {told} |")
    return lines


def _us(size_bytes: float, gbps: float) -> float:
    """GB/s are 1e3 bytes a microsecond."""
    return size_bytes / gbps / 1e3
