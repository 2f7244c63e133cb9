"""What the documents say of a committed run, as Markdown. Every number comes from its rows, floor and environment."""

from collections import Counter
from collections.abc import Callable, Sequence

from epcross.harness.analysis.captions import fewest_launches, power, repeats
from epcross.harness.analysis.cells import headline_flags
from epcross.harness.analysis.evidence_again import again
from epcross.harness.analysis.evidence_figure import cut, drawn, is_relative, undrawn
from epcross.harness.analysis.evidence_layers import bound, shares, stages
from epcross.harness.analysis.evidence_leads import leads
from epcross.harness.analysis.evidence_links import links
from epcross.harness.analysis.evidence_others import moved, others
from epcross.harness.analysis.evidence_peers import crossings, medians
from epcross.harness.analysis.evidence_rates import best_gbps, rates
from epcross.harness.analysis.evidence_run import TIMED, EvidenceRun, Panel, what
from epcross.harness.analysis.evidence_settings import settings
from epcross.harness.analysis.soak_table import moved_gb, verified_rounds
from epcross.harness.analysis.table import microseconds
from epcross.harness.measuring.stats import MIN_LAUNCHES, median
from epcross.harness.record import Record
from epcross.harness.storing.run_directory import RunDirectory
from epcross.harness.terms import HEADLINES, Domain, Regime, Sharing, Status


def figure(run: EvidenceRun) -> str:
    """The figure and its caption. `{root}` stands for the way to the repository's root."""
    sweep = run.run.sweep
    shown = f"{what(run).capitalize()}, in multiples of ours," if is_relative(run) else what(run).capitalize()
    return f"![{shown} against tokens per rank]({{root}}docs/figures/{sweep}.svg)\n\n*{_caption_of_figure(run)}*"


def _caption_of_figure(run: EvidenceRun) -> str:
    """That of what is drawn, and what is not."""
    told = cut(run)
    if left := undrawn(run):
        told = "; ".join(filter(None, [told, f"no panel of {'; '.join(left)}, where none of ours was measured"]))
    words = _caption(run, [rows for marks in drawn(run).values() for rows in marks.values()])
    return f"{told[:1].upper()}{told[1:]}. {words}" if told else words


def caption(run: EvidenceRun) -> str:
    """What was estimated how, of how much, where: what a figure or table of `run` rests on."""
    return _caption(
        run, [own for panel in run.panels() for regime in TIMED for own in run.shown(regime, panel).values()]
    )


def _caption(run: EvidenceRun, places: Sequence[Sequence[Record]]) -> str:
    rows = [row for own in places for row in own]
    sizes = ", ".join(map(str, sorted({row.ep_size for row in rows})))
    count = repeats(places)
    if fewest_launches(places) < MIN_LAUNCHES:
        count += f"; fewer than {MIN_LAUNCHES} launches, so the variance between launches is hardly seen"
    if capped := power(rows):
        count += f"; {capped}"
    estimators = "; ".join(sorted({f"{row.regime}: {row.estimator}" for row in rows}))
    models = ", ".join(sorted({f"{row.model} (hidden {row.hidden}, top {row.top_k})" for row in rows}))
    formats = ", ".join(sorted({_formats(row) for row in rows}))
    inside = " ".join(sorted(set.intersection(*(set((row.boundary or "").split()) for row in rows))))
    left_out = Counter(
        flag
        for row in run.rows
        if row.phase in HEADLINES and row.regime in TIMED and row.status == Status.OK
        for flag in headline_flags(row)
    )
    flagged = ", ".join(f"{count} repeats flagged {flag} left out" for flag, count in sorted(left_out.items()))
    domains = ", ".join(
        sorted({row.domain + (f" ({row.sharing})" if row.sharing != Sharing.NONE else "") for row in rows})
    )
    return (
        f"Median and range of {count}. Each repeat: {estimators}. {models}, {formats}; inside the window of all: "
        f"{inside or 'nothing in common'}. Domain {domains}; EP {sizes}; {flagged or 'no repeat was flagged'}; run "
        f"{sources(run)}."
    )


def sources(run: EvidenceRun) -> str:
    """Which run, on which machine; with several, which EP sizes are whose."""
    told = run.sources()
    shared = {row.run_id for row in run.headline_rows() if row.domain == Domain.SHARED_GPU}
    where = {
        one.run_id: ("one of " if one.run_id in shared and len(one.environment["gpus"]) > 1 else "") + machine_of(one)
        for one, _ in told
    }
    if len(told) == 1:
        return f"{told[0][0].run_id} on {where[told[0][0].run_id]}"
    return "; ".join(f"{one.run_id} (EP {', '.join(map(str, sizes))}) on {where[one.run_id]}" for one, sizes in told)


def _formats(row: Record) -> str:
    weights = f", {row.weight_format} weights" if row.weight_format else ""
    return f"{row.dispatch_format} out, {row.combine_format} back{weights}"


def table(run: EvidenceRun) -> str:
    """Medians of the steady round trip (or layer), one table for each panel, one column for each series."""
    return "\n\n".join(_table(run, panel) for panel in run.panels() if run.times_us(Regime.STEADY, panel))


