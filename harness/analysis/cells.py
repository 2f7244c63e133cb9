"""From rows to the numbers that tables and figures show: one cell for each series and number of tokens."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epcross.harness.analysis.inputs import LAYOUT, STAGING, layout_of, option_words, staging_of
from epcross.harness.measuring.stats import Interval, IntervalKind
from epcross.harness.record import Record
from epcross.harness.terms import CAPTIONED, HEADLINES, BackendKind, Phase, Sharing, Status

if TYPE_CHECKING:
    from epcross.harness.analysis.resample import Trials

SETTING = (
    "phase", "domain", "sharing", "scope", "model", "hidden", "intermediate", "num_experts", "num_slots", "top_k",
    "routing", "routing_params", "placement", "dispatch_format", "combine_format", "weight_format",
)  # fmt: skip
"""What all numbers of one table or figure share, besides EP size and regime, whether inputs of layers are staged inside
the window, and how the rows of expert stages lie. Layers with other experts may stand in one, where their names tell
them apart."""

PHASE_WORDS = {Phase.ROUND_TRIP: "round trip", Phase.LAYER: "layer", Phase.EXPERTS: "expert stage"}
"""What a headline is called."""

MARGIN = 0.03
"""Two medians closer than this count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Series:
    """One line of a figure: a backend of a run, with what sets it apart where the backend came in several forms."""

    backend: str
    variant: str = ""  # options or capacity that differ; empty for the only form
    run_id: str

    @property
    def name(self) -> str:
        """Backend and variant, without the run."""
        return f"{self.backend} {self.variant}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All headline latencies of one point in one run, and the number that stands for them."""

    setting: str
    ep_size: int
    regime: str
    series: Series
    tokens: int  # per rank, nominal
    rows: tuple[Record, ...]  # all of them
    shown: tuple[Record, ...]  # ok rows behind the number: those without a flag, or all where each has one
    flags: frozenset[str]  # why `shown` is no headline; empty if it is one
    interval: Interval | None  # of `shown`, widened for few launches (see `resample`); None where no row is ok

    @property
    def headline(self) -> bool:
        """Whether the number may stand in a headline."""
        return self.interval is not None and not self.flags

    @property
    def lowest_us(self) -> float:
        """Least latency of a shown repeat."""
        return min(_times(self.shown))

    @property
    def highest_us(self) -> float:
        """Largest latency of a shown repeat."""
        return max(_times(self.shown))

    @property
    def wire_bytes(self) -> int:
        """View `wire_bytes`: rows to other ranks and their partials back, over all ranks; mean over shown rows. 0 for
        what is more than a round trip."""
        if self.rows[0].phase != Phase.ROUND_TRIP:
            return 0
        sizes = [(row.pairs_remote_sum or 0) * (row.padded_bytes + row.combine_row_bytes) for row in self.shown]
        return round(sum(sizes) / len(sizes))

    @property
    def rank_bytes(self) -> int:
        """View `rank_bytes`: the same with what stays on its own rank."""
        sizes = [(row.pairs_sum or 0) * (row.padded_bytes + row.combine_row_bytes) for row in self.shown]
        return round(sum(sizes) / len(sizes))

    @property
    def flagged_rows(self) -> int:
        """Ok rows that carry a flag which keeps them out of headlines."""
        return sum(row.status == Status.OK and bool(headline_flags(row)) for row in self.rows)


def headline_flags(row: Record) -> frozenset[str]:
    """Flags that keep a row out of headlines; the others are said once, in the caption."""
    return frozenset(row.flags.split()) - CAPTIONED


def experts_words(row: Record) -> str:
    """What of a layer its backend's name does not say: the expert stage and the format of the weights."""
    if row.kind in (None, BackendKind.EXCHANGE):
        return ""
    return " ".join(filter(None, [f"+ {row.compute}" if row.compute else "", f"{row.weight_format} weights"]))


def setting_of(row: Record) -> dict[str, Any]:
    """What all numbers of one table or figure share with this row."""
    given = {STAGING: staging_of(row.kind, row.options), LAYOUT: layout_of(row.kind, row.options)}
    return {name: getattr(row, name) for name in SETTING} | given


def describe_setting(row: Record) -> str:
    """The setting of a row in words."""
    own = setting_of(row)
    words = [f"{row.weight_format} weights", own[STAGING], f"{LAYOUT} {own[LAYOUT]}" if own[LAYOUT] else ""]
    layer = "" if row.weight_format is None else "".join(f", {each}" for each in words if each)
    domain = row.domain if row.sharing == Sharing.NONE else f"{row.domain} ({row.sharing})"
    params = "" if row.routing_params == "{}" else f" {row.routing_params}"
    what = (
        "" if row.phase == Phase.ROUND_TRIP else f"{PHASE_WORDS[Phase(row.phase)]}, intermediate {row.intermediate}; "
    )
    return (
        f"{what}{row.model}: {row.num_experts} experts in {row.num_slots} slots, top {row.top_k}, hidden {row.hidden}; "
        f"{row.routing}{params} routing, {row.placement} placement; {row.dispatch_format} out, "
        f"{row.combine_format} back{layer}; domain {domain}"
    )


