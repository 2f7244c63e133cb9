"""What crossed NVLink by NVML's counters, beside what had to: whether the two agree, and if not, why."""

from dataclasses import asdict

from epcross.harness.analysis.factors import telling
from epcross.harness.analysis.material import Material
from epcross.harness.analysis.table import Footnotes
from epcross.harness.measuring.link_bytes import MARGIN, ratio, wire_bytes
from epcross.harness.record import Record
from epcross.harness.report.document import Block, Paragraph, Table
from epcross.harness.terms import Phase, Status


def links(material: Material) -> list[Block]:
    """A line on all points, and a table of each; nothing where no row was to be counted."""
    units: dict[tuple[str, str, int], Record] = {}
    for row in material.records:
        if row.phase == Phase.ROUND_TRIP and row.status == Status.OK and (row.nvlink_tx_bytes or row.nvlink_note):
            units.setdefault((row.run_id, row.point_id, row.launch), row)
    if not units:
        return []
    found = sorted(units.values(), key=lambda row: (row.run_id, row.backend, row.ep_size, row.tokens_per_rank))
    counted = [row for row in found if ratio(row) is not None]
    agree = sum(row.nvlink_note is None for row in counted)
    footnotes = Footnotes()
    told = telling([asdict(row) for row in found], ("run_id", "regime"))
    varied = any(told)
    lines = [_line(row, [words] * varied, footnotes) for row, words in zip(found, told, strict=True)]
    words = f"NVML's counters agree with wire_bytes within {MARGIN:.0%} in {agree} of {len(counted)} counted units"
    silent = sum(row.nvlink_tx_bytes is None for row in found)
    if silent:
        words += f"; in {silent} more nothing was counted"
    if coarse := len(found) - len(counted) - silent:
        words += (
            f"; {coarse} more cannot be told, since their rows hold the bytes that had to cross rounded to whole pairs"
        )
    return [
        Paragraph(text=f"{words}."),
        Table(
            name="links",
            title="Bytes of a pair over NVLink, all ranks together",
            head=[
                "backend",
                *["varied"] * varied,
                "EP",
                "tokens",
                "launch",
                "wire_bytes",
                "sent",
                "received",
                "sent / wire",
            ],
            rows=lines,
            notes=[
                *footnotes.lines(),
                "wire_bytes are rows with scales, and partials back, without ids, weights and protocol; counters are "
                "read before and after a chain of pairs that is not timed",
            ],
            numbers=True,
        ),
    ]


def _line(row: Record, factors: list[str], footnotes: Footnotes) -> list[str]:
    share = ratio(row)
    mark = f" {footnotes.mark(row.nvlink_note)}" if row.nvlink_note else ""
    return [
        row.backend,
        *factors,
        str(row.ep_size),
        str(row.tokens_per_rank),
        str(row.launch),
        f"{wire_bytes(row):.0f}",
        *("-" if size is None else str(size) for size in (row.nvlink_tx_bytes, row.nvlink_rx_bytes)),
        ("-" if share is None else f"{share:.3f}") + mark,
    ]
