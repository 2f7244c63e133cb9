"""Rows of one point taken again, beside those that are stored."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record
from epcross.harness.terms import Status

_LAUNCHES_SHOWN = 6
_SAME = ("measure_hash", "backend_version", "machine", "flags")
"""What should be equal where two times are held against each other."""


def beside_table(now: Iterable[Record], stored: Iterable[Record]) -> Table:
    """One line for each phase, seed and chain: the new time, the stored ones of each launch, and their ratio."""
    before: dict[tuple[str, int, int], list[Record]] = {}
    for row in sorted(stored, key=lambda row: row.launch):
        before.setdefault((row.phase, row.seed, row.chain), []).append(row)
    table = Table(expand=True)
    for heading in ("phase", "seed", "chain"):
        table.add_column(heading)
    table.add_column("now (us)", justify="right")
    table.add_column("stored (us), one for each launch", ratio=1)
    table.add_column("now / stored", justify="right")
    for row in now:
        old = before.get((row.phase, row.seed, row.chain), [])
        times = [other.latency_us for other in old if other.latency_us is not None]
        ratio = f"{row.latency_us / median(times):.2f}" if row.latency_us is not None and times else ""
        words = [_time(other) for other in old[:_LAUNCHES_SHOWN]] + ["..."] * (len(old) > _LAUNCHES_SHOWN)
        cells = (row.phase, str(row.seed), str(row.chain), _time(row), "  ".join(words) or "none", ratio)
        table.add_row(*map(Text, cells))
    return table


def differences(now: Sequence[Record], stored: Sequence[Record]) -> list[str]:
    """Sentences on why the two are not the same measurement, and on rows that are not ok."""
    lines = []
    for name in _SAME:
        new, old = ({_short(name, row) for row in rows if row.status == Status.OK} for rows in (now, stored))
        if new and old and new != old:
            lines.append(f"{name} differs: now {', '.join(sorted(new))}; stored {', '.join(sorted(old))}")
    for title, rows in (("now", now), ("stored", stored)):
        reasons = dict.fromkeys((row.status, row.reason or "") for row in rows if row.status != Status.OK)
        lines += [f"{title} {status}: {reason}" for status, reason in reasons]
    return lines


def _short(name: str, row: Record) -> str:
    value = str(getattr(row, name) or "none")
    return value if name == "flags" else value[:12]  # the others are hashes


def _time(row: Record) -> str:
    return row.status if row.latency_us is None else microseconds(row.latency_us)
