"""From what the ranks of a unit saw to its rows and samples."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from epcross.harness.backends.base import Backend, Description
from epcross.harness.measuring import stats
from epcross.harness.measuring.timing import Series
from epcross.harness.point import Timing, Unit
from epcross.harness.record import Record, Samples, UnitResult
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import HEADLINES, Boundary, Flag, Phase, Regime, Status

LATE_START_SHARE = 0.1
"""A median start skew above this share of the median round trip earns `Flag.LATE_START`."""

ENOUGH_LAUNCHES = 5
"""Below this an interval says nothing about launches, and the row is flagged `within_launch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One timed series of one rank."""

    seed: int
    chain: int
    series: Series


def chains_to_bytes(chains: Sequence[Chain]) -> bytes:
    """JSON, to be gathered."""
    return json.dumps(
        [
            {
                "seed": c.seed,
                "chain": c.chain,
                "pairs": c.series.pairs,
                "starts_ns": c.series.starts_ns,
                "clock_error_us": c.series.clock_error_us,
                "enqueue_us": c.series.enqueue_us,
                "graph_pairs": c.series.graph_pairs,
                "held": c.series.held,
                "values_us": {str(phase): values for phase, values in c.series.values_us.items()},
            }
            for c in chains
        ]
    ).encode()


def chains_from_bytes(data: bytes) -> list[Chain]:
    """What `chains_to_bytes` packed."""
    return [
        Chain(
            seed=item["seed"],
            chain=item["chain"],
            series=Series(
                values_us={Phase(phase): values for phase, values in item["values_us"].items()},
                starts_ns=item["starts_ns"],
                pairs=item["pairs"],
                clock_error_us=item["clock_error_us"],
                enqueue_us=item["enqueue_us"],
                graph_pairs=item["graph_pairs"],
                held=item["held"],
            ),
        )
        for item in json.loads(data)
    ]


def description_to_json(description: Description) -> bytes:
    """JSON, to be gathered."""
    return json.dumps(asdict(description)).encode()


def description_from_json(data: bytes) -> Description:
    """What `description_to_json` packed."""
    fields = json.loads(data)
    return Description(**{**fields, "kernels": tuple(fields["kernels"])})


def described_fields(backend: Backend, descriptions: Sequence[Description]) -> dict[str, Any]:
    """Record fields from what every rank says it ran; sizes are the largest over ranks."""
    first = descriptions[0]
    protocol = [d.protocol_bytes for d in descriptions if d.protocol_bytes is not None]
    return {
        "backend_version": first.version,
        "transport": _agreed(d.transport for d in descriptions),
        "algorithm": _agreed(d.algorithm for d in descriptions) or None,
        "kernels": " ".join(first.kernels) or None,
        "libraries": _agreed(json.dumps(dict(d.libraries), sort_keys=True) for d in descriptions if d.libraries)
        or None,
        "weights_by": str(backend.weights_by),
        "workspace_bytes": max(d.workspace_bytes for d in descriptions),
        "protocol_bytes": max(protocol) if len(protocol) == len(descriptions) else None,
        "num_sms": max(d.num_sms for d in descriptions),
    }


def unit_result(
    unit: Unit,
    timing: Timing,
    common: Record,
    ranks: Sequence[Sequence[Chain]],
    *,
    flags: frozenset[Flag],
    boundary: Mapping[Phase, frozenset[Boundary]],
) -> UnitResult:
    """Rows and samples of a unit that verified: one row for each phase of its regime and each (seed, chain).

    `ranks[r]` are rank r's chains, all ranks' in the same order. A phase without usable samples becomes `no_timing`.
    """
    records: list[Record] = []
    samples: list[Samples] = []
    if timing.launches < ENOUGH_LAUNCHES:
        flags |= {Flag.WITHIN_LAUNCH}
    for chains in zip(*ranks, strict=True):
        head = chains[0]
        repeat = timing.repeat(unit.launch, head.seed, head.chain)
        skew_us = _start_skew_us([c.series.starts_ns for c in chains])
        for phase in unit.point.phases:
            values = [c.series.values_us.get(phase, []) for c in chains]
            row = replace(
                common,
                phase=phase,
                repeat=repeat,
                seed=head.seed,
                chain=head.chain,
                pairs=head.series.pairs,
                enqueue_us=_largest([c.series.enqueue_us for c in chains]),
                graph_pairs=head.series.graph_pairs,
                held=head.series.held,
                boundary=join_words(boundary.get(phase, frozenset())),
            )
            estimate = stats.estimate(unit.point.regime, values)
            if isinstance(estimate, stats.NoTiming):
                reason = estimate.reason
                if unit.point.regime is Regime.SPANS and not all(values):
                    reason = f"the profiler gave no kernels of some {phase}: {reason}"
                records.append(replace(row, status=Status.NO_TIMING, reason=reason, flags=join_words(flags)))
                continue
            marks = set(flags)
            if unit.point.regime is Regime.ENTRY:
                error_us = round(max(c.series.clock_error_us for c in chains), 3)
                row = replace(row, start_skew_us=skew_us, start_skew_error_us=error_us)
                if phase in HEADLINES and skew_us > LATE_START_SHARE * estimate.latency_us:
                    marks.add(Flag.LATE_START)
            records.append(
                replace(
                    row,
                    status=Status.OK,
                    flags=join_words(marks),
                    latency_us=estimate.latency_us,
                    latency_min_us=estimate.latency_min_us,
                    latency_max_us=estimate.latency_max_us,
                    estimator=estimate.estimator,
                    n_samples=estimate.n_samples,
                )
            )
            samples.append(Samples(phase=phase, repeat=repeat, values_us=values))
    return UnitResult(point_id=unit.point.point_id, launch=unit.launch, records=tuple(records), samples=tuple(samples))


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(max(known), 3) if known else None


def _start_skew_us(starts_ns: Sequence[Sequence[int]]) -> float:
    """Median over iterations of last minus first start over ranks."""
    return round(statistics.median((max(s) - min(s)) / 1000.0 for s in zip(*starts_ns, strict=True)), 3)


def _agreed(values: Any) -> str:
    """The one value of all ranks, or all of them side by side: a difference is worth seeing."""
    return " | ".join(dict.fromkeys(values))
