"""From a point to its rows: the columns that follow from the point, one row per planned phase and repeat, the rules."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from types import NoneType
from typing import get_args, get_type_hints

from epcross.harness.point import Point, Routing, Timing
from epcross.harness.record import SCHEMA_VERSION, Record
from epcross.harness.terms import (
    PHASES,
    BackendKind,
    Boundary,
    Domain,
    Flag,
    Phase,
    PlacementKind,
    Regime,
    RoutingKind,
    RowFormat,
    Scope,
    Sharing,
    Stage,
    Status,
    WeightFormat,
    WeightsBy,
)
from epcross.kernels.formats import row_size

_SELECTION_BYTES = 4 + 4  # an int32 id and its fp32 weight


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What every row of a run shares."""

    run_id: str
    measure_hash: str
    machine: str
    allocation_id: str
    git_sha: str
    git_dirty: bool


def base_record(point: Point, context: RunContext) -> Record:
    """A record with every column that follows from the point and the run; the rest keep their defaults.

    Raises:
        ValueError: the hidden size cannot be a row of the point's formats.
    """
    dispatch = row_size(point.dispatch_format, point.model.hidden)
    combine = row_size(point.combine_format, point.model.hidden)
    return Record(
        run_id=context.run_id,
        point_id=point.point_id,
        backend=point.backend,
        options=canonical_json(dict(point.options)),
        domain=point.domain,
        sharing=point.sharing,
        scope=point.scope,
        model=point.model.name,
        num_experts=point.model.num_experts,
        num_slots=point.placement.num_slots,
        top_k=point.model.top_k,
        hidden=point.model.hidden,
        intermediate=point.model.intermediate,
        ep_size=point.ep_size,
        tokens_per_rank=point.tokens_per_rank,
        tokens_min=min(point.tokens, default=0),
        tokens_total=sum(point.tokens),
        max_tokens_per_rank=point.max_tokens_per_rank,
        routing=point.routing.kind,
        routing_params=canonical_json(_routing_params(point.routing)),
        placement=point.placement.kind,
        dispatch_format=point.dispatch_format,
        combine_format=point.combine_format,
        regime=point.regime,
        kind=point.kind,
        compute=point.compute,
        compute_options=canonical_json(dict(point.compute_options)),
        weight_format=point.weight_format,
        row_bytes=dispatch.row_bytes,
        scale_bytes=dispatch.scale_bytes,
        padded_bytes=dispatch.padded_bytes,
        combine_row_bytes=combine.padded_bytes,
        metadata_bytes=point.model.top_k * _SELECTION_BYTES,
        measure_hash=context.measure_hash,
        machine=context.machine,
        allocation_id=context.allocation_id,
        git_sha=context.git_sha,
        git_dirty=context.git_dirty,
    )


def planned_records(base: Record, timing: Timing, launch: int) -> tuple[Record, ...]:
    """`base` once for each planned phase, seed and chain of one launch, with the repeat's columns filled."""
    return tuple(
        replace(base, phase=phase, repeat=timing.repeat(launch, seed, chain), launch=launch, seed=seed, chain=chain)
        for phase in PHASES[_kind(base)][Regime(base.regime)]
        for seed in range(timing.seeds)
        for chain in range(timing.chains)
    )


def failed_records(
    point: Point,
    timing: Timing,
    launch: int,
    context: RunContext,
    status: Status,
    reason: str,
    *,
    failed_rank: int | None = None,
    failed_stage: Stage | None = None,
    flags: Iterable[Flag] = (),
) -> tuple[Record, ...]:
    """The rows of a launch that has no latency: one per planned phase and repeat, all with the same reason.

    Raises:
        ValueError: the status is ok, or the reason is empty.
    """
    sentence = " ".join(reason.split()).encode(errors="replace").decode()  # it may quote a file name of no encoding
    if status is Status.OK or not sentence:
        raise ValueError(f"a failed row needs a status other than ok and a reason, not {status!r} and {reason!r}")
    base = replace(
        base_record(point, context),
        status=status,
        reason=sentence,
        failed_rank=failed_rank,
        failed_stage=failed_stage,
        flags=join_words(flags),
    )
    return planned_records(base, timing, launch)


def join_words(words: Iterable[str]) -> str:
    """Words of a closed list as one column: each once, sorted, joined by a space."""
    return " ".join(sorted({str(word) for word in words}))


