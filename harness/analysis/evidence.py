"""Figures and numbers of the documents, made from the rows that are committed under results/measured.

    <!-- evidence: quickstart.table -->...<!-- /evidence -->

What stands between two such marks is made here: the newest committed run of the sweep `quickstart`, and what
`harness/analysis/evidence_text.py` says of it under the name `table`. Figures go to docs/figures. A test makes
everything anew and fails where a document says something else.

    python -m epcross.harness.analysis.evidence                make them anew, below the current folder
    python -m epcross.harness.analysis.evidence RUN            commit a run first: its tables and documents, compact

Where two pages show the same points from different kernels, each must say so by the mark `SWEEP.elsewhere`.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from epcross.harness.analysis.evidence_figure import round_trip_figure
from epcross.harness.analysis.evidence_reasons import withdrawn
from epcross.harness.analysis.evidence_run import EvidenceRun, committed_runs, read_committed, read_run
from epcross.harness.analysis.evidence_text import TEXTS
from epcross.harness.analysis.evidence_versions import NAME, NUMBERS, Shown, elsewhere, unsaid
from epcross.harness.errors import EpcrossError, StoreError
from epcross.harness.storing.sealed import write_whole
from epcross.harness.storing.store import merge, open_run
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE, as_file

MEASURED = Path("results/measured")
FIGURES = Path("docs/figures")
NOTHING = "*No run of this sweep is committed yet.*"
_MARKED = re.compile(r"(<!-- evidence: ([a-z0-9_]+)\.([a-z_]+) -->)(.*?)(<!-- /evidence -->)", re.DOTALL)


def documents(root: Path) -> list[Path]:
    """The pages that may hold marks."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def commit(root: Path, run: Path) -> Path:
    """Put the compact form of `run` under results/measured; doing it twice changes nothing. Returns its folder.

    Raises:
        StoreError: `run` cannot be read or carries no number, or other rows stand there under its name.
    """
    found = read_run(run, open_run(run))  # refuses what no number can rest on
    target = root / MEASURED / run.resolve().name
    merge(target, [run])
    entries = found.withdrawn[found.run.run_id]
    if entries and not (target / WITHDRAWN_FILE).exists():  # the rows carry the flag, this the reasons
        write_whole(target / WITHDRAWN_FILE, as_file(entries))
    return target


def make(root: Path) -> dict[Path, bytes]:
    """What every page with marks, and every figure, must hold.

    Raises:
        EpcrossError: a mark names nothing that can be made, or a committed run cannot be read.
    """
    committed = read_committed(root / MEASURED)
    runs = committed.runs
    emptied = {sweep: _emptied(gone) for sweep, gone in committed.emptied.items()}
    sweeps = {path.stem for path in (root / "sweeps").glob("*.yaml")}
    shown = marked(root, NUMBERS)
    made = {
        path: filled(path.read_text(), runs, sweeps, _up(path.parent, root), shown, emptied).encode()
        for path in documents(root)
    }
    made |= {root / FIGURES / f"{sweep}.svg": round_trip_figure(run) for sweep, run in runs.items() if not run.is_soak}
    return made


def marked(root: Path, names: Set[str]) -> Shown:
    """Page, as a path from `root` -> the sweeps of which it holds a mark of one of these names."""
    found = {
        path.relative_to(root).as_posix(): {mark[2] for mark in _MARKED.finditer(path.read_text()) if mark[3] in names}
        for path in documents(root)
    }
    return {page: sweeps for page, sweeps in found.items() if sweeps}


def contradictions(root: Path) -> list[str]:
    """A sentence for each page beside whose numbers another one has the same points from other kernels, unsaid."""
    return unsaid(committed_runs(root / MEASURED), marked(root, NUMBERS), marked(root, {NAME}))


def stale(root: Path) -> list[Path]:
    """Pages and figures that do not hold what they must, and figures of sweeps that have no run to show."""
    return _stale(root, make(root))


def _stale(root: Path, made: Mapping[Path, bytes]) -> list[Path]:
    figures = [root / FIGURES / f"{path.stem}.svg" for path in sorted((root / "sweeps").glob("*.yaml"))]
    left = [path for path in figures if path.exists() and path not in made]
    return [path for path, content in made.items() if not path.exists() or path.read_bytes() != content] + left


def filled(
    page: str,
    runs: Mapping[str, EvidenceRun],
    sweeps: Set[str],
    up: str = "",
    shown: Shown | None = None,
    emptied: Mapping[str, str] | None = None,
) -> str:
    """`page` with everything between marks made anew.

    Args:
        runs: sweep -> its committed run.
        sweeps: those that there are, with a committed run or without.
        up: the way from the page's folder to the root, such as "../".
        shown: the sweeps of which each page shows numbers.
        emptied: sweep -> what is said in place of its numbers where all of them are withdrawn.

    Raises:
        EpcrossError: a mark names an unknown text or sweep, or a mark is never closed.
    """

    instead = emptied or {}
    texts = {**TEXTS, NAME: lambda run: elsewhere(run, runs, shown or {})}

    def replacement(found: re.Match[str]) -> str:
        begin, sweep, name, _, end = found.groups()
        if name not in texts:
            raise EpcrossError(f"there is no evidence '{sweep}.{name}'; after the dot comes {', '.join(texts)}")
        if sweep not in {*runs, *instead, *sweeps}:
            raise EpcrossError(
                f"there is no sweep '{sweep}' for evidence '{sweep}.{name}'; there are {', '.join(sorted(sweeps))}"
            )
        text = texts[name](runs[sweep]).replace("{root}", up) if sweep in runs else instead.get(sweep, NOTHING)
        gap = "\n" if "\n" in text or text.startswith("!") else ""
        return f"{begin}{gap}{text}{gap}{end}"

    opened, closed = len(re.findall(r"<!-- evidence: [a-z]", page)), page.count("<!-- /evidence -->")
    page, count = _MARKED.subn(replacement, page)
    if not opened == closed == count:
        raise EpcrossError(
            f"{opened} evidence marks are opened, {closed} are closed, {count} are pairs; write "
            "<!-- evidence: SWEEP.TEXT --> and then <!-- /evidence -->, in small letters and digits"
        )
    return page


def write(root: Path) -> list[Path]:
    """Make everything anew, and remove figures of sweeps that have no run to show; returns what changed."""
    made = make(root)
    changed = _stale(root, made)
    for path in changed:
        if path not in made:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, made[path])
    return changed


def _emptied(runs: Sequence[EvidenceRun]) -> str:
    told = "; ".join(f"run {run.run.run_id}: {withdrawn(run)}" for run in runs)
    return f"*All numbers of this sweep are withdrawn ({told}).*"


def _up(folder: Path, root: Path) -> str:
    way = os.path.relpath(root, folder)
    return "" if way == "." else f"{way}/"


def main(arguments: Sequence[str]) -> int:
    """Commit the runs that are named, then make everything anew and say what changed, and what pages leave unsaid."""
    root = Path.cwd()
    try:
        if not (root / "README.md").exists():
            raise StoreError(f"{root} is no clone of this repository: it has no README.md. Go to its root")
        for run in arguments:
            sys.stdout.write(f"{commit(root, Path(run)).relative_to(root)}\n")
        changed = write(root)
        unsaid_here = contradictions(root)
    except EpcrossError as error:
        sys.stderr.write(f"epcross: {error}\n")
        return 1
    sys.stdout.write("".join(f"{path.relative_to(root)}\n" for path in changed) or "Nothing changed.\n")
    sys.stderr.write("".join(f"epcross: {problem}\n" for problem in unsaid_here))
    return 1 if unsaid_here else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
