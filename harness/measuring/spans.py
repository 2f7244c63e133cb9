"""From a profiler's trace to how long each phase kept the GPU.

A kernel belongs to the range that its launch lies in. torch's profiler names, for each kernel, the correlation number
of the driver or runtime call that launched it; the call has a time on the host, and ranges have, too.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.measuring.device import KernelSpan
from epcross.harness.terms import Phase

_PREFIX = "epcross"
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


def range_name(phase: Phase, pair: int) -> str:
    """The range that a phase of one pair is enqueued in."""
    return f"{_PREFIX} {phase} {pair}"


def phase_spans(seen: Sequence[KernelSpan], phase: Phase | Sequence[Phase], pairs: int) -> list[float]:
    """Microseconds from the first start to the last end of each pair's kernels; empty if some pair has none.

    Kernels that overlap count once. A list with gaps would be a guess at which pair was lost, so there is none then.
    Of several phases the span is one, from the first of them to the last.
    """
    phases = (phase,) if isinstance(phase, Phase) else phase
    by_range: dict[str, list[KernelSpan]] = {}
    for span in seen:
        by_range.setdefault(span.range, []).append(span)
    values = []
    for pair in range(pairs):
        own = [span for each in phases for span in by_range.get(range_name(each, pair), [])]
        if not own:
            return []
        values.append(max(span.end_us for span in own) - min(span.begin_us for span in own))
    return values


def kernel_spans(events: Sequence[Mapping[str, Any]]) -> list[KernelSpan]:
    """Every kernel of a Chrome trace (`traceEvents` of torch's profiler) whose launch lies in a range of ours."""
    ranges = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(f"{_PREFIX} ")
    )
    begins = [begin for begin, _, _ in ranges]
    launched_at = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        at = launched_at.get(event.get("args", {}).get("correlation")) if event.get("cat") in _ON_DEVICE else None
        if at is None:
            continue
        place = bisect_right(begins, at) - 1  # ranges do not nest
        if place >= 0 and at <= ranges[place][1]:
            begin = float(event["ts"])
            found.append(
                KernelSpan(
                    name=event["name"], range=ranges[place][2], begin_us=begin, end_us=begin + float(event["dur"])
                )
            )
    return found