def canonical_json(values: Mapping[str, object]) -> str:
    """The one JSON text of these values: sorted keys, no blanks."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def is_timed(phase: str, regime: str, kind: str | None) -> bool:
    """Whether `phase` is timed in this regime of backends of this kind; rows from before there were others have none.

    Raises:
        ValueError: a word is in no list.
    """
    return Phase(phase) in PHASES[BackendKind(kind or BackendKind.EXCHANGE)][Regime(regime)]


def _kind(record: Record) -> BackendKind:
    """Rows from before there were others have none."""
    return BackendKind(record.kind or BackendKind.EXCHANGE)


def _routing_params(routing: Routing) -> dict[str, object]:
    """What the kind uses: the fields that are not at their default; a file counts by its content."""
    default = asdict(Routing())
    return {
        name: value
        for name, value in asdict(routing).items()
        if name not in ("kind", "path") and value != default[name]
    }


CLOSED_LISTS: Mapping[str, type[StrEnum]] = {
    "phase": Phase,
    "status": Status,
    "failed_stage": Stage,
    "weights_by": WeightsBy,
    "domain": Domain,
    "sharing": Sharing,
    "scope": Scope,
    "routing": RoutingKind,
    "placement": PlacementKind,
    "dispatch_format": RowFormat,
    "combine_format": RowFormat,
    "regime": Regime,
    "kind": BackendKind,
    "weight_format": WeightFormat,
}
"""Columns that hold one word of a closed list."""

CLOSED_WORDS: Mapping[str, type[StrEnum]] = {"flags": Flag, "boundary": Boundary}
"""Columns that hold words of a closed list, sorted, once each, joined by a space."""

_LATENCY = ("latency_us", "latency_min_us", "latency_max_us", "estimator")
_REQUIRED = ("run_id", "point_id", "backend", "model", "measure_hash", "machine", "allocation_id")
_TYPES: dict[str, tuple[type, ...]] = {name: get_args(kind) or (kind,) for name, kind in get_type_hints(Record).items()}


def check_record(record: Record) -> list[str]:
    """Every rule that `record` breaks, as sentences; empty if it may be stored."""
    problems = _type_problems(record)
    if problems:
        return problems  # the rules below need the types
    if record.schema_version != SCHEMA_VERSION:
        problems.append(f"schema_version is {record.schema_version}; this epcross writes {SCHEMA_VERSION}")
    problems += [f"{name} is empty" for name in _REQUIRED if not getattr(record, name)]
    problems += _closed_list_problems(record)
    problems += [
        f"{name} is negative: {getattr(record, name)}"
        for name in ("repeat", "launch", "seed", "chain", "attempt", "position", "n_samples", "pairs")
        if getattr(record, name) < 0
    ]
    return problems + (_latency_problems(record) if record.status in set(Status) else [])


def readable_problems(record: Record) -> list[str]:
    """What keeps a stored record, of this schema version or an older one, from being used."""
    return _type_problems(record) or _closed_list_problems(record)


def _type_problems(record: Record) -> list[str]:
    problems = []
    for name, allowed in _TYPES.items():
        value = getattr(record, name)
        kinds = (*allowed, int) if float in allowed else allowed  # a whole number of microseconds is a number
        exact = isinstance(value, kinds) and (not isinstance(value, bool) or bool in allowed)
        if not exact:
            words = " or ".join("None" if kind is NoneType else kind.__name__ for kind in allowed)
            problems.append(f"{name} is {value!r} of type {type(value).__name__}; it must be {words}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} is {value}; it must be finite")
    return problems


def _closed_list_problems(record: Record) -> list[str]:
    problems = []
    for name, words in CLOSED_LISTS.items():
        value = getattr(record, name)
        if value is not None and value not in set(words):
            problems.append(f"{name} is {value!r}; allowed: {', '.join(words)}")
    for name, words in CLOSED_WORDS.items():
        value = getattr(record, name) or ""
        unknown = sorted(set(value.split()) - set(words))
        if unknown:
            problems.append(f"{name} has {', '.join(unknown)}; allowed: {', '.join(words)}")
        elif value != join_words(value.split()):
            problems.append(f"{name} is {value!r}; its words must be sorted, once each, joined by one space")
    if problems:
        return problems
    if not is_timed(record.phase, record.regime, record.kind):
        kind = "" if _kind(record) is BackendKind.EXCHANGE else f", of kind {_kind(record)}"
        problems.append(f"phase {record.phase} is not timed in regime {record.regime}{kind}")
    return problems


def _latency_problems(record: Record) -> list[str]:
    if record.status != Status.OK:
        problems = [f"status {record.status} needs a reason"] if not (record.reason or "").strip() else []
        return problems + [
            f"{name} is {getattr(record, name)!r} though status is {record.status}; only ok rows have a latency"
            for name in _LATENCY
            if getattr(record, name) is not None
        ]
    problems = [f"{name} is missing though status is ok" for name in _LATENCY if getattr(record, name) in (None, "")]
    if record.reason is not None:
        problems.append(f"reason is {record.reason!r} though status is ok")
    if record.n_samples < 1:
        problems.append("n_samples is 0 though status is ok")
    if record.error_share is None and _kind(record) is not BackendKind.EXCHANGE:
        problems.append(f"error_share is missing though status is ok and kind is {_kind(record)}; say how near it was")
    if (record.error_share or 0) > 1:
        problems.append(f"error_share is {record.error_share} though status is ok; above 1 outputs are wrong")
    low, latency, high = record.latency_min_us, record.latency_us, record.latency_max_us
    if low is not None and latency is not None and high is not None and not 0 < low <= latency <= high:
        problems.append(
            f"latencies must be positive and in order, not min {low}, latency {latency}, max {high} microseconds"
        )
    return problems
