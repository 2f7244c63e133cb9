"""What the documents say of a run beside the other committed runs of its sweep, of the same versions, as Markdown.

Intervals of a run hold what differs between its launches, seeds and chains. What another run finds at the same points,
on other GPUs or on another day, no interval of one run holds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from epcross.harness.analysis.cells import MARGIN
from epcross.harness.analysis.evidence_again import above, whose
from epcross.harness.analysis.evidence_leads import by_turn, digits_of, in_shared_turns, leaders, middle
from epcross.harness.analysis.evidence_run import TIMED, EvidenceRun, Panel, names, panel_of
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import median
from epcross.harness.planning.tokens import counted
from epcross.harness.record import Record
from epcross.harness.terms import Regime

ALONE = "no other committed run of this sweep has these points from the same versions"

Point = tuple[str, str, str]
"""point_id, phase and machine, which is a kind of machine and no single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Who is told to lead somewhere, and other / ours there by run, the newest first."""

    panel: Panel
    regime: Regime
    tokens: int  # per rank
    mine: str
    other: str
    ratios: tuple[float, ...]

    @property
    def moved(self) -> float:
        """How much larger the largest is than the least."""
        return max(self.ratios) / min(self.ratios) - 1


def others(run: EvidenceRun) -> str:
    """How far medians of each other run are from those of `run`, of which series, and over which range leads are."""
    told = [f"- {_apart(run, other)}" for other in run.others if matched(run, other).rows]
    if not told:
        return ALONE
    series = run.series()
    lines = [
        f"| other / ours, over {1 + len(told)} runs | tokens per rank | of | here | least | largest | runs |",
        "| :--- | ---: | :--- | ---: | ---: | ---: | ---: |",
    ]
    for lead in _few(moved_leads(run)):
        pair = f"{series[lead.other][0]} / {series[lead.mine][0]}"
        where = f"{run.words(lead.panel)}, {lead.regime}"
        lines.append(f"| {where} | {lead.tokens} | {pair} | {' | '.join(_told(lead))} | {len(lead.ratios)} |")
    return "\n".join([*told, *(["", *lines] if len(lines) > 2 else [])])


def moved(run: EvidenceRun) -> str:
    """A sentence below a table of leads: that its intervals are within a run, and how far leads are apart over runs."""
    found = moved_leads(run)
    if not found:
        return f"Intervals are within one run: {ALONE}"
    most = max(found, key=lambda lead: lead.moved)
    shifts = [ratio / lead.ratios[0] - 1 for lead in found for ratio in lead.ratios[1:]]
    with_leads = [other for other in run.others if matched(run, other).rows]
    _, low, high = _told(most)
    among = sum(1 for _ in leaders(run))
    which = f"all {among}" if len(found) == among else f"the {len(found)} of {among} that can be compared"
    return (
        f"Intervals are within one run. In {len(with_leads)} other committed run{'s' * (len(with_leads) != 1)} of the"
        f" same versions, {_gpus(run, with_leads)}, the same ratios are from {min(*shifts, 0.0):+.1%} to"
        f" {max(*shifts, 0.0):+.1%} of these, at {which}; they differ most at"
        f" {run.words(most.panel)}, {most.regime}, {counted(most.tokens)} per rank: from {low} to {high}"
    )


def moved_leads(run: EvidenceRun) -> list[Lead]:
    """Every lead that the table of leads tells and another run can be asked for: of the same two, in turns of both."""
    there = [matched(run, other) for other in run.others]
    found = []
    for panel, regime, tokens, ((mine, ours), (other, theirs)) in leaders(run):
        ratios = [middle(theirs, ours)]
        for one in there:
            times = by_turn(one, panel, regime)
            pair = in_shared_turns(times.get((mine, tokens), {}), times.get((other, tokens), {}))
            ratios += [middle(pair[1], pair[0])] if pair[0] else []
        if len(ratios) > 1:
            found.append(Lead(panel=panel, regime=regime, tokens=tokens, mine=mine, other=other, ratios=tuple(ratios)))
    return found


def matched(run: EvidenceRun, other: EvidenceRun) -> EvidenceRun:
    """`other` with those headline rows alone whose point `run` has as well, of the same versions and from another run.
    Flagged and withdrawn rows count on neither side."""
    ours = _points(run.headline_rows())
    rows = [
        row
        for row in other.headline_rows()
        if (own := ours.get(_point(row)))
        and all(row.run_id != one.run_id for one in own)
        and all(_same_version(row, one) for one in own)
    ]
    return replace(other, rows=tuple(rows), others=())


def _apart(run: EvidenceRun, other: EvidenceRun) -> str:
    """One other run: what it was taken on, and how far its medians are from those of `run`."""
    there, series, name_of = _points(matched(run, other).rows), run.series(), names(run.rows)
    here = {point: rows for point, rows in _points(run.headline_rows()).items() if point in there}
    places = {
        point: (name_of(row), run.words(panel_of(row)), row.regime, row.tokens_per_rank)
        for point, (row, *_) in here.items()
    }
    medians = {point: (_median_us(here[point]), _median_us(there[point])) for point in here}
    apart = {point: max(each) / min(each) - 1 for point, each in medians.items()}
    worst = max(apart, key=lambda point: apart[point])
    beyond = [places[point] for point, share in apart.items() if share > MARGIN]
    of_entry = sum(regime == Regime.ENTRY for _, _, regime, _ in beyond)
    entry = f", {of_entry} of them in {Regime.ENTRY}" if of_entry else ""
    name, where, regime, tokens = places[worst]
    code = ", by another state of the measuring code" if _codes(here).isdisjoint(_codes(there)) else ""
    return (
        f"[{other.run.run_id}]({{root}}results/measured/{other.folder.name}), {_gpus(run, [other])}{code}: at"
        f" {len(here)} points of the same versions medians differ by more than {MARGIN:.0%} at"
        f" {len(beyond)}{entry}{whose(run, beyond, series)}; half of all by less than"
        f" {above(median(list(apart.values())))}, and the largest difference is {apart[worst]:.1%}"
        f" ({series[name][0]}, {where}, {regime}, {counted(tokens)} per rank:"
        f" {microseconds(medians[worst][0])} us here, {microseconds(medians[worst][1])} us there)"
    )


def _few(found: Iterable[Lead]) -> list[Lead]:
    """The first, the middle and the last number of tokens of each panel and regime."""
    places: dict[tuple[Panel, Regime], list[Lead]] = {}
    for lead in found:
        places.setdefault((lead.panel, lead.regime), []).append(lead)
    return [own[at] for own in places.values() for at in sorted({0, len(own) // 2, len(own) - 1})]


def _told(lead: Lead) -> list[str]:
    """The ratio of this run, the least and the largest."""
    ends = (lead.ratios[0], min(lead.ratios), max(lead.ratios))
    return [f"{ratio:.{digits_of(ends[0])}f}" for ratio in ends]


def _gpus(run: EvidenceRun, those: Iterable[EvidenceRun]) -> str:
    """Whether the GPUs of `those` are those of `run`, by their UUIDs."""
    own = _uuids(run)
    shared = [len(own & uuids) if own and (uuids := _uuids(other)) else -1 for other in those]
    if -1 in shared:
        return "on GPUs or processors that no UUID tells apart"
    if not any(shared):
        return "on other GPUs"
    return "on the same GPUs" if all(count == len(own) for count in shared) else "on GPUs of which some are the same"


def _uuids(run: EvidenceRun) -> frozenset[str]:
    return frozenset(gpu["uuid"] for gpu in run.run.environment.get("gpus") or () if gpu.get("uuid"))


def _codes(points: Mapping[Point, Iterable[Record]]) -> frozenset[str]:
    return frozenset(row.measure_hash for rows in points.values() for row in rows)


def _points(rows: Iterable[Record]) -> dict[Point, list[Record]]:
    found: dict[Point, list[Record]] = {}
    for row in rows:
        if row.regime in TIMED:
            found.setdefault(_point(row), []).append(row)
    return found


def _point(row: Record) -> Point:
    return row.point_id, row.phase, row.machine


def _same_version(one: Record, other: Record) -> bool:
    """Of the backend, and of the expert stage where there is one."""
    pairs = ((one.backend_version, other.backend_version), (one.compute_version, other.compute_version))
    return all(_alike(str(first or ""), str(second or "")) for first, second in pairs)


def _alike(one: str, other: str) -> bool:
    """Whether two versions are the same: older rows have `2.11.0` where newer ones have `torch 2.11.0`."""
    unnamed = " " not in one or " " not in other
    return one == other or (unnamed and one.rpartition(" ")[2] == other.rpartition(" ")[2])


def _median_us(rows: Iterable[Record]) -> float:
    return median([row.latency_us for row in rows if row.latency_us is not None])
