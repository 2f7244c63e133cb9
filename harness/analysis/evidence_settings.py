"""What the documents say of how each series ran: library, SMs, memory, window and enqueuing, as Markdown."""

from collections.abc import Collection

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_run import TIMED, EvidenceRun, names
from epcross.harness.record import Record
from epcross.harness.storing.rows import join_words

NOT_TOLD = "not told"
"""Stands where a library says nothing."""

_ENQUEUED = {
    "graph": "replayed CUDA graphs",
    "eager": "single calls: the host waits within",
    "host": "calls of a loop on the CPU",
}
"""Of the column `enqueued`: what no graph can hold is called in a loop (`harness/measuring/cuda_timing.py`)."""


def settings(run: EvidenceRun) -> str:
    """A line for each series, of the rows that its numbers rest on."""
    rows = [row for row in run.headline_rows() if row.regime in TIMED]
    name_of, series = names(run.rows), run.series()
    windows = [frozenset((row.boundary or "").split()) for row in rows]
    common = frozenset.intersection(*windows)
    lines = [
        "| series | library | SMs | held per rank, at its most tokens per rank"
        f" | in its window besides {join_words(common) or 'nothing in common'} | enqueued as |",
        "| :--- | :--- | ---: | ---: | :--- | :--- |",
    ]
    for name, (label, _) in series.items():
        own = [row for row in rows if name_of(row) == name]
        versions = ", ".join(sorted({str(row.backend_version or NOT_TOLD) for row in own}))
        ways = "; ".join(sorted({_ENQUEUED.get(row.enqueued or "", row.enqueued or NOT_TOLD) for row in own}))
        lines.append(f"| {label} | {versions} | {_sms(own)} | {_held(own)} | {_besides(own, common)} | {ways} |")
    return "\n".join(lines)


def _sms(rows: Collection[Record]) -> str:
    told = {row.num_sms for row in rows if row.num_sms}
    return span(told) if told else NOT_TOLD


def _held(rows: Collection[Record]) -> str:
    """Memory at the largest size, which the rows' widest format needs."""
    sizes = [(row.tokens_per_rank, row.ep_size, row.workspace_bytes) for row in rows if row.workspace_bytes]
    if not sizes:
        return NOT_TOLD
    tokens, ep_size, held_bytes = max(sizes)
    at = f"{tokens}, EP {ep_size}" if len({row.ep_size for row in rows}) > 1 else str(tokens)
    return f"{_bytes(held_bytes)} at {at}"


def _bytes(count: int) -> str:
    """Three digits of kB, MB or GB (powers of 1000)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if float(f"{count:.3g}") >= size:
            return f"{count / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{count} bytes"


def _besides(rows: Collection[Record], common: frozenset[str]) -> str:
    found = {join_words(set((row.boundary or "").split()) - common) or "nothing" for row in rows}
    return "; or ".join(sorted(found))
