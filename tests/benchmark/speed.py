"""The speed of the CPU kernels against each other, gloo and the floor: ratios of medians within one run.

    python tests/benchmark/speed.py [RUN]

Judges RUN, a run of sweeps/speed.yaml, or makes one. Prints one line for each goal and fails if one is missed. Not a
test: on a busy machine a goal can be missed by nobody's fault. Use a quiet machine with two free cores.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from epcross.harness.record import Record
from epcross.harness.storing.store import open_run, read_floor, read_units
from epcross.harness.terms import Phase, Regime, Status

HARNESS_LIMIT_MS = 150.0
"""Generating, verifying, preparing and storing one point of 1 token, apart from the timed pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One ratio and the least it must be."""

    words: str
    value: float
    least: float


def main(arguments: list[str]) -> int:
    """Run if no run is given, judge, and return the exit code."""
    path = Path(arguments[0]) if arguments else _new_run()
    run = open_run(path)
    results, problems = read_units(run)
    rows = [record for result in results for record in result.records]
    wrong = [f"{r.backend}: {r.reason}" for r in rows if r.status != Status.OK]
    console = Console(width=100)
    for words in [*map(str, problems), *sorted(set(wrong))]:
        console.print(f"not judged: {words}", soft_wrap=True, markup=False)
    goals = _goals(rows, (read_floor(run) or {})["cpu_ep2"]["copy_gbps"])
    table = Table("goal", "value", "at least", "", title=f"run {run.run_id}", title_justify="left")
    for goal in goals:
        table.add_row(
            goal.words, f"{goal.value:.2f}", f"{goal.least:.2f}", "met" if goal.value >= goal.least else "MISSED"
        )
    console.print(table)
    return int(bool(wrong) or any(goal.value < goal.least for goal in goals))


def _goals(rows: list[Record], copy_gbps: float) -> list[Goal]:
    def us(backend: str, tokens: int, regime: Regime = Regime.STEADY, phase: Phase = Phase.ROUND_TRIP) -> float:
        return median(r.latency_us or 0.0 for r in _matching(rows, backend, tokens, regime, phase))

    def dispatch(backend: str) -> float:
        return us(backend, 512, Regime.ENTRY, Phase.DISPATCH)

    with_gloo = []
    if any(r.backend == "gloo" and r.status == Status.OK for r in rows):
        with_gloo = [
            Goal(
                words="shm_sentinel over gloo, steady, 1 token", value=us("gloo", 1) / us("shm_sentinel", 1), least=3.0
            ),
            Goal(
                words="shm_fence over gloo, dispatch, 512 tokens",
                value=dispatch("gloo") / dispatch("shm_fence"),
                least=1.0,
            ),
        ]
    one = _matching(rows, "shm_fence", 512, Regime.ENTRY, Phase.DISPATCH)[0]
    moved_bytes = (one.pairs_sum or 0) * one.padded_bytes
    fence_gbps = moved_bytes / dispatch("shm_fence") / 1e3

    def ratio(tokens: int) -> float:
        return us("shm_fence", tokens) / us("shm_sentinel", tokens)

    return [
        *with_gloo,
        Goal(words="shm_fence dispatch at 512 tokens over the floor's copy", value=fence_gbps / copy_gbps, least=0.6),
        Goal(
            words="shm_fence over shm_two_sided, dispatch, 512 tokens",
            value=dispatch("shm_two_sided") / dispatch("shm_fence"),
            least=1.0,
        ),
        Goal(words="the protocols cross: sentinel over fence, 1 token", value=ratio(1), least=1.0),
        Goal(words="the protocols cross: fence over sentinel, 512 tokens", value=1 / ratio(512), least=1.0),
        Goal(
            words="fixed cost: 4 times 1 token over 4 tokens (sentinel)",
            value=us("shm_sentinel", 1) / us("shm_sentinel", 4) * 4,
            least=1.0,
        ),
        Goal(
            words="bandwidth: 512 tokens over 128 (fence)",
            value=us("shm_fence", 512) / us("shm_fence", 128),
            least=3.0,
        ),
        Goal(
            words="harness at 1 token: 150 ms over what it takes",
            value=HARNESS_LIMIT_MS / _overhead_ms(rows),
            least=1.0,
        ),
    ]


def _overhead_ms(rows: list[Record]) -> float:
    """Median wall time of units of 1 token minus their timed pairs, worst backend of our own."""
    worst = 0.0
    for backend in ("shm_fence", "shm_sentinel", "shm_two_sided"):
        units: dict[tuple[str, int], float] = {}
        for r in rows:
            if r.backend == backend and r.tokens_per_rank == 1 and r.phase == Phase.ROUND_TRIP:
                key = (r.point_id, r.launch)
                timed_ms = r.pairs * (r.latency_us or 0.0) / 1e3
                units[key] = units.get(key, (r.wall_s or 0.0) * 1e3) - timed_ms
        worst = max(worst, median(units.values()))
    return worst


def _matching(rows: list[Record], backend: str, tokens: int, regime: Regime, phase: Phase) -> list[Record]:
    found = [
        r
        for r in rows
        if (r.backend, r.tokens_per_rank, r.regime, r.phase, r.status) == (backend, tokens, regime, phase, Status.OK)
    ]
    if not found:
        sys.exit(f"no ok row of {backend}, {regime} {phase}, {tokens} tokens: is this a run of sweeps/speed.yaml?")
    return found


def _new_run() -> Path:
    command = [sys.executable, "-m", "epcross.harness.cli", "run", "sweep=speed", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = ended.stdout.strip().splitlines()
    if not lines:
        sys.exit(ended.returncode or 1)

    return Path(json.loads(lines[-1])["path"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
