"""Claims that follow from published numbers alone: recomputed bandwidths, wire times, nominal values."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epcross.harness.claims.book import Book
from epcross.harness.claims.claim import Claim, Quantity
from epcross.harness.claims.hardware import link_gbps
from epcross.kernels.formats import RowFormat, row_size

if TYPE_CHECKING:
    import pandas as pd

_CELL = (
    "backend", "phase", "hardware", "ep_size", "tokens_per_rank", "hidden", "top_k", "num_experts", "dispatch_format",
    "combine_format",
)  # fmt: skip
"""What a latency and a bandwidth of one cell of a table share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number that follows from published ones."""

    factors: Mapping[str, Any] = field(default_factory=dict)  # the open ones
    value: float | None  # None: there is none
    at: str = ""  # what it was taken from, or why it is missing


def facts(claim: Claim, book: Book, published: "pd.DataFrame") -> Iterator[Fact]:
    """The numbers that such a claim is held against, one for each value of what its source leaves open."""
    if claim.quantity is Quantity.RECOMPUTED_ERROR:
        yield _recomputed_error(claim, published)
    elif claim.quantity is Quantity.NOMINAL:
        for evidence in claim.evidence:
            value = link_gbps(published, evidence)
            where = f"{evidence.hardware} in {evidence.source}"
            yield Fact(value=value, at=where if value is not None else f"no single published bandwidth of {where}")
    else:
        yield from _wire_times(claim, book, published)


def _recomputed_error(claim: Claim, published: "pd.DataFrame") -> Fact:
    own = published[published["source"] == claim.source]
    latencies = own[own["recomputed_gbps"].notna()]
    both = latencies.merge(own[own["stated_gbps"].notna()], on=list(_CELL), suffixes=("", "_of_table"))
    if both.empty:
        return Fact(value=None, at=f"{claim.source} has no cell with a latency and a bandwidth whose bytes are known")
    errors = (both["recomputed_gbps"] / both["stated_gbps_of_table"] - 1).abs()
    return Fact(value=float(errors.max()), at=f"the worst of {len(both)} cells")


def _wire_times(claim: Claim, book: Book, published: "pd.DataFrame") -> Iterator[Fact]:
    system = book.systems[claim.hardware]
    nominal = link_gbps(published, system.nominal) if system.nominal else None
    if nominal is None:
        yield Fact(value=None, at=f"no nominal bandwidth of {claim.hardware} is among the published values")
        return
    names = list(claim.open)
    for values in itertools.product(*claim.open.values()):
        factors = dict(zip(names, values, strict=True))
        given = {**claim.where, **factors}
        needed = ("tokens_per_rank", "ep_size", "top_k", "hidden", "dispatch_format")
        if missing := [name for name in needed if isinstance(given.get(name), Mapping | list | None)]:
            yield Fact(factors=factors, value=None, at=f"a wire time needs one value of {', '.join(missing)} at a time")
            continue
        row = row_size(RowFormat(given["dispatch_format"]), given["hidden"])
        targets = min(given["ep_size"], given["top_k"])
        sent_bytes = given["tokens_per_rank"] * targets * (row.row_bytes + row.scale_bytes)
        yield Fact(factors=factors, value=sent_bytes / nominal / 1e3)
