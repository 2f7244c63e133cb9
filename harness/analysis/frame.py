"""Stored rows as one tidy frame: a line per row, typed, with explicit flags, bytes, bandwidths and the floor.

    rows, note = frame.headline(frame.load("results/runs/<run_id>"))
    rows.groupby([*frame.SERIES, "tokens_per_rank"], observed=True)["latency_us"].median()

Bytes are counts of the whole group times the bytes of a row as it travels, padded (`padded_bytes` in dispatch,
`combine_row_bytes` in combine; both in a round trip), without metadata and protocol:

    selection_bytes   every (token, expert), own rank included: how per-expert (low-latency) libraries count
    rank_bytes        one copy for each (token, destination rank), own rank included: the rows that land
    wire_bytes        one copy for each (token, other rank): what must cross the interconnect

`nvlink_ratio` is what NVML's counters say was sent over `nvlink_wire_bytes`, where pairs were counted; `nvlink_note`
says why it is not close to 1. Rows before schema version 7 have `wire_bytes` instead, where its rounding is below 1 %.

`<view>_gbps` are those bytes over `latency_us`, in 10^9 bytes per second, for all ranks together, as `floor_copy_gbps`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from epcross.harness.analysis.copies import without_copies
from epcross.harness.analysis.inputs import LAYOUT, NO_LAYOUT, NOT_STAGED, STAGING, layout_of, staging_of
from epcross.harness.errors import InputError
from epcross.harness.measuring.link_bytes import ROUNDED
from epcross.harness.storing import store
from epcross.harness.storing.parquet import ROWS_SCHEMA
from epcross.harness.storing.rows import CLOSED_LISTS
from epcross.harness.terms import (
    CAPTIONED,
    BackendKind,
    Domain,
    Flag,
    Phase,
    Status,
)

SUBJECT = ("backend", "options", "backend_version", "tuned", "kind", "compute", "compute_options", "compute_version")
"""Who was measured. Two series that differ in these alone may be set against each other."""

CONDITIONS = (
    "phase", "regime", "domain", "sharing", "scope", "machine", "measure_hash",
    "model", "num_experts", "num_slots", "top_k", "hidden", "intermediate",
    "ep_size", "token_spread", "capacity", "routing", "routing_params", "placement",
    "dispatch_format", "combine_format", "weight_format", STAGING, LAYOUT,
)  # fmt: skip
"""Under which conditions. Two of them follow from columns that grow with the tokens, two from the options of a backend:

