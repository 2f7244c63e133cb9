"""`epcross plan`: what a sweep would run, what it cannot run and why, and what it needs. Runs nothing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from epcross.harness.commands import config_dir_option, console, json_option, overrides_argument

if TYPE_CHECKING:
    from epcross.harness.planning.estimate import Need
    from epcross.harness.planning.plan import Plan
    from epcross.harness.point import Point

MOST_REASONS = 20
"""Lines of the table of impossible points."""


@click.command("plan", short_help="Show what a sweep would run and what it needs.")
@overrides_argument
@config_dir_option
@json_option
def command(overrides: tuple[str, ...], config_dirs: tuple[Path, ...], as_json: bool) -> None:
    """Show what a sweep would do, without running anything: points, jobs, what cannot run and why, and the need in
    time, memory and /dev/shm.

    Words follow Hydra's grammar: a factor runs over the given values instead of the sweep's own.

    \b
    Example: epcross plan sweep=quickstart model=qwen3_235b tokens_per_rank=1,8,32
    """
    from epcross.harness.planning.build import build
    from epcross.harness.planning.estimate import free_shm_bytes, needs
    from epcross.harness.planning.plan import SLURM

    plan = build(overrides, config_dirs)
    if plan.launcher.name == SLURM:
        from epcross.harness.slurm.plan_view import show

        return show(plan, as_json, _print_points)
    need, free_bytes = needs(plan), free_shm_bytes()
    if as_json:
        document = {
            **plan.to_json(),
            "need": [job.to_json() for job in need],
            "shm_free_bytes": free_bytes,
        }
        click.echo(json.dumps(document))
        return None
    _print(plan, need, free_bytes)
    return None


def _print(plan: "Plan", need: tuple["Need", ...], free_bytes: int | None) -> None:
    _print_points(plan)
    out = console()
    out.print(_jobs_table(plan, need))
    out.print(f"Time in all about {duration(sum(job.time_s for job in need))}; results go to {plan.output_dir}")
    most = max((job.shm_bytes for job in need), default=0)
    if free_bytes is None:
        out.print("/dev/shm is absent on this machine.")
    elif most > free_bytes:
        out.print(
            f"/dev/shm is too small: {size(most)} needed, {size(free_bytes)} free. Lower max_tokens_per_rank or "
            "ep_size, or enlarge it (docker run --shm-size, or mount -o remount,size=)."
        )
    else:
        out.print(f"/dev/shm: {size(most)} needed at most, {size(free_bytes)} free.")


def _print_points(plan: "Plan") -> None:
    out = console()
    out.print(Text(f"{plan.sweep}: {plan.description}"))
    if plan.points:
        out.print(_points_table(plan.points))
    timing = plan.timing
    out.print(
        f"{len(plan.points)} points, {len(plan.impossible)} of them impossible; each possible one "
        f"{timing.launches} launches x {timing.seeds} seeds x {timing.chains} chains"
    )
    if absent := plan.config.get("absent_backends"):
        out.print(Text(absent_text(absent)))
    if plan.impossible:
        out.print(_impossible_table(plan))


def absent_text(names: Iterable[str]) -> str:
    """What to say of backends that a sweep is about and that no file describes."""
    return f"Left out, since there is no such backend: {', '.join(names)}. `epcross backends` lists what there is."


def _points_table(points: tuple["Point", ...]) -> Table:
    varied = _varied(points)
    tokens: dict[tuple[str, ...], list[str]] = {}
    for point in points:
        key = (point.backend, str(point.ep_size), point.model.name, varied[point], str(point.regime))
        tokens.setdefault(key, []).append(_tokens(point))
    # regimes that run the same tokens share a line
    lines: dict[tuple[str, ...], list[str]] = {}
    for (*columns, regime), words in tokens.items():
        lines.setdefault((*columns, shortened(dict.fromkeys(words))), []).append(regime)

    table = Table(expand=True)
    # what varies needs the room more than a long name does
    widest = {"model": 16, "regime": 12} if any(varied.values()) else {}
    for heading in ("backend", "EP", "model", "regime"):
        table.add_column(heading, max_width=widest.get(heading), overflow="fold")
    if any(varied.values()):
        table.add_column("varied", ratio=2)
    table.add_column("tokens per rank", ratio=1)
    for (backend, ep_size, model, other, listed), regimes in lines.items():
        cells = [backend, ep_size, model, " ".join(regimes), *([other] if any(varied.values()) else []), listed]
        table.add_row(*map(Text, cells))
    return table


def _tokens(point: "Point") -> str:
    from epcross.harness.planning.tokens import nominal_words

    if set(point.tokens) == {point.tokens_per_rank}:
        return str(point.tokens_per_rank)
    listed = ",".join(map(str, point.tokens[:8])) + (",..." if len(point.tokens) > 8 else "")
    nominal = nominal_words(point.tokens_per_rank, min(point.tokens), sum(point.tokens), point.ep_size)
    return f"{nominal} [{listed}]"


def _varied(points: tuple["Point", ...]) -> dict["Point", str]:
    """For each point, what differs between points besides the table's own columns; options within a backend."""
    from epcross.harness.analysis.inputs import option_words

    facts = {point: _facts(point) for point in points}
    seen: dict[tuple[str, str], set[object]] = {}
    for point, named in facts.items():
        for name, value in named.items():
            seen.setdefault((name, point.backend if name.startswith("option ") else ""), set()).add(value)
    varying = {key for key, values in seen.items() if len(values) > 1}
    return {
        point: " ".join(
            option_words(name.removeprefix("option "), value) if name.startswith("option ") else f"{name}={value}"
            for name, value in named.items()
            if (name, point.backend if name.startswith("option ") else "") in varying and value is not None
        )
        for point, named in facts.items()
    }


