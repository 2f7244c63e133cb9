"""What the machine itself costs in the cpu domain: no exchange can be faster, and every latency is a multiple of it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from epcross.harness.backends.base import Group
from epcross.harness.backends.shm import ranks_share_cores
from epcross.harness.measuring.timing import of_all_ranks
from epcross.kernels.shm import build
from epcross.kernels.shm.layout import LINE_BYTES
from epcross.kernels.shm.native import Native
from epcross.kernels.shm.segment import Segment, attach_all, free_bytes, reserve

FALLBACK_LLC_BYTES = 32 << 20
"""Taken for the last cache where sysfs does not tell: that of many server cores that share one."""

LARGEST_BUFFER_BYTES = 256 << 20
"""Bound on what one rank copies, so that the floor stays short on machines with very large caches."""

_EMPTY_PAIRS = 2000
_ROUNDS = 2000
_ROUNDS_SHARED = 50  # where ranks share cores a round is a time slice
_COPIES = 6
_SERIES = 3
_WAIT_LIMIT_S = 10.0


def measure_floor(group: Group, *, copy_bytes: int | None = None) -> dict[str, Any]:
    """Measure the floor of the cpu domain. Collective; the same values on every rank; under 2 s.

    Args:
        copy_bytes: buffer of each rank for the bandwidth; None: twice the last cache, at most
            `LARGEST_BUFFER_BYTES` and what half of the free shared memory holds (the row states the size).

    Returns:
        `empty_pair_us`: median over pairs of two extension calls that do nothing, largest over ranks.
        `flag_one_way_us`: half a round of ping-pong between neighbours (rank, rank + 1), median over pairs; None at
        one rank. `flag_pairs_us`: each pair's.
        `copy_gbps`: bytes copied (not read plus written) per second by all ranks at once, from private memory into
        the next rank's shared memory, best of some series; 10^9 bytes per second.
        Beside them the sizes and where the cache's was read.

    Raises:
        BuildError, SegmentError, WaitExpired: as an exchange.
    """
    native = build.load()
    llc_bytes, llc_source = last_cache_bytes()
    size = copy_bytes or min(2 * llc_bytes, LARGEST_BUFFER_BYTES, free_bytes() // (2 * group.size))
    # ranks look at the free memory at different moments: the smallest answer counts
    size = max(min(int(item) for item in group.all_gather(str(size).encode())) // LINE_BYTES, 1) * LINE_BYTES
    share_cores = ranks_share_cores(group)

    own = reserve(group.shared_name, group.rank, size + 2 * LINE_BYTES)
    segments = [own]
    try:
        names = [name.decode() for name in group.all_gather(own.name.encode())]
        segments = attach_all(own, names, size + 2 * LINE_BYTES)
        group.barrier()
        own.unlink()
        empty_pair_us = max(of_all_ranks(group, _empty_pair_us(native)))
        pairs_us = _flag_pairs_us(group, native, segments, share_cores)
        copy_gbps = _copy_gbps(group, native, segments[(group.rank + 1) % group.size], size)
    finally:
        for segment in segments:
            segment.close()
    return {
        "domain": "cpu",
        "ep_size": group.size,
        "empty_pair_us": empty_pair_us,
        "flag_one_way_us": float(np.median(pairs_us)) if pairs_us else None,
        "flag_pairs_us": pairs_us,
        "flag_rounds": _ROUNDS_SHARED if share_cores else _ROUNDS,
        "copy_gbps": copy_gbps,
        "copy_bytes_per_rank": size,
        "copies": _COPIES,
        "llc_bytes": llc_bytes,
        "llc_source": llc_source,
        "ranks_share_cores": share_cores,
    }


def last_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, str]:
    """Size of the largest cache of the core this runs on, and where it was read."""
    core = min(os.sched_getaffinity(0))
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    best, source = 0, ""
    for path in sorted((root / f"cpu{core}" / "cache").glob("index*/size")):
        try:
            text = path.read_text().strip()
            size = int(text.rstrip("KMG")) * units.get(text[-1:], 1)
        except (OSError, ValueError):
            continue
        if size > best:
            best, source = size, str(path)
    return (best, source) if best else (FALLBACK_LLC_BYTES, "assumed: sysfs does not tell")


def _empty_pair_us(native: Native) -> float:
    samples = np.empty(_EMPTY_PAIRS)
    for index in range(_EMPTY_PAIRS):
        start = time.perf_counter_ns()
        native.empty()
        native.empty()
        samples[index] = time.perf_counter_ns() - start
    return float(np.median(samples)) / 1e3


def _flag_pairs_us(group: Group, native: Native, segments: list[Segment], share_cores: bool) -> list[float]:
    """One neighbouring pair at a time, the others wait in the group's barrier: 2 ranks have one pair, n have n."""
    if group.size == 1:
        return []
    pairs = [(rank, (rank + 1) % group.size) for rank in range(group.size if group.size > 2 else 1)]
    rounds = _ROUNDS_SHARED if share_cores else _ROUNDS
    measured = []
    for first, second in pairs:
        seconds = 0.0
        if group.rank in (first, second):
            leads = group.rank == first
            # line 0 of a rank's segment is written when it leads, line 1 when it answers: each starts at 0
            mine, theirs = (segments[first].buffer, 0), (segments[second].buffer, 1)
            if not leads:
                mine, theirs = theirs, mine
            with memoryview(mine[0]) as own_view, memoryview(theirs[0]) as peer_view:
                seconds = native.ping_pong(
                    own_view[mine[1] * LINE_BYTES : (mine[1] + 1) * LINE_BYTES],
                    peer_view[theirs[1] * LINE_BYTES : (theirs[1] + 1) * LINE_BYTES],
                    first=leads,
                    rounds=rounds,
                    rank=group.rank,
                    peer=second if leads else first,
                    wait_limit_s=_WAIT_LIMIT_S,
                    share_cores=share_cores,
                )
        measured.append(max(of_all_ranks(group, seconds)) / 2 * 1e6)
    return measured


def _copy_gbps(group: Group, native: Native, target: Segment, size: int) -> float:
    source = memoryview(bytearray(b"\1") * size)  # written: a page never touched is not memory
    best = 0.0
    with memoryview(target.buffer) as view, view[2 * LINE_BYTES : 2 * LINE_BYTES + size] as destination:
        for _ in range(_SERIES):
            group.barrier()
            own = native.timed_copies(destination, source, _COPIES)
            spans = [json.loads(span) for span in group.all_gather(json.dumps(own).encode())]
            # one clock on one host: all bytes over the time from the first start to the last end
            elapsed_s = max(end for _, end in spans) - min(start for start, _ in spans)
            best = max(best, group.size * size * _COPIES / elapsed_s / 1e9)
    return best
