"""What a claim is, and the closed lists its YAML is written in. `book` reads it; `judge` judges it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from epcross.harness.claims.verdict import Better, Bounds
from epcross.harness.point import Scalar
from epcross.harness.terms import Phase


class Kind(StrEnum):
    """What sort of statement it is; it decides on which machines it can be judged."""

    ABSOLUTE = "absolute"  # a time or bandwidth: on the named hardware only
    RATIO = "ratio"  # relative: on any NVLink system
    TREND = "trend"
    CROSSOVER = "crossover"
    COUNT = "count"
    ARITHMETIC = "arithmetic"  # follows from published numbers; counted apart
    NOMINAL = "nominal"  # a number of a data sheet; counted apart


APART = (Kind.ARITHMETIC, Kind.NOMINAL)
"""Facts to check, not measurements to take."""


class Operator(StrEnum):
    """How the source puts it."""

    BETWEEN = "between"
    AT_MOST = "at most"
    AT_LEAST = "at least"
    ABOUT = "about"
    UP_TO = "up to"  # must be reached, so it has a lower bound too


class Quantity(StrEnum):
    """What is computed. A ratio of two latencies is taken within one run, on the same routing."""

    LATENCY = "latency_us"  # of a phase, at every batch
    SPEEDUP = "speedup"  # baseline over subject, at every batch
    SPEEDUP_TREND = "speedup_trend"  # slope of log speedup over log tokens; 0 does not change
    CROSSOVER = "crossover_tokens"  # tokens per rank up to which the subject leads
    SHARE = "share"  # phase layer_comm over layer
    SHARE_TREND = "share_trend"  # slope of the logarithm of that share over log tokens
    CHANGE = "change"  # latency at `change.to` over that at `change.base`
    BANDWIDTH_CHANGE = "bandwidth_change"  # the same of logical bytes over latency
    SPREAD = "spread"  # largest over smallest latency of the batches
    WIRE_MULTIPLE = "wire_multiple"  # latency over the time of the remote bytes at nominal bandwidth
    BANDWIDTH_SHARE = "bandwidth_share"  # logical bytes of a rank over latency, of nominal bandwidth; the largest
    INCORRECT_ROWS = "incorrect_rows"  # rows whose outputs were wrong, among those verified
    # of published numbers
    RECOMPUTED_ERROR = "recomputed_error"  # largest relative error of bandwidths recomputed from latencies
    WIRE_TIME = "wire_time_us"  # bytes of a rank at nominal bandwidth
    NOMINAL = "nominal_gbps"  # what other sources say


OF_PUBLISHED = (Quantity.RECOMPUTED_ERROR, Quantity.WIRE_TIME, Quantity.NOMINAL)
OVER_BASELINE = (Quantity.SPEEDUP, Quantity.SPEEDUP_TREND, Quantity.CROSSOVER)
OF_CHANGE = (Quantity.CHANGE, Quantity.BANDWIDTH_CHANGE)


class Members(StrEnum):
    """How a subject of several backends is judged."""

    FASTEST = "fastest"  # the fastest at each batch
    EACH = "each"  # every one of them must hold


class Batches(StrEnum):
    """Which batches a claim is about."""

    EVERY = "every"  # it must hold at each
    LARGEST = "largest"  # it is about the largest value over them


class Way(StrEnum):
    """What it means that a claim holds."""

    REPRODUCES = "reproduces"  # measured with the kernel the claim is about, as shipped
    REPLICATES = "replicates"  # measured with the kernel of this repository
    CHECKS = "checks"  # followed from published numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A backend with some of its options, and of a layer the expert stage; what is not named may be anything.

    Except `staging`: unless it is named, rows whose inputs were quantised or staged before the window do not count.
    """

    backend: str
    options: Mapping[str, Scalar] = field(default_factory=dict)
    compute: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Whom a claim is about, or compares with: the backends that stand for it."""

    says: str  # in the source's words
    reproduces: tuple[str | Member, ...] = ()
    replicates: tuple[str | Member, ...] = ()

    def members(self, way: Way) -> tuple[Member, ...]:
        """The backends of one way."""
        named = self.reproduces if way is Way.REPRODUCES else self.replicates
        return tuple(Member(backend=one) if isinstance(one, str) else one for one in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One published number, found by these columns; `divide_by` brings it to the claim's convention."""

    source: str
    system: str
    hardware: str
    divide_by: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Hardware as sources name it: products whose names say they are one, and its nominal bandwidth, as published."""

    products: tuple[str, ...]
    nominal: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From one value of a factor to others, each judged."""

    factor: str
    base: str | int
    to: tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement that can be checked, with bounds that were written before anything was measured."""

    id: str
    statement: str
    source: str
    kind: Kind
    subject: str = ""  # an actor
    baseline: str = ""  # an actor, for quantities that compare with one
    quantity: Quantity
    operator: Operator
    stated: str  # the number as the source has it
    lower: float | None = None
    upper: float | None = None
    better: Better = Better.NEITHER
    bounds_from: str  # the source, or by which rule they were made
    hardware: str  # a system
    phase: Phase | None = None
    where: Mapping[str, Any] = field(default_factory=dict)  # factor -> value, list, or {from, to}: what is stated
    open: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)  # factor -> values it is evaluated for
    change: Change | None = None
    members: Members = Members.FASTEST
    batches: Batches = Batches.EVERY
    evidence: tuple[Evidence, ...] = ()  # of a nominal claim
    sweep: str = ""  # measures what it needs
    note: str = ""

    @property
    def bounds(self) -> Bounds:
        """What a measured interval is held against."""
        return Bounds(lower=self.lower, upper=self.upper, better=self.better)