token_spread   `even`, or for uneven ranks the fewest tokens of a rank and the total, as `3 of 40`
capacity       `as tokens` where `max_tokens_per_rank` is the nominal number, else that number as text
staging        of layers `staging inside` the window or `staged before` it, else `none`
layout         how the rows of expert stages lie, else `none`
"""

FORMATS = ("dispatch_format", "weight_format")
"""Of activations and of expert weights. Layers that differ in them compute other numbers: no verdict is on such a pair
unless it is asked for by name, and then it says so."""

INPUTS = (STAGING, LAYOUT)
"""What was done before the window. Where it differs, one of two did not do what the other did: as with `FORMATS`."""

SERIES = SUBJECT + CONDITIONS
"""A series is the rows that agree in these columns: one curve over `tokens_per_rank`. No value in them is missing."""

LAUNCH = ("run_id", "launch")
"""What tells process groups apart: launches are numbered in each run anew."""

NOT_REPORTED = "not reported"
"""Stands in a text column where the stored row has nothing, so that grouping by it loses no row."""

NO_COMPUTE, NO_WEIGHTS = "none", "none"
"""Stand in `compute` and `compute_version`, and in `weight_format`, of rows that have no experts."""

VIEWS: Mapping[str, str] = {
    "selection_bytes": "selections_sum",
    "rank_bytes": "pairs_sum",
    "wire_bytes": "pairs_remote_sum",
}
"""Convention -> the column of counts it multiplies."""

_OPTIONAL_WORDS = (
    "backend_version", "transport", "algorithm", "kernels", "boundary", "estimator", "ids_hash",
)  # fmt: skip
_WHERE_MISSING: Mapping[str, str] = {
    "failed_stage": NOT_REPORTED,
    "weights_by": NOT_REPORTED,
    "kind": BackendKind.EXCHANGE,  # rows from before there were others
    "weight_format": NO_WEIGHTS,
}
_PLAIN = {"Int64": "int64", "boolean": "bool"}  # what a column becomes that is never missing


class Headline(NamedTuple):
    """Rows that a headline may rest on, and what was left out."""

    rows: pd.DataFrame
    note: str  # for a caption: what was left out, and which flagged rows were kept; empty if neither
    left_out: dict[str, int]  # status or flag -> rows; a row with two flags counts under both


def load(*paths: Path | str, domains: Iterable[Domain | str] | None = None) -> pd.DataFrame:
    """All rows of run directories, merged folders or parquet files, in the order given.

    Every column of `Record` is there, and besides: `token_spread`, `capacity`, `staging` and `layout` (see
    `CONDITIONS`), `is_<flag>` for every flag, `<view>` and `<view>_gbps` for every one of `VIEWS` (phases dispatch,
    combine and round_trip; NaN elsewhere), `nvlink_ratio`, and `floor_<name>` for every time and bandwidth of the
    floors of these runs at the row's domain and EP size (NaN where there is none). Closed lists are ordered categories.
    A text that was not reported is `NOT_REPORTED`; only numbers, `reason` and `nvlink_note` can be missing.

    Args:
        domains: keep rows of these only. None: all; then comparing functions refuse what `require_one_domain` does.

    Raises:
        StoreError: a path holds no rows, or damaged ones.
        InputError: no path, an unknown domain, or a row that is there twice with different values.
    """
    if not paths:
        raise InputError("no runs given. Name one or more run directories, merged folders or rows.parquet files")
    wanted = None if domains is None else _known_domains(domains)
    frame = without_copies(store.load_rows([Path(path) for path in paths]))
    if wanted is not None:
        frame = frame[frame["domain"].isin(wanted)].reset_index(drop=True)
    for name in frame.columns:
        frame[name] = _typed(frame[name])

    tokens, total = frame["tokens_per_rank"], frame["tokens_total"]
    even = frame["tokens_min"] * frame["ep_size"] == total
    uneven = frame["tokens_min"].astype(str) + " of " + total.astype(str)
    capacity = frame["max_tokens_per_rank"]
    options = list(zip(frame["kind"], frame["options"], strict=True))
    added: dict[str, pd.Series] = {
        "token_spread": uneven.where(~even, "even"),
        "capacity": capacity.astype(str).where(capacity != tokens, "as tokens"),
        STAGING: pd.Series([staging_of(*own) or NOT_STAGED for own in options], index=frame.index, dtype="str"),
        LAYOUT: pd.Series([layout_of(*own) or NO_LAYOUT for own in options], index=frame.index, dtype="str"),
    }
    flags = frame["flags"].str.split(" ")
    for flag in Flag:
        added[f"is_{flag}"] = pd.Series([flag in own for own in flags], index=frame.index, dtype=bool)
    dispatched = frame["phase"].isin([Phase.DISPATCH, Phase.ROUND_TRIP])
    combined = frame["phase"].isin([Phase.COMBINE, Phase.ROUND_TRIP])
    row_bytes = dispatched * frame["padded_bytes"] + combined * frame["combine_row_bytes"]
    for view, count in VIEWS.items():
        sent = frame[count].to_numpy(np.float64, na_value=np.nan) * row_bytes
        added[view] = sent.where(dispatched | combined)
        added[gbps(view)] = added[view] / frame["latency_us"] / 1e3
    counted = frame["nvlink_tx_bytes"].to_numpy(np.float64, na_value=np.nan)
    round_trip = frame["phase"] == Phase.ROUND_TRIP
    exact = frame["nvlink_wire_bytes"].to_numpy(np.float64, na_value=np.nan)
    rounded = added["wire_bytes"].where(ROUNDED * frame["pairs_remote_sum"].fillna(0) > 0.5)
    wire = rounded.where(np.isnan(exact), exact)  # see `link_bytes.ratio`
    added["nvlink_ratio"] = (counted / wire).where(round_trip & (wire > 0))
    return pd.concat([frame, pd.DataFrame(added), _floors(frame, paths)], axis=1)


def load_samples(*paths: Path | str) -> pd.DataFrame:
    """All samples of `paths`, one line each: run_id, point_id, phase, repeat, rank, iteration, value_us.

    Join them with rows by run_id, point_id, phase and repeat. The phase is an ordered category.

    Raises:
        StoreError: a path holds no samples, or damaged ones.
        InputError: no path.
    """
    if not paths:
        raise InputError("no runs given. Name one or more run directories, merged folders or samples.parquet files")
    frame = store.load_samples([Path(path) for path in paths])
    frame["phase"] = frame["phase"].astype(pd.CategoricalDtype([word.value for word in Phase], ordered=True))
    return frame


def gbps(view: str) -> str:
    """The column with the bandwidth of a byte view: `wire_bytes` -> `wire_gbps`.

    Raises:
        InputError: no such view.
    """
    if view not in VIEWS:
        raise InputError(f"view '{view}' is unknown; allowed: {', '.join(VIEWS)}")
    return view.removesuffix("_bytes") + "_gbps"


def headline(frame: pd.DataFrame, keep: Iterable[Flag | str] = ()) -> Headline:
    """The ok rows without flags; those of `terms.CAPTIONED` stay, since captions say them, and so do those in `keep`.

    Raises:
        InputError: a flag in `keep` is unknown.
    """
    kept = {str(flag) for flag in keep}
    if unknown := sorted(kept - set(Flag)):
        raise InputError(f"flag {', '.join(unknown)} is unknown; allowed: {', '.join(Flag)}")
    barred = [flag for flag in Flag if flag not in kept | CAPTIONED]
    ok = frame["status"] == Status.OK
    flagged = frame[[f"is_{flag}" for flag in barred]].any(axis=1)
    counts = {str(word): int((frame["status"] == word).sum()) for word in Status if word is not Status.OK}
    counts |= {str(flag): int((ok & frame[f"is_{flag}"]).sum()) for flag in barred}
    left_out = {word: count for word, count in counts.items() if count}
    rows = frame[ok & ~flagged]
    notes = []
    if left_out:
        words = ", ".join(f"{count} {word}" for word, count in left_out.items())
        notes.append(f"{len(frame) - len(rows)} of {len(frame)} rows left out: {words}")
    if capped := int(rows[f"is_{Flag.POWER_CAPPED}"].sum()):
        notes.append(f"{capped} of {len(rows)} rows at the power limit of a GPU ({Flag.POWER_CAPPED})")
    inside = {flag: int(rows[f"is_{flag}"].sum()) for flag in Flag if flag in kept}
    if words := ", ".join(f"{count} {flag}" for flag, count in inside.items() if count):
        notes.append(f"flagged rows kept: {words}")
    return Headline(rows=rows, note="; ".join(notes), left_out=left_out)


def require_one_domain(*frames: pd.DataFrame, mixed: bool = False) -> None:
    """Refuse to set rows of several domains against each other, unless told that they may be `mixed`.

    Raises:
        InputError: the frames hold more than one domain.
    """
    found = sorted({str(domain) for frame in frames for domain in frame["domain"].unique()})
    if len(found) > 1 and not mixed:
        raise InputError(
            f"rows of the domains {', '.join(found)} are not comparable. Load one of them (load(..., domains=['"
            f"{found[0]}'])), or pass mixed=True if the difference between domains is what you look at"
        )


def require_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    """Refuse column names that the frame has not.

    Raises:
        InputError: with all unknown names.
    """
    if unknown := [name for name in names if name not in frame.columns]:
        raise InputError(f"no column {', '.join(unknown)}. The columns are: {', '.join(map(str, frame.columns))}")


def _known_domains(domains: Iterable[Domain | str]) -> list[str]:
    wanted = [str(domain) for domain in ([domains] if isinstance(domains, str) else domains)]
    if unknown := sorted(set(wanted) - set(Domain)):
        raise InputError(f"domain {', '.join(unknown)} is unknown; allowed: {', '.join(Domain)}")
    return wanted


def _typed(column: pd.Series) -> pd.Series:
    """One stored column as analysis wants it: no missing words, plain numbers where none is missing."""
    name = str(column.name)
    if name in CLOSED_LISTS:
        words = [word.value for word in CLOSED_LISTS[name]]
        if name in _WHERE_MISSING:
            missing = _WHERE_MISSING[name]
            words += [missing] if missing not in words else []
            column = column.fillna(missing)
        return column.astype(pd.CategoricalDtype(words, ordered=True))
    if name in _OPTIONAL_WORDS:
        return column.fillna(NOT_REPORTED)
    if name in ("compute", "compute_version"):
        return column.fillna("").replace("", NO_COMPUTE)
    if name == "compute_options":
        return column.fillna("{}")
    plain = None if ROWS_SCHEMA.field(name).nullable else _PLAIN.get(str(column.dtype))
    return column if plain is None else column.astype(plain)


def _floors(frame: pd.DataFrame, paths: Iterable[Path | str]) -> pd.DataFrame:
    """The floor of each row's run, domain and EP size; no columns if no run has one."""
    lines = [
        {"run_id": run_id, "domain": floor["domain"], "ep_size": floor["ep_size"], **_floor_numbers(floor)}
        for run_id, floors in _floors_of_runs(paths).items()
        for floor in floors.values()
    ]
    if not lines:
        return pd.DataFrame(index=frame.index)
    keys = ["run_id", "domain", "ep_size"]
    floors = pd.DataFrame(lines).drop_duplicates(keys).set_index(keys).astype("float64")
    rows = pd.MultiIndex.from_arrays([frame["run_id"], frame["domain"].astype(str), frame["ep_size"]])
    return floors.reindex(rows).set_axis(frame.index)


def _floors_of_runs(paths: Iterable[Path | str]) -> dict[str, dict[str, Any]]:
    floors = {}
    for path in map(Path, paths):
        folders = [path] if (path / "run.json").exists() else sorted((path / "runs").glob("*"))
        for folder in folders:
            if (folder / "floor.json").exists():
                run = store.open_run(folder)
                floors[run.run_id] = store.read_floor(run) or {}
    return floors


def _floor_numbers(floor: Mapping[str, object]) -> dict[str, object]:
    return {
        f"floor_{name}": value
        for name, value in floor.items()
        if name.endswith(("_us", "_gbps")) and (value is None or isinstance(value, int | float))
    }
