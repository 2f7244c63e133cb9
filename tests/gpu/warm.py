"""Compile by running: each point of a sweep once, many runs at a time, so that the sweep itself waits for no compiler.

    python tests/gpu/warm.py [--runs N] [--limit-s SECONDS] [--backends NAME,...] sweep=NAME [words of `epcross run`]

Libraries compile a kernel for each shape when they first meet it, in the process that is to be timed and one after
another: for whole layers that is longer than all timing. Here N runs of few points each share the GPUs. No number of
theirs is kept, and each has locks of its own, as it is beside others on purpose. What fails is told, and is no error:
the sweep will say so itself. --backends names those that compile by shape: what others have is built before any sweep.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from epcross.harness.planning.build import build  # noqa: E402
from epcross.harness.planning.plan import Plan  # noqa: E402
from epcross.harness.planning.tokens import counted  # noqa: E402
from epcross.harness.point import Point  # noqa: E402
from epcross.harness.terms import BackendKind, Regime  # noqa: E402

MOST = 5
"""Points of a run: as starting one takes 10 s, and a kernel 5 to 30."""

_SAME_KERNELS = ("staging",)
"""Options of backends that change no kernel."""


def parts(plan: Plan, most: int = MOST, only: Collection[str] = ()) -> list[Plan]:
    """`plan` in parts of one backend each, of those in `only` if it names any; those of fused layers, which take
    longest to compile, come first."""
    found = []
    for job in plan.jobs:
        for backend in (name for name in job.backends if not only or name in only):
            points = _distinct([point for point in job.points if point.backend == backend])
            for number in range(count := -(-len(points) // most)):
                mine = tuple(points[number::count])
                own = replace(job, backends=(backend,), points=mine)
                found.append(replace(plan, points=mine, impossible=(), jobs=(own,)))
    return sorted(found, key=lambda part: part.points[0].kind is not BackendKind.FUSED)


def _distinct(points: Sequence[Point]) -> list[Point]:
    """One point of those that run the same kernels, in steady state."""
    seen: dict[Point, Point] = {}
    for point in points:
        options = tuple(each for each in point.options if each[0] not in _SAME_KERNELS)
        seen.setdefault(replace(point, options=options, regime=Regime.STEADY), point)
    return [replace(point, regime=Regime.STEADY) for point in seen.values()]


def run_part(file: Path) -> int:
    """Run the part that is stored there; how its rows ended, on stdout."""
    from epcross.harness.running import session as sessions
    from epcross.harness.storing.run_directory import add_floor
    from epcross.harness.storing.store import read_units

    session = sessions.start(Plan.from_json(json.loads(file.read_text())))
    for job in session.plan.jobs:
        add_floor(session.run, job.name, {"ep_size": job.ep_size})  # else it would be measured first
    session.execute()
    rows = [record for unit in read_units(session.run)[0] for record in unit.records]
    for reason in sorted({f"{counted(row.tokens_per_rank)}: {row.reason}" for row in rows if row.status != "ok"}):
        sys.stdout.write(f"  {reason[:300]}\n")
    return 0


def start(number: int, part: Plan, scratch: Path, until: float) -> str:
    """One part in a process of its own; what is to be said of it."""
    folder = scratch / str(number)
    folder.mkdir()
    (folder / "part.json").write_text(json.dumps(replace(part, output_dir=folder).to_json()))
    begin = time.monotonic()
    told = f"{part.points[0].backend} {part.points[0].compute}, {len(part.points)} points"
    if begin > until:
        return f"{told}: left out, the time was over\n"
    environment = {**os.environ, "EPCROSS_LOCKS": str(folder)}
    command = [sys.executable, __file__, "--part", str(folder / "part.json")]
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=until - begin, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{told}: stopped, the time was over\n"
    words = ran.stdout if ran.returncode == 0 else ran.stderr[-600:] + "\n"
    return f"{told}: {time.monotonic() - begin:.0f} s, exit {ran.returncode}\n{words}"


def warmed(plan: Plan, runs: int, limit_s: float, only: Collection[str] = ()) -> Iterator[str]:
    """What is to be said of each part, as they end."""
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="epcross-warm-") as scratch, ThreadPoolExecutor(runs) as pool:
        waiting = [pool.submit(start, n, part, Path(scratch), until) for n, part in enumerate(parts(plan, only=only))]
        for each in waiting:
            yield each.result()


def main() -> int:
    """Read the words and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="at a time")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--backends", default="", help="those to warm; else all of the sweep")
    parser.add_argument("--part", type=Path, help="for itself")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    if given.part:
        return run_part(given.part)
    begin = time.monotonic()
    plan, only = build([*given.words, "timing=warm"]), tuple(filter(None, given.backends.split(",")))
    known = {point.backend for point in plan.points}
    if unknown := [name for name in only if name not in known]:
        parser.error(f"--backends: {unknown[0]} is none of the sweep's, {', '.join(sorted(known))}")
    told_of = {item.point.backend: item.reason for item in plan.impossible}
    gone = [name for name in only if not any(name in job.backends for job in plan.jobs)]
    sys.stdout.write("".join(f"{name}: {told_of.get(name, 'no point can run')}\n" for name in gone))
    for told in warmed(plan, given.runs, given.limit_s, only):
        sys.stdout.write(told)
        sys.stdout.flush()
    sys.stdout.write(f"warm after {time.monotonic() - begin:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