def cells(records: Iterable[Record]) -> list[Cell]:
    """One cell for each point with a headline, in the order of setting, EP size, regime, series and tokens."""
    records = list(records)
    variants = point_variants(records)
    points: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for row in records:
        if row.phase in HEADLINES:
            points[row.run_id, row.point_id].append(row)
    found = [_cell(rows, variants[rows[0].run_id, rows[0].point_id]) for rows in points.values()]
    return sorted(found, key=lambda cell: (cell.setting, cell.ep_size, cell.regime, cell.series, cell.tokens))


def by_panel(found: Sequence[Cell], *, by_run: bool) -> dict[tuple[Any, ...], list[Cell]]:
    """Cells that share EP size and regime, and the run where `by_run`; keys (ep_size, regime[, run_id])."""
    panels: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in found:
        panels[cell.ep_size, cell.regime, *([cell.series.run_id] if by_run else [])].append(cell)
    # the headline regime of a busy pipeline first
    return {key: panels[key] for key in sorted(panels, key=lambda key: (key[0], key[1] != "steady", *key[1:]))}


def point_variants(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """What sets each (run_id, point_id) apart from points of its backend that would share its place in a figure."""
    points = {(row.run_id, row.point_id): row for row in records if row.phase in HEADLINES}
    options: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in points.values():
        for name, value in json.loads(row.options).items():
            options[row.backend][name].add(json.dumps(value))
    places: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in points.values():
        place = (row.run_id, row.backend, row.options, row.ep_size, row.regime, row.tokens_per_rank)
        place += (experts_words(row), row.compute_options)
        places[(*place, *setting_of(row).values())].append(row)
    variants: dict[tuple[str, str], str] = {}
    for same in places.values():
        same.sort(key=lambda row: (row.tokens_min, row.tokens_total, row.max_tokens_per_rank, row.point_id))
        for number, row in enumerate(same):
            titled = {name for name in (STAGING, LAYOUT) if setting_of(row)[name]}  # said there, and the same all over
            several = {name for name, values in options[row.backend].items() if len(values) > 1} - titled
            own = json.loads(row.options)
            words = [experts_words(row)] if experts_words(row) else []
            words += [option_words(name, own[name]) for name in sorted(several & own.keys())]
            words += [option_words(*each) for each in sorted(_stage_options(row, points.values()).items())]
            words += [f"load {number + 1}"] if len(same) > 1 else []  # other capacity or spread of tokens
            variants[row.run_id, row.point_id] = " ".join(words)
    return variants


def _stage_options(row: Record, others: Iterable[Record]) -> dict[str, Any]:
    """Options of the expert stage that are not the same wherever it was used."""
    own = json.loads(row.compute_options or "{}")
    alike = [json.loads(other.compute_options or "{}") for other in others if other.compute == row.compute]
    return {name: value for name, value in own.items() if any(other.get(name) != value for other in alike)}


def _cell(rows: Sequence[Record], variant: str) -> Cell:
    first = rows[0]
    ok = [row for row in rows if row.status == Status.OK]
    plain = [row for row in ok if not headline_flags(row)]
    shown = plain or ok
    return Cell(
        setting=describe_setting(first),
        ep_size=first.ep_size,
        regime=first.regime,
        series=Series(backend=first.backend, variant=variant, run_id=first.run_id),
        tokens=first.tokens_per_rank,
        rows=tuple(rows),
        shown=tuple(shown),
        flags=frozenset() if plain else frozenset(flag for row in ok for flag in headline_flags(row)),
        interval=_interval(shown) if shown else None,
    )


def trials(rows: Sequence[Record]) -> "Trials":
    """The latencies of ok rows of one point, as the bootstrap wants them."""
    import pandas as pd

    from epcross.harness.analysis.resample import Trials

    names = ("run_id", "launch", "seed", "chain", "tokens_per_rank", "latency_us")
    return Trials(pd.DataFrame({name: [getattr(row, name) for row in rows] for name in names}))


def _interval(rows: Sequence[Record]) -> Interval:
    from epcross.harness.analysis import resample

    own = trials(rows)
    base = resample.support([own])
    middle = own.medians_us()
    (drawn,) = resample.resampled_medians([own])
    if base.kind is IntervalKind.BOOTSTRAP:
        drawn = resample.widened(middle, drawn, base.launches)
    low, high = resample.ends(drawn[0], base.kind)
    return Interval(
        median_us=float(middle[0]),
        low_us=low,
        high_us=high,
        kind=base.kind,
        within_launch=base.within_launch,
        launches=base.launches,
        seeds=base.seeds,
        chains=base.chains,
        trials=base.trials,
    )


def _times(rows: Iterable[Record]) -> list[float]:
    return [row.latency_us for row in rows if row.latency_us is not None]