def _facts(point: "Point") -> dict[str, object]:
    facts: dict[str, object] = {
        "routing": point.routing.kind,
        # 0: the routing does not use it
        "exponent": point.routing.exponent or None,
        "hot_fraction": point.routing.hot_fraction or None,
        "masked_fraction": point.routing.masked_fraction or None,
        "placement": point.placement.kind,
        "num_slots": point.placement.num_slots,
        "format": point.dispatch_format,
        "combine_format": point.combine_format,
        "compute": point.compute or None,
        "weights": point.weight_format,
        "domain": point.domain,
        "scope": point.scope,
    }
    stage = {f"option {name}": value for name, value in point.compute_options}
    return facts | stage | {f"option {name}": value for name, value in point.options}


def _impossible_table(plan: "Plan") -> Table:
    table = Table(expand=True, title="Impossible", title_justify="left")
    for heading in ("backend", "status", "points"):
        table.add_column(heading)
    table.add_column("reason", ratio=1)
    groups: dict[tuple[str, str, str], int] = {}
    for item in plan.impossible:
        key = (item.point.backend, str(item.status), item.reason)
        groups[key] = groups.get(key, 0) + 1
    for (backend, status, reason), count in list(groups.items())[:MOST_REASONS]:
        table.add_row(*map(Text, (backend, status, str(count), reason)))
    if len(groups) > MOST_REASONS:
        table.caption = f"and {len(groups) - MOST_REASONS} more reasons; --json has all"
    return table


def _jobs_table(plan: "Plan", need: tuple["Need", ...]) -> Table:
    table = Table(expand=True, title="Jobs", title_justify="left")
    table.add_column("EP")
    table.add_column("backends", overflow="fold")  # without a ratio, which leaves a letter on a narrow terminal
    for heading in ("points", "rows", "time", "memory per rank", "/dev/shm"):
        table.add_column(heading, justify="right", overflow="fold")
    for job, job_need in zip(plan.jobs, need, strict=True):
        table.add_row(
            str(job.ep_size),
            Text(", ".join(job.backends) or "floor only"),
            str(len(job.points)),
            str(job_need.rows),
            duration(job_need.time_s),
            size(job_need.rank_memory_bytes),
            size(job_need.shm_bytes),
        )
    return table


def shortened(words: Iterable[str], limit: int = 24) -> str:
    """Words joined by spaces; of a long list the first, the last and how many."""
    listed = list(words)
    if len(listed) <= limit:
        return " ".join(listed)
    return f"{' '.join(listed[: limit // 2])} ... {listed[-1]} ({len(listed)} values)"


def duration(time_s: float) -> str:
    """Seconds as a person reads them: 4 s, 12 min, 3.5 h."""
    if time_s < 120:
        return f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 7200 else f"{time_s / 3600:.1f} h"


def size(size_bytes: int) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
