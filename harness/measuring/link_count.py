"""What really went over NVLink, by NVML's counters of each link, beside what a pair must send.

    barrier|read|barrier|pair|pair| ... |pair|barrier|read            a chain of its own; nothing of it is timed

Counters count KiB and are read once before and once after, so each link may be off by one; the chain is so long that
this stays below `GRANULARITY` of what is counted. They count whatever crosses the links: other processes, too.
"""

import json
import math
from typing import Any, Protocol

from epcross.harness.backends.base import Group
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.link_counters import LinkBytes
from epcross.harness.measuring.link_reader import KIB
from epcross.harness.measuring.timing import Pair

GRANULARITY = 0.005
COUNTED_MS = 15.0
"""A seed's chain lasts at least so long, so that what else is on the links, such as a barrier, is little of it."""

MAX_PAIRS = 50_000


class Counters(Protocol):
    """Of one GPU; see `LinkCounters`."""

    def read(self) -> LinkBytes | str:
        """The counters now, or why there are none, as a clause."""
        ...


class LinkCount:
    """The counters' differences over chains of pairs, all ranks together. Every call is collective."""

    def __init__(self, counters: Counters | None, group: Group) -> None:
        self._counters, self._group = counters, group
        self._pairs = 0  # of a chain
        self._chains = 0
        self._bytes = [0, 0]
        self._wire_bytes = 0.0  # of a pair of each chain, summed
        self._note = ""

    def count(self, timer: CudaTimer, pair: Pair, *, pair_us: float, wire_bytes: float, sets: int) -> None:
        """Run a chain and count. `wire_bytes` must cross in a pair, all ranks together, mean over the sets; the same
        values on all ranks."""
        if not self._note and not wire_bytes:
            self._note = "nothing is sent to another rank"
        # once without counts, always: those of some seeds would be set beside the rows of all
        before = [] if self._note else self._read()
        if self._note:
            return
        links = max(reading.links for reading in before)
        if not self._pairs:  # the same for every seed, so that the mean over seeds is that of the routing
            sent_bytes = wire_bytes / self._group.size  # by a rank, about
            enough = max(links * KIB / (GRANULARITY * sent_bytes), COUNTED_MS * 1e3 / pair_us)
            self._pairs = math.ceil(min(enough, MAX_PAIRS))
        self._pairs = timer.chain(pair, pairs=self._pairs, sets=sets)
        after = self._read()
        if self._note:
            return
        self._chains += 1
        self._wire_bytes += wire_bytes
        for direction, name in enumerate(("tx_bytes", "rx_bytes")):
            self._bytes[direction] += sum(
                getattr(b, name) - getattr(a, name) for a, b in zip(before, after, strict=True)
            )

    def fields(self) -> dict[str, Any]:
        """Record fields: bytes of one pair, summed over ranks, counted and as they must be, and how many pairs were
        counted; or why none were."""
        pairs = self._pairs * self._chains
        if self._note or not pairs:
            return {"nvlink_note": self._note or None}
        tx, rx = (round(total / pairs) for total in self._bytes)
        if min(tx, rx) < 0:
            return {"nvlink_note": "a counter of a link ran backwards: it was reset while pairs were counted"}
        wire_bytes = round(self._wire_bytes / self._chains, 3)
        return {
            "nvlink_tx_bytes": tx,
            "nvlink_rx_bytes": rx,
            "nvlink_pairs": pairs,
            "nvlink_wire_bytes": wire_bytes,
        }

    def _read(self) -> list[LinkBytes]:
        """All ranks' counters, between two barriers; nothing, and a note, if some rank has none."""
        self._group.barrier()
        own = self._counters.read() if self._counters else "torch has no GPU here"
        words = own if isinstance(own, str) else [own.tx_bytes, own.rx_bytes, own.links]
        # a barrier, too: nobody sends before all have read
        told = [json.loads(data) for data in self._group.all_gather(json.dumps(words).encode())]
        missing = [f"rank {rank}: {words}" for rank, words in enumerate(told) if isinstance(words, str)]
        self._note = missing[0] if missing else ""
        return [] if missing else [LinkBytes(tx_bytes=tx, rx_bytes=rx, links=links) for tx, rx, links in told]
