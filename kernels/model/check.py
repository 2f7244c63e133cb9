"""Prove the protocols: `python -m epcross.kernels.model.check`.

Every run is an exhaustive search by spin. Those of the protocols as implemented must hold; each seeded fault must be
found, in the way that is expected of it. `--traces DIR` writes a shortest trace of every fault, `--long` adds searches
that take minutes and 1.6 GB. Exit status 0 only if every run ends as expected.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from epcross.kernels.model import trace
from epcross.kernels.model.runs import FAULTS, LONG, PROOFS, Run, Verdict

SOURCES = Path(__file__).parent
COMPILERS = ("gcc", "cc", "clang")
RUN_LIMIT_S = 1200.0
MEMORY_LIMIT_MB = 6000
CORES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the checker said of a run."""

    run: Run
    verdict: Verdict
    states: int
    transitions: int
    depth: int
    memory_mb: float
    seconds: float
    trace: str  # empty if nothing was found

    @property
    def expected(self) -> bool:
        """Whether it ended as it must."""
        return self.verdict is self.run.expects


class CheckError(RuntimeError):
    """The checker did not come to an end, or cannot run here."""


def unavailable() -> str | None:
    """Why the check cannot run here; None if it can."""
    if shutil.which("spin") is None:
        return "the model checker spin is not installed (Debian: apt-get install spin)"
    if _compiler() is None:
        return f"spin needs a C compiler, and none of {', '.join(COMPILERS)} is on PATH (Debian: apt-get install gcc)"
    return None


def check(run: Run) -> Outcome:
    """Search all states of one run. Raises CheckError if that cannot be finished."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epcross-model-") as name:
        folder = Path(name)
        for source in SOURCES.glob("*.pml"):
            shutil.copy(source, folder)
        _call(folder, "spin", *run.arguments(), "-a", f"{run.protocol}.pml")
        # A fault's trace is made as short as it can be (-i); that mode wants REACH. Its few states are searched in
        # less time than an optimiser takes.
        seeks = run.expects is not Verdict.HOLDS
        options = ("-DREACH",) if seeks else ("-DCOLLAPSE",)
        sizes = ("-DSAFETY", "-DNOFAIR", "-DVECTORSZ=2048", f"-DMEMLIM={MEMORY_LIMIT_MB}")
        _call(folder, _compiler() or "cc", "-O0" if seeks else "-O1", "-w", *options, *sizes, "-o", "pan", "pan.c")
        said = _call(folder, "./pan", "-m100000", "-w22", *(("-i",) if seeks else ()))
        found = bool(list(folder.glob("*.trail")))
        replay = _call(folder, "./pan", "-r", check=False) if found else ""
    for sign in ("max search depth too small", "out of memory", "Search not completed"):
        if sign in said and not found:
            raise CheckError(f"{run.protocol}, {run.name}: the search is not complete: {sign}")
    return Outcome(
        run=run,
        verdict=trace.verdict(replay),
        states=int(_number(r"(\d+) states, stored", said)),
        transitions=int(_number(r"(\d+) transitions", said)),
        depth=int(_number(r"depth reached (\d+)", said)),
        memory_mb=_number(r"([\d.]+)\s+total actual memory", said),
        seconds=time.monotonic() - start,
        trace=trace.readable(run, replay) if found else "",
    )


def check_all(runs: tuple[Run, ...], cores: int = CORES) -> list[Outcome]:
    """Check the runs, some at a time; outcomes in their order."""
    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(check, runs))


def table(outcomes: list[Outcome]) -> str:
    """One line a run, 87 columns; what failed is said below."""
    lines = [f"{'protocol':13}{'run':29}{'size':10}{'states':>10}{'transitions':>13}{'MB':>6}{'s':>6}"]
    for o in outcomes:
        lines.append(
            f"{o.run.protocol:13}{o.run.name:29}{o.run.size:10}{o.states:>10,}{o.transitions:>13,}"
            f"{o.memory_mb:>6.0f}{o.seconds:>6.0f}"
        )
        if o.run.expects is not Verdict.HOLDS:
            lines.append(f"{'':13}found: {o.verdict}")
    wrong = [o for o in outcomes if not o.expected]
    lines += [f"! {o.run.protocol}, {o.run.name}: expected: {o.run.expects}; is: {o.verdict}" for o in wrong]
    lines.append("sizes: ranks x tokens x rounds; a fault's search goes on for a shorter trace, so it revisits states")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run everything, print the table, keep the traces if asked to."""
    parser = argparse.ArgumentParser(prog="python -m epcross.kernels.model.check", description="Prove the protocols.")
    parser.add_argument("--long", action="store_true", help="add the searches that take minutes, and 1.6 GB")
    parser.add_argument("--traces", type=Path, help="write the trace of every fault into this folder")
    chosen = parser.parse_args(arguments)
    if why := unavailable():
        sys.stderr.write(f"{why}\n")
        return 2
    try:
        outcomes = check_all((LONG if chosen.long else ()) + PROOFS + FAULTS)
    except CheckError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(table(outcomes) + "\n")
    for outcome in outcomes:
        if not outcome.expected and outcome.trace:
            sys.stdout.write("\n" + outcome.trace)
        if chosen.traces and outcome.trace:
            chosen.traces.mkdir(parents=True, exist_ok=True)
            (chosen.traces / f"{outcome.run.slug}.txt").write_text(outcome.trace)
    return 0 if all(outcome.expected for outcome in outcomes) else 1


def _compiler() -> str | None:
    return next((name for name in COMPILERS if shutil.which(name)), None)


def _call(folder: Path, *command: str, check: bool = True) -> str:
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{' '.join(command)} took more than {RUN_LIMIT_S:.0f} s") from error
    if check and ran.returncode:
        raise CheckError(f"{' '.join(command)} ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")
    return ran.stdout


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise CheckError(f"spin's answer has no {pattern!r}: {text[-1000:]}")
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())
