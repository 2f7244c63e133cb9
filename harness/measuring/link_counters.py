"""What really went over NVLink, by NVML's counters of each link, beside what a pair must send.

    barrier|read|barrier|pair|pair| ... |pair|barrier|read            a chain of its own; nothing of it is timed

Counters count KiB and are read once before and once after, so each link may be off by one; the chain is so long that
this stays below `GRANULARITY` of what is counted. They count whatever crosses the links: other processes, too.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from epcross.harness.backends.base import Group
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.timing import Pair

KIB = 1024
GRANULARITY = 0.005
COUNTED_MS = 15.0
"""A seed's chain lasts at least so long, so that what else is on the links, such as a barrier, is little of it."""

MAX_PAIRS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Since the driver was loaded, sums over the links of one GPU."""

    tx_bytes: int
    rx_bytes: int
    links: int  # that are counted


class LinkCounters:
    """The counters of one GPU. `nvml` is the module pynvml, or a stand-in."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._links: int | None = None  # of this GPU

    def read(self) -> LinkBytes | str:
        """The counters now, or why there are none, as a clause."""
        nvml = self._nvml
        try:
            if self._links is None:
                # of links that are there only: on H200s, which have 18, processes that had asked for 36 ended with a
                # damaged heap, found when the answers were freed
                self._links = self._ask([(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)], "uiVal")[0] or 0
            directions = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
            told = [self._ask([(field, link) for link in range(self._links)], "ullVal") for field in directions]
        except AttributeError as error:
            return f"this pynvml is too old for counters of links ({error})"
        except nvml.NVMLError as error:
            return f"NVML gives no counters of links: {error}"
        # a link is counted in both directions or in none
        links = [(tx, rx) for tx, rx in zip(*told, strict=True) if tx is not None and rx is not None]
        if not links:
            return "NVML counts no link of this GPU"
        tx, rx = (sum(direction) * KIB for direction in zip(*links, strict=True))
        return LinkBytes(tx_bytes=tx, rx_bytes=rx, links=len(links))

    def _ask(self, fields: list[tuple[int, int]], member: str) -> list[int | None]:
        """What NVML says of each (field, link), in that member of its union; None where it has no answer."""
        values = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields) if fields else []
        return [
            int(getattr(value.value, member)) if value.nvmlReturn == self._nvml.NVML_SUCCESS else None
            for value in values
        ]


class LinkCount:
    """The counters' differences over chains of pairs, all ranks together. Every call is collective."""

    def __init__(self, counters: LinkCounters | None, group: Group) -> None:
        self._counters, self._group = counters, group
        self._pairs = 0  # of a chain
        self._chains = 0
        self._bytes = [0, 0]
        self._note = ""

    def count(self, timer: CudaTimer, pair: Pair, *, pair_us: float, sent_bytes: float, sets: int) -> None:
        """Run a chain and count. `sent_bytes` is what a rank sends in a pair, about; the same values on all ranks."""
        before = self._read()
        if self._note or not sent_bytes:
            self._note = self._note or "nothing is sent to another rank"
            return
        links = max(reading.links for reading in before)
        if not self._pairs:  # the same for every seed, so that the mean over seeds is that of the routing
            enough = max(links * KIB / (GRANULARITY * sent_bytes), COUNTED_MS * 1e3 / pair_us)
            self._pairs = math.ceil(min(enough, MAX_PAIRS))
        self._pairs = timer.chain(pair, pairs=self._pairs, sets=sets)
        after = self._read()
        if self._note:
            return
        self._chains += 1
        for direction, name in enumerate(("tx_bytes", "rx_bytes")):
            self._bytes[direction] += sum(
                getattr(b, name) - getattr(a, name) for a, b in zip(before, after, strict=True)
            )

    def fields(self) -> dict[str, Any]:
        """Record fields: bytes of one pair, summed over ranks, and how many pairs were counted; or why none were."""
        pairs = self._pairs * self._chains
        if self._note or not pairs:
            return {"nvlink_note": self._note or None}
        tx, rx = (round(total / pairs) for total in self._bytes)
        if min(tx, rx) < 0:
            return {"nvlink_note": "a counter of a link ran backwards: it was reset while pairs were counted"}
        return {"nvlink_tx_bytes": tx, "nvlink_rx_bytes": rx, "nvlink_pairs": pairs}

    def _read(self) -> list[LinkBytes]:
        """All ranks' counters, between two barriers; nothing, and a note, if some rank has none."""
        self._group.barrier()
        own = self._counters.read() if self._counters else "there is no NVML here (nvidia-ml-py)"
        words = own if isinstance(own, str) else [own.tx_bytes, own.rx_bytes, own.links]
        # a barrier, too: nobody sends before all have read
        told = [json.loads(data) for data in self._group.all_gather(json.dumps(words).encode())]
        missing = [f"rank {rank}: {words}" for rank, words in enumerate(told) if isinstance(words, str)]
        self._note = missing[0] if missing else ""
        return [] if missing else [LinkBytes(tx_bytes=tx, rx_bytes=rx, links=links) for tx, rx, links in told]
