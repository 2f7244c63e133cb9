"""What a soak showed: how much was verified with each backend, and each failed case with the command that reruns it."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from epcross.harness.analysis.table import WIDTH
from epcross.harness.planning.plan import Plan
from epcross.harness.record import Record
from epcross.harness.terms import Status

RERUN_S = 30
"""Seconds that a printed command gives to one case alone."""

_NO_FAILURE = frozenset({Status.OK, Status.UNSUPPORTED, Status.UNAVAILABLE, Status.SKIPPED})


def verified_rounds(rows: Iterable[Record]) -> int:
    """Rounds whose every output was compared, over all units."""
    return sum(row.verified_rounds or 0 for row in _one_of_each_unit(rows))


def moved_gb(rows: Iterable[Record]) -> float:
    """10^9 bytes of rows and partials that the verified rounds moved, as the timed sets' routing has them."""
    return sum(
        (row.verified_rounds or 0) * (row.pairs_sum or 0) * (row.padded_bytes + row.combine_row_bytes)
        for row in _one_of_each_unit(rows)
    ) / 1e9  # fmt: skip


def failures(rows: Iterable[Record]) -> list[Record]:
    """One row of each unit that found something wrong."""
    return [row for row in _one_of_each_unit(rows) if row.status not in _NO_FAILURE]


def soak_table(rows: Sequence[Record], plan: Plan) -> RenderableType:
    """Cases, minutes in those that ended well, rounds and bytes of each backend."""
    assert plan.soak is not None
    by_backend: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        by_backend[row.backend].append(row)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("backend", overflow="fold")
    for heading in ("cases", "minutes", "rounds verified", "GB moved, about"):
        table.add_column(heading, justify="right")
    table.add_column("how they ended", overflow="fold")
    for name, own in sorted(by_backend.items()):
        table.add_row(*_cells(name, own))
    if len(by_backend) > 1:
        table.add_row(*_cells("all", rows), style="bold")
    return Constrain(Group(Text(f"Soak of {plan.soak.seconds:g} s, seed {plan.soak.seed}", style="bold"), table), WIDTH)


def failure_lines(rows: Iterable[Record], plan: Plan) -> list[str]:
    """Two lines for each failed case: what was wrong, and the command that runs it again, to be printed unbroken."""
    assert plan.soak is not None
    numbers = {point.point_id: number for point, number in zip(plan.points, plan.soak.cases, strict=True)}
    lines: list[str] = []
    for row in failures(rows):
        number = numbers[row.point_id]
        lines.append(f"case {number}, {row.backend}, EP {row.ep_size}: {row.status}: {row.reason}")
        lines.append(f"  again: {rerun(plan, number)}")
    return lines


def rerun(plan: Plan, number: int) -> str:
    """The command that runs case `number` of the soak alone."""
    assert plan.soak is not None
    config: Mapping[str, Any] = plan.config
    changed = ("soak.seconds", "soak.seed", "soak.only", "sweep")
    words = [word for word in config.get("overrides", ()) if word.split("=")[0].lstrip("+") not in changed]
    folders = [f"--config-dir={folder}" for folder in config.get("config_dirs", ())]
    soak = [f"soak.seed={plan.soak.seed}", f"soak.only={number}", f"soak.seconds={RERUN_S}"]
    return shlex.join(["epcross", "run", f"sweep={plan.sweep}", *words, *soak, *folders])


def _cells(name: str, rows: Sequence[Record]) -> list[Text]:
    units = _one_of_each_unit(rows)
    statuses = Counter(row.status for row in units)
    ended = ", ".join(f"{statuses[status]} {status}" for status in Status if statuses[status])
    minutes = f"{sum(row.wall_s or 0 for row in units) / 60:.1f}"
    words = [name, str(len(units)), minutes, f"{verified_rounds(rows):,}", f"{moved_gb(rows):.3g}", ended]
    return [Text(word) for word in words]


def _one_of_each_unit(rows: Iterable[Record]) -> list[Record]:
    """The first row of each unit: what concerns a whole unit stands in all of its rows."""
    units: dict[tuple[str, int], Record] = {}
    for row in rows:
        units.setdefault((row.point_id, row.launch), row)
    return list(units.values())
