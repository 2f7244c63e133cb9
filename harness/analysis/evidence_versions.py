"""Where documents show numbers of the same point from different kernels: which documents, which runs, by how much."""

from collections.abc import Collection, Mapping

from epcross.harness.analysis.cells import MARGIN
from epcross.harness.analysis.evidence_run import TIMED, EvidenceRun, names
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.record import Record

_BESIDE = ("leads", "moved", "crossings", "again", "others", "links", "shares", "stages", "bound")

NUMBERS = frozenset({"figure", "table", "medians", *_BESIDE})
"""Marks that show numbers of points."""

NAME = "elsewhere"
"""The mark that says what is said here."""

Shown = Mapping[str, Collection[str]]
"""Page, as a path from the root -> sweeps of which it shows numbers."""

Point = tuple[str, str, str]
"""point_id, phase and machine: what differs between two numbers of one is the software or the day."""

_HASH_SHOWN = 12  # digits, enough to tell two versions apart


def elsewhere(run: EvidenceRun, runs: Mapping[str, EvidenceRun], shown: Shown) -> str:
    """Which other pages show points of `run` from other versions of the same backends, and how far those are apart."""
    told = [
        _sentence(run, other, pages)
        for sweep, other in runs.items()
        if sweep != run.run.sweep and (pages := _pages(sweep, shown)) and differing(run, other)
    ]
    return "; ".join(told) or "no other run whose numbers these pages show has these points from another version"


def unsaid(runs: Mapping[str, EvidenceRun], shown: Shown, said: Shown) -> list[str]:
    """A sentence for each page whose numbers another run contradicts by its kernels, and that does not say so. `said`:
    the sweeps of which a page holds the mark."""
    problems = []
    for page, sweeps in shown.items():
        for sweep in sorted(set(sweeps) & set(runs)):
            others = [
                other
                for other in sorted(runs)
                if other != sweep and _pages(other, shown) and differing(runs[sweep], runs[other])
            ]
            if others and sweep not in said.get(page, ()):
                where = "; ".join(f"{', '.join(_pages(other, shown))} (sweep {other})" for other in others)
                problems.append(
                    f"{page} shows numbers of sweep {sweep}, and other versions of the same backends at the same "
                    f"points stand in {where}; say so with <!-- evidence: {sweep}.{NAME} --><!-- /evidence -->"
                )
    return problems


def differing(one: EvidenceRun, other: EvidenceRun) -> list[Point]:
    """The points that both show, from versions of which none is the same."""
    ours, theirs = _points(one), _points(other)
    return [point for point in ours if point in theirs and not _versions(ours[point]) & _versions(theirs[point])]


def _points(run: EvidenceRun) -> dict[Point, list[Record]]:
    found: dict[Point, list[Record]] = {}
    for row in run.headline_rows():
        if row.regime in TIMED:
            found.setdefault((row.point_id, row.phase, row.machine), []).append(row)
    return found


def _versions(rows: Collection[Record]) -> set[str]:
    return {str(row.backend_version) for row in rows}


def _pages(sweep: str, shown: Shown) -> list[str]:
    return sorted(page for page, sweeps in shown.items() if sweep in sweeps)


def _sentence(run: EvidenceRun, other: EvidenceRun, pages: Collection[str]) -> str:
    points, ours, theirs = differing(run, other), _points(run), _points(other)
    here, there = ({point: _median_us(found[point]) for point in points} for found in (ours, theirs))
    apart = {point: max(here[point], there[point]) / min(here[point], there[point]) - 1 for point in points}
    worst = max(points, key=lambda point: apart[point])
    beyond = [ours[point][0] for point in points if apart[point] > MARGIN]
    age = "newer" if other.run.created > run.run.created else "older"
    links = ", ".join(f"[{page}]({{root}}{page})" for page in pages)
    which = f" ({_listed(run, beyond)})" if beyond else ""
    return (
        f"{links} {'shows' if len(pages) == 1 else 'show'} {len(points)} of these points from {age} kernels and another"
        f" call ({_told(theirs, points)} in run {other.run.run_id}, {_told(ours, points)} here): medians differ by more"
        f" than {MARGIN:.0%} at {len(beyond)} of them{which}, and most at {_listed(run, [ours[worst][0]])}:"
        f" {microseconds(here[worst])} us here, {microseconds(there[worst])} us there"
    )


def _listed(run: EvidenceRun, rows: Collection[Record]) -> str:
    """`Fence, EP 2, bf16 out, steady: 64, 1024 tokens per rank`, a part for each series and regime."""
    series, name_of = run.series(), names(run.rows)
    places: dict[str, set[int]] = {}
    for row in rows:
        place = f"{series[name_of(row)][0]}, EP {row.ep_size}, {row.dispatch_format} out, {row.regime}"
        places.setdefault(place, set()).add(row.tokens_per_rank)
    parts = [f"{place}, {', '.join(map(str, sorted(tokens)))}" for place, tokens in sorted(places.items())]
    alone = all(tokens == {1} for tokens in places.values())
    return f"{'; '.join(parts)} token{'s' * (not alone)} per rank"


def _told(found: Mapping[Point, Collection[Record]], points: Collection[Point]) -> str:
    versions = sorted({version[:_HASH_SHOWN] for point in points for version in _versions(found[point])})
    return ", ".join(versions)


def _median_us(rows: Collection[Record]) -> float:
    return median([row.latency_us for row in rows if row.latency_us is not None])