def _table(run: EvidenceRun, panel: Panel) -> str:
    times = run.times_us(Regime.STEADY, panel)
    backends = {name: label for name, (label, _) in run.series().items() if any(own == name for own, _ in times)}
    heads = [f"{label} (us)" for label in backends.values()]
    lines = [
        f"| tokens per rank, {run.words(panel)}, steady | {' | '.join(heads)} |",
        f"| ---: | {' | '.join(['---:'] * len(heads))} |",
    ]
    for tokens in sorted({tokens for _, tokens in times}):
        cells = [_cell(times.get((name, tokens), [])) for name in backends]
        lines.append(f"| {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(run: EvidenceRun) -> str:
    """That of the newest run."""
    return machine_of(run.run)


def machine_of(run: RunDirectory) -> str:
    """The GPUs and their driver, or the processor and the cores that the run could use."""
    if gpus := run.environment.get("gpus"):
        count, names = len(gpus), ", ".join(sorted({gpu["name"] for gpu in gpus}))
        return f"{count} x {names} (driver {gpus[0]['driver_version']})"
    cpu = run.environment["cpu"]
    return f"{cpu['model']} ({cpu['architecture']}, {len(cpu['cores_available'])} cores)"


def floor(run: EvidenceRun) -> str:
    """What the machine could do at best, at the smallest EP size; of pushes and pulls the fastest number of blocks."""
    sizes = {entry["ep_size"]: entry for entry in run.floor.values() if "error" not in entry}
    if not sizes:
        return "no floor was measured"
    entry = sizes[min(sizes)]
    ways = [(verb, best_gbps(entry, way)) for verb, way in _WAYS]
    each = " and ".join(f"{verb} {_digits(gbps)} GB/s" for verb, gbps in ways if gbps is not None)
    return (
        f"at EP {entry['ep_size']} a flag crosses in {_digits(entry['flag_one_way_us'])} us, all ranks together copy "
        f"{_digits(entry['copy_gbps'])} GB/s{f' (a rank {each})' if each else ''}, and an empty pair costs "
        f"{_digits(entry['empty_pair_us'])} us"
    )


_WAYS = (("pushes", "push"), ("pulls", "pull"))
"""A verb, and how the floor calls what a rank's kernels moved by stores and by loads, by their number of blocks."""


def _digits(value: float) -> str:
    """Three of them, and no power of ten."""
    return f"{float(f'{value:.3g}'):g}"


def rows(run: EvidenceRun) -> str:
    """How many rows, by status."""
    counts: dict[str, int] = {}
    for row in run.rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    return f"{len(run.rows)} rows: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


def wall(run: EvidenceRun) -> str:
    """Time inside units, one after another, by the monotonic clock; starting process groups comes on top."""
    units = {(row.point_id, row.launch): row.wall_s or 0.0 for row in run.rows}
    return f"{sum(units.values()):.0f} s" if any(units.values()) else "unknown"


def soak(run: EvidenceRun) -> str:
    """What a soak verified, and how its cases ended."""
    ended = Counter({(row.point_id, row.launch): row.status for row in run.rows}.values())
    minutes = sum({(row.point_id, row.launch): row.wall_s or 0.0 for row in run.rows}.values()) / 60
    told = ", ".join(f"{count} {status}" for status, count in sorted(ended.items()))
    return (
        f"{verified_rounds(run.rows):,} rounds in {minutes:.1f} minutes, every output of each compared, which moved"
        f" about {moved_gb(run.rows) / 1e3:.3g} TB; {sum(ended.values())} cases: {told}"
    )


def size(run: EvidenceRun) -> str:
    """Of the committed folder."""
    return f"{run.size_bytes / 1e6:.1f} MB"


def versions(run: EvidenceRun) -> str:
    """Of each backend with a number, the version of its library, or the hash of our own kernels' sources."""
    rows = run.headline_rows()
    labels: dict[str, list[str]] = {}
    for name, config in run.backends.items():
        for version in sorted({str(row.backend_version) for row in rows if row.backend == name}):
            labels.setdefault(version, []).append(config["label"])
    return ", ".join(f"{version} ({'; '.join(names)})" for version, names in labels.items())


def run_id(run: EvidenceRun) -> str:
    """The run, as a link to its folder."""
    return f"[{run.run.run_id}]({{root}}results/measured/{run.run.run_id})"


TEXTS: dict[str, Callable[[EvidenceRun], str]] = {
    "figure": figure,
    "table": table,
    "caption": caption,
    "machine": machine,
    "floor": floor,
    "rows": rows,
    "wall": wall,
    "size": size,
    "run": run_id,
    "versions": versions,
    "settings": settings,
    "soak": soak,
    "medians": medians,
    "leads": leads,
    "crossings": crossings,
    "again": again,
    "others": others,
    "moved": moved,
    "links": links,
    "rates": rates,
    "shares": shares,
    "bound": bound,
    "stages": stages,
}
"""The second part of a mark's name -> what it stands for."""


def _cell(times_us: list[float]) -> str:
    if not times_us:
        return "-"
    return f"{microseconds(median(times_us))} [{microseconds(min(times_us))}..{microseconds(max(times_us))}]"
