"""A committed run as the documents use it: its rows, and the documents that lie with them."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from epcross.harness.analysis.cells import PHASE_WORDS
from epcross.harness.analysis.inputs import STAGED_WORDS, STAGING, option_words, staged_before
from epcross.harness.errors import StoreError
from epcross.harness.record import Record
from epcross.harness.storing.parquet import read_rows_table, read_withdrawn_of
from epcross.harness.storing.run_directory import RunDirectory, open_run, read_floor
from epcross.harness.storing.withdrawn import Withdrawal
from epcross.harness.terms import CAPTIONED, HEADLINES, Phase, Regime, Status

OURS = ("onesided", "layer_onesided")
"""How the names of backends begin whose kernels are this repository's."""

TIMED = (Regime.STEADY, Regime.ENTRY)
"""Regimes whose numbers documents show."""

Key = tuple[str, int]
"""(series, tokens per rank)."""

_WORDS = {
    "num_experts": "{} experts",
    "dispatch_format": "{} out",
    "weight_format": "{} weights",
    "staged": STAGED_WORDS,
}


class Panel(NamedTuple):
    """What series must share to stand in one panel or table: numbers of other formats are of other work."""

    ep_size: int
    num_experts: int
    dispatch_format: str
    weight_format: str  # of experts; empty where none run
    staged: bool  # inputs were brought to where the layer reads them before the window


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRun:
    """One committed run. `size_bytes` is that of its folder. `older` runs of the sweep have EP sizes that it has not:
    their rows of those, and no others, are among `rows`. `others` are all committed runs of the sweep besides, with
    numbers left."""

    folder: Path  # its tables, or the run's own
    run: RunDirectory
    rows: tuple[Record, ...]
    floor: Mapping[str, Any]
    size_bytes: int
    older: tuple[RunDirectory, ...] = ()
    others: tuple["EvidenceRun", ...] = ()  # newest first
    withdrawn: Mapping[str, tuple[Withdrawal, ...]] = field(default_factory=dict)  # by run

    def sources(self) -> list[tuple[RunDirectory, list[int]]]:
        """The runs behind the headline rows, newest first, each with the EP sizes that it stands for."""
        sizes: dict[str, set[int]] = {}
        for row in self.headline_rows():
            sizes.setdefault(row.run_id, set()).add(row.ep_size)
        return [(run, sorted(sizes[run.run_id])) for run in (self.run, *self.older) if run.run_id in sizes]

    @property
    def backends(self) -> Mapping[str, Mapping[str, Any]]:
        """Configuration of each backend as the run had it, in the order of its sweep: label, color, ..."""
        return self.run.plan["backends"]

    @property
    def is_soak(self) -> bool:
        """Whether it was a soak, whose cases are drawn at random: no curve goes through them."""
        return bool(self.run.plan.get("soak"))

    @property
    def has_numbers(self) -> bool:
        """Whether there is a round trip, layer or expert stage that a number of a page can rest on."""
        return any(row.regime in TIMED for row in self.headline_rows())

    @property
    def is_emptied(self) -> bool:
        """Whether it has no such number left, since its numbers turned out to be wrong."""
        return any(self.withdrawn.values()) and not self.has_numbers

    def ep_sizes(self) -> list[int]:
        """EP sizes with rows that a headline may rest on."""
        return sorted({row.ep_size for row in self.headline_rows()})

    def panels(self) -> list["Panel"]:
        """What one panel of a figure or one table shows, of all rows that a headline may rest on."""
        return sorted({panel_of(row) for row in self.headline_rows()})

    def words(self, panel: "Panel") -> str:
        """A panel's name: its EP size, and what of it is not the same in all panels."""
        panels = self.panels()
        varied = {name for name in _WORDS if len({getattr(each, name) for each in panels}) > 1}
        told = [_word(name, getattr(panel, name)) for name in _WORDS if name in varied]
        return ", ".join([f"EP {panel.ep_size}", *told])

    def headline_rows(
        self, regime: Regime | None = None, panel: "Panel | None" = None, *, phases: Collection[Phase] = HEADLINES
    ) -> list[Record]:
        """Round trips, layers or expert stages that are ok with no flag but those that captions state."""
        return [
            row
            for row in self.rows
            if row.phase in phases
            and row.status == Status.OK
            and set(row.flags.split()) <= CAPTIONED
            and regime in (None, row.regime)
            and (panel is None or panel == panel_of(row))
        ]

    def series(self) -> dict[str, tuple[str, str]]:
        """Label and colour of each series with rows to rest on, in the order of the sweep's backends."""
        order, name_of = list(self.backends), names(self.rows)
        found: dict[str, tuple[str, str]] = {}
        for row in sorted(self.headline_rows(), key=lambda row: order.index(row.backend)):
            config, name = self.backends[row.backend], name_of(row)
            found[name] = (name.replace(row.backend, config["label"], 1), config["color"])
        return found

    def shown(
        self, regime: Regime, panel: "Panel", *, phases: Collection[Phase] = HEADLINES
    ) -> dict[Key, list[Record]]:
        """The rows behind each number of a panel, by series and tokens per rank, both in order."""
        order, name_of = list(self.series()), names(self.rows)
        found: dict[Key, list[Record]] = {}
        rows = [(order.index(name_of(row)), row) for row in self.headline_rows(regime, panel, phases=phases)]
        for number, row in sorted(rows, key=lambda pair: (pair[0], pair[1].tokens_per_rank)):
            found.setdefault((order[number], row.tokens_per_rank), []).append(row)
        return found

    def times_us(
        self, regime: Regime, panel: "Panel", *, phases: Collection[Phase] = HEADLINES
    ) -> dict[Key, list[float]]:
        """The latency of every repeat that is `shown`."""
        shown = self.shown(regime, panel, phases=phases)
        return {key: [row.latency_us for row in rows if row.latency_us is not None] for key, rows in shown.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What is committed, by sweep: the run whose numbers documents show, or where none is left of any run, all of its
    runs, newest first."""

    runs: dict[str, EvidenceRun]
    emptied: dict[str, tuple[EvidenceRun, ...]]


def panel_of(row: Record) -> Panel:
    """Where a row stands."""
    staged = staged_before(row.options)
    return Panel(row.ep_size, row.num_experts, row.dispatch_format, row.weight_format or "", staged)


def _word(name: str, value: Any) -> str:
    words = _WORDS[name]
    return words[value] if isinstance(words, dict) else words.format(value)


def names(rows: Iterable[Record]) -> Callable[[Record], str]:
    """What names the series of a row: its backend, the stage of a layer, and what else is not the same in all of this
    backend's rows, unless panels and tables tell that apart."""
    seen: dict[tuple[str, str], set[str]] = {}
    for own in {_own(row) for row in rows}:
        for name, value in _variables(own).items():
            seen.setdefault((own[0], name), set()).add(json.dumps(value))

    @cache  # a run has a hundred rows of each
    def named(own: tuple[str, str, str, str, str]) -> str:
        words = [
            option_words(name, value)
            for name, value in _variables(own).items()
            if value not in (None, "") and (name == "compute" or len(seen.get((own[0], name), ())) > 1)
        ]
        return " ".join([own[0], *words])

    return lambda row: named(_own(row))


def _own(row: Record) -> tuple[str, str, str, str, str]:
    """The backend, and what may tell its series apart."""
    return row.backend, row.compute or "", row.routing, row.compute_options or "{}", row.options


def _variables(own: tuple[str, str, str, str, str]) -> dict[str, Any]:
    _, compute, routing, compute_options, options = own
    told = {"compute": compute, "routing": routing, **json.loads(compute_options), **json.loads(options)}
    return {name: value for name, value in told.items() if name != STAGING}  # panels tell it apart


def what(run: EvidenceRun) -> str:
    """What its headline latencies are of."""
    phases = dict.fromkeys(row.phase for row in run.headline_rows())
    return " or ".join(PHASE_WORDS[Phase(phase)] for phase in phases)


def committed_runs(folder: Path) -> dict[str, EvidenceRun]:
    """The `runs` of `read_committed`."""
    return read_committed(folder).runs


def read_committed(folder: Path) -> Committed:
    """What lies in `folder`. The newest run is that by the time it was made, as ids name only its second. EP sizes that
    it has no headline for come from the newest of the older runs that has.

    Raises:
        StoreError: a run cannot be read, or none of its rows can carry a number and it is not withdrawn.
    """
    found: dict[str, list[EvidenceRun]] = {}
    for path in _by_name(folder.glob("*/rows.parquet")):
        for documents in _by_name(path.parent.glob("runs/*/run.json")):
            run = open_run(documents.parent)
            found.setdefault(run.sweep, []).append(_read(path.parent, run))
    runs: dict[str, EvidenceRun] = {}
    emptied: dict[str, tuple[EvidenceRun, ...]] = {}
    for sweep, each in found.items():
        newest_first = sorted(each, key=lambda one: (one.run.created, one.run.run_id), reverse=True)
        left = [one for one in newest_first if not one.is_emptied]
        for one in left:
            _require_numbers(one)
        if left:
            runs[sweep] = _filled(left)
        else:
            emptied[sweep] = tuple(newest_first)
    return Committed(runs=runs, emptied=emptied)


def _filled(newest_first: Sequence[EvidenceRun]) -> EvidenceRun:
    newest, *others = newest_first
    newest = replace(newest, others=tuple(others))
    for other in others:
        missing = set(other.ep_sizes()) - set(newest.ep_sizes())
        if missing:
            rows = tuple(row for row in other.rows if row.ep_size in missing)
            floor = {**other.floor, **newest.floor}
            withdrawn = {**other.withdrawn, **newest.withdrawn}
            older = (*newest.older, other.run)
            newest = replace(newest, rows=newest.rows + rows, floor=floor, older=older, withdrawn=withdrawn)
    return newest


def read_run(folder: Path, run: RunDirectory) -> EvidenceRun:
    """The run whose documents are `run` and whose rows lie in `folder`: tables, or the run's own folder.

    Raises:
        StoreError: its rows cannot be read, or none of them can carry a number.
    """
    found = _read(folder, run)
    _require_numbers(found)
    return found


def _read(folder: Path, run: RunDirectory) -> EvidenceRun:
    rows = [Record(**row) for row in read_rows_table(folder).to_pylist() if row["run_id"] == run.run_id]
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return EvidenceRun(
        folder=folder,
        run=run,
        rows=tuple(rows),
        floor=read_floor(run) or {},
        size_bytes=size_bytes,
        withdrawn={run.run_id: tuple(one for one in read_withdrawn_of(folder) if one.run_id == run.run_id)},
    )


def _require_numbers(run: EvidenceRun) -> None:
    if run.is_emptied:
        raise StoreError(f"{run.folder}: nothing is left of run {run.run.run_id}, whose numbers are withdrawn")
    if not run.has_numbers:
        raise StoreError(
            f"{run.folder} has no round trip that is ok and without flags, so no number can rest on it; take a run on "
            "a quiet machine with a core for each rank"
        )


def _by_name(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.parent.name)
