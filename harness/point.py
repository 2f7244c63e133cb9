"""The values a sweep is made of: a `Point` is one measurement to take, a `Unit` one visit to it."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from epcross.harness.terms import (
    PHASES,
    BackendKind,
    Domain,
    Phase,
    PlacementKind,
    Regime,
    RoutingKind,
    RowFormat,
    Scope,
    Sharing,
    WeightFormat,
)

Scalar = str | int | float | bool | None
"""What a backend option may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of one MoE layer. `source` says where it was read and is no factor."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen. A field that the kind does not use keeps its default."""

    kind: RoutingKind = RoutingKind.UNIFORM
    exponent: float = 0.0  # zipf: weight of rank i is (i + 1) ** -exponent
    hot_fraction: float = 0.0  # hot_expert: share of tokens that choose the hot expert
    masked_fraction: float = 0.0  # share of selections replaced by -1, any kind
    path: str = ""  # trace, matrix
    content_sha256: str = ""  # of the file at `path`; the factor is the content, not the name


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How experts become slots. Slot s is on rank s // (num_slots // ep_size), always."""

    kind: PlacementKind = PlacementKind.CONTIGUOUS
    num_slots: int = 0  # physical experts; equals num_experts unless replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Everything that identifies a measurement; the same values give the same `point_id` anywhere."""

    backend: str
    options: tuple[tuple[str, Scalar], ...] = ()  # sorted by name
    domain: Domain = Domain.CPU
    sharing: Sharing = Sharing.NONE
    scope: Scope = Scope.SCALE_UP
    model: Model
    ep_size: int
    tokens_per_rank: int  # the nominal number, the x axis of figures
    tokens: tuple[int, ...]  # of each rank, len == ep_size
    max_tokens_per_rank: int  # capacity, group-wide
    routing: Routing = field(default_factory=Routing)
    placement: Placement
    dispatch_format: RowFormat = RowFormat.BF16
    combine_format: RowFormat = RowFormat.BF16
    regime: Regime
    kind: BackendKind = BackendKind.EXCHANGE
    compute: str = ""  # the expert stage of a layer; empty where there is none to choose
    compute_options: tuple[tuple[str, Scalar], ...] = ()  # sorted by name
    weight_format: WeightFormat | None = None  # of the experts; None for an exchange

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that are timed at this point: each leaves rows."""
        return PHASES[self.kind][self.regime]

    @property
    def point_id(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON of every factor."""
        return hashlib.sha256(json.dumps(self.factors(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def experts_per_rank(self) -> int:
        """Slots on each rank."""
        return self.placement.num_slots // self.ep_size

    def factors(self) -> dict[str, Any]:
        """The factors as plain JSON values; what is not a factor (a source, a file's name) is left out."""
        factors = asdict(self)
        del factors["model"]["source"]
        del factors["routing"]["path"]
        if self.kind is BackendKind.EXCHANGE:  # as before there were others: ids of stored points stay
            for name in ("kind", "compute", "compute_options", "weight_format"):
                del factors[name]
        return factors

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values from which `from_json` rebuilds the point."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Point":
        """The point that `to_json` described."""
        return cls(
            **{
                **data,
                "options": tuple((name, value) for name, value in data["options"]),
                "domain": Domain(data["domain"]),
                "sharing": Sharing(data["sharing"]),
                "scope": Scope(data["scope"]),
                "model": Model(**data["model"]),
                "tokens": tuple(data["tokens"]),
                "routing": Routing(**{**data["routing"], "kind": RoutingKind(data["routing"]["kind"])}),
                "placement": Placement(
                    kind=PlacementKind(data["placement"]["kind"]), num_slots=data["placement"]["num_slots"]
                ),
                "dispatch_format": RowFormat(data["dispatch_format"]),
                "combine_format": RowFormat(data["combine_format"]),
                "regime": Regime(data["regime"]),
                "kind": BackendKind(data["kind"]),
                "compute_options": tuple((name, value) for name, value in data["compute_options"]),
                "weight_format": None if data["weight_format"] is None else WeightFormat(data["weight_format"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often and how long a point is measured. No factor of the point: rows carry what was used.

    A repeat is one (launch, seed, chain); rows of a point are numbered `(launch * seeds + seed) * chains + chain`.
    """

    launches: int  # fresh process groups
    seeds: int  # routing seeds in each launch
    chains: int  # timed series for each seed
    chain_ms: float  # a steady chain lasts about this long
    min_pairs: int
    max_pairs: int
    iterations: int  # pairs of an entry series
    warmup_pairs: int
    sets: int  # input and routing sets that a chain rotates through
    wall_limit_s: float  # of one unit on all ranks
    warmup_ms: float = 0.0  # at least, beside `warmup_pairs`: a GPU takes tens of ms to settle at its power limit

    @property
    def repeats(self) -> int:
        """Rows for each planned phase of a point."""
        return self.launches * self.seeds * self.chains

    def repeat(self, launch: int, seed: int, chain: int) -> int:
        """The number of one repeat."""
        return (launch * self.seeds + seed) * self.chains + chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One visit to a point: all seeds and chains of one launch. What a process group does at a time."""

    point: Point
    launch: int


def processes(ep_size: int, sharing: Sharing) -> int:
    """How many processes hold the ranks of a group: one for each, or one for all that a single launch serves."""
    return 1 if sharing is Sharing.ONE_LAUNCH else ep_size
