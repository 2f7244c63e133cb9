"""From assignments of factors to points. Every problem of every assignment is collected."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from epcross.harness.backends import computes, loader
from epcross.harness.backends.answers import WrongBackend
from epcross.harness.errors import ConfigError
from epcross.harness.planning.checks import MAX_EP_SIZE, MAX_POINTS, point_problems
from epcross.harness.planning.config import Config
from epcross.harness.planning.factors import BACKEND_OPTION, COMPUTE_OPTION, FIELDS, GROUPS, OPTIONS
from epcross.harness.planning.grid import Assignment, excluded, expand
from epcross.harness.planning.paths import absolute
from epcross.harness.planning.schema import BackendConfig, ComputeConfig
from epcross.harness.planning.tokens import capacity, nominal_tokens, tokens_of_ranks
from epcross.harness.planning.typed import Mismatch
from epcross.harness.point import Model, Placement, Point, Routing, Scalar
from epcross.harness.terms import BackendKind, PlacementKind, RoutingKind, RowFormat, WeightFormat
from epcross.harness.workload.routing_files import content_sha256

_USED_BY: dict[str, tuple[Any, ...]] = {
    "routing.exponent": (RoutingKind.ZIPF,),
    "routing.hot_fraction": (RoutingKind.HOT_EXPERT,),
    "routing.path": (RoutingKind.TRACE, RoutingKind.MATRIX),
    "placement.num_slots": (PlacementKind.REPLICATED,),
}
"""Fields that only some kinds read. Elsewhere they are left at their default, so that equal points have equal ids."""

_OF_EXPERTS = ("compute", "weight_format")
"""Factors that say nothing of an exchange."""

WEIGHTS_BESIDE: dict[RowFormat, WeightFormat] = {
    RowFormat.BF16: WeightFormat.BF16,
    RowFormat.FP8: WeightFormat.FP8,
    RowFormat.MXFP8: WeightFormat.FP4,
    RowFormat.NVFP4: WeightFormat.FP4,
}
"""The weights that go with activations, where neither the sweep nor the backend's file names a format."""


def assignments(config: Config) -> Iterator[Assignment]:
    """Every assignment of the sweep, in order, with defaults filled in and exclusions taken out."""
    for block in config.blocks:
        for assignment in expand(block):
            filled = {**config.defaults, **assignment}
            if not excluded(filled, block.exclude):
                yield filled


class Assembler:
    """Makes points; remembers what is wrong, and which fields and options were of use."""

    def __init__(self, config: Config) -> None:
        """Keep the configuration whose options are looked up."""
        self._library = config.library
        self._options: dict[tuple[str, tuple[tuple[str, Scalar], ...]], tuple[tuple[str, Scalar], ...]] = {}
        self._sha256: dict[str, str] = {}
        self.problems: dict[str, None] = {}  # in order, each once
        self._named: set[str] = set()
        self._used: set[str] = set()

    def points(self, config: Config) -> list[Point]:
        """Every point of the sweep, in order and without repeats.

        Raises:
            ConfigError: with every problem of every assignment.
        """
        points: dict[Point, None] = {}
        count = 0
        for count, assignment in enumerate(assignments(config), start=1):
            if count > MAX_POINTS:
                raise ConfigError(f"the sweep has more than {MAX_POINTS} points; split it, or give fewer values")
            try:
                point = self.point(assignment)
            except (Mismatch, ConfigError) as error:
                texts = error.problems if isinstance(error, ConfigError) else (str(error),)
                self.problems.update(dict.fromkeys(texts))
                continue
            self.problems.update(dict.fromkeys(point_problems(point, assignment)))
            points[point] = None
        if count == 0:
            self.problems["the sweep has no points: every assignment is excluded"] = None
        unused = sorted(self._named - self._used)
        if config.typed & GROUPS.keys():  # what is chosen there may have no use for a field that the sweep's own needs
            unused = [name for name in unused if name in config.typed]
        if not self.problems:
            self.problems.update({_unused_text(name): None for name in unused})
        if self.problems:
            raise ConfigError(list(self.problems))
        return list(points)

    def point(self, values: Mapping[str, Any]) -> Point:
        """The point of one filled assignment.

        Raises:
            Mismatch: a value does not fit the others.
            ConfigError: the backend or its options are wrong.
        """
        if "backend" not in values:
            raise Mismatch(
                f"no backend is named; add backend=NAME, with one of {', '.join(self._library.names('backend'))}"
            )
        self._named |= {name for name in values if name.startswith(OPTIONS) or name in FIELDS}
        self._named |= {name for name in _OF_EXPERTS if values.get(name)}
        ep_size = values["ep_size"]
        if not 1 <= ep_size <= MAX_EP_SIZE:
            raise Mismatch(f"ep_size={ep_size} must lie between 1 and {MAX_EP_SIZE}")
        model, routing, placement = self._model(values), self._routing(values), self._placement(values)
        device = self._library.get("device", values["device"])
        tokens = tokens_of_ranks(values["tokens_per_rank"], ep_size, values["token_skew"], values["empty_ranks"])
        return Point(
            backend=values["backend"],
            options=self._backend_options(values),
            domain=device.domain,
            sharing=device.sharing,
            scope=values["scope"],
            model=model,
            ep_size=ep_size,
            tokens_per_rank=nominal_tokens(values["tokens_per_rank"]),
            tokens=tokens,
            max_tokens_per_rank=capacity(tokens, values["max_tokens_per_rank"], values["capacity_factor"]),
            routing=routing,
            placement=placement_of(placement, model, ep_size),
            dispatch_format=values["dispatch_format"],
            combine_format=values["combine_format"],
            regime=values["regime"],
            **self._layer(values),
        )

    def _changes(self, group: str, values: Mapping[str, Any], kind: Any = None) -> dict[str, Any]:
        """The fields of an option that the assignment changes, where its kind reads them."""
        changes = {}
        for name in values:
            if name.startswith(f"{group}.") and name in FIELDS and (name not in _USED_BY or kind in _USED_BY[name]):
                self._used.add(name)
                changes[name.removeprefix(f"{group}.")] = values[name]
        return changes

    def _model(self, values: Mapping[str, Any]) -> Model:
        model: Model = self._library.get("model", values["model"])
        asked = self._changes("model", values)
        changes = {field: value for field, value in asked.items() if value != getattr(model, field)}
        if not changes:  # also where a sweep says what the model has anyway: a claim about it must find its rows
            return model
        # a changed shape is another model, and figures must say so
        name = ",".join([model.name, *(f"{field}={value}" for field, value in sorted(changes.items()))])
        return replace(model, name=name, **changes)

    def _routing(self, values: Mapping[str, Any]) -> Routing:
        routing: Routing = self._library.get("routing", values["routing"])
        kind = values.get("routing.kind", routing.kind)
        routing = replace(routing, **self._changes("routing", values, kind))
        unread = {
            name.removeprefix("routing."): getattr(_PLAIN_ROUTING, name.removeprefix("routing."))
            for name, kinds in _USED_BY.items()
            if name.startswith("routing.") and kind not in kinds
        }
        routing = replace(routing, **unread)
        if kind in _USED_BY["routing.path"]:
            return self._with_file(routing)
        return routing

    def _with_file(self, routing: Routing) -> Routing:
        if not routing.path:
            raise Mismatch(f"routing={routing.kind} needs a file; add routing.path=FILE")
        path = str(absolute(routing.path))  # workers may run in another folder
        if path not in self._sha256:
            self._sha256[path] = content_sha256(path)
        return replace(routing, path=path, content_sha256=self._sha256[path])

    def _placement(self, values: Mapping[str, Any]) -> Placement:
        placement: Placement = self._library.get("placement", values["placement"])
        return replace(placement, **self._changes("placement", values, values.get("placement.kind", placement.kind)))

    def _layer(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The factors that only layers have; none for an exchange, whatever the sweep says of them."""
        config: BackendConfig = self._library.get("backend", values["backend"])
        try:
            kind = loader.backend_class(config).kind
        except (loader.CannotImport, WrongBackend):  # it will be a row that says so
            kind = BackendKind.LAYER if config.compute else BackendKind.EXCHANGE
        if kind is BackendKind.EXCHANGE:
            return {}
        self._used.add("weight_format")
        weight_format = values.get("weight_format") or config.weight_format or WEIGHTS_BESIDE[values["dispatch_format"]]
        if kind is BackendKind.FUSED:
            return {"kind": kind, "weight_format": weight_format}
        self._used.add("compute")
        compute = values.get("compute", config.compute)
        if not compute:
            raise Mismatch(
                f"backend '{config.name}' needs an expert stage; add compute=NAME, with one of "
                f"{', '.join(self._library.names('compute'))}"
            )
        options = self._compute_options(compute, values)
        return {"kind": kind, "compute": compute, "compute_options": options, "weight_format": weight_format}

    def _compute_options(self, name: str, values: Mapping[str, Any]) -> tuple[tuple[str, Scalar], ...]:
        config: ComputeConfig | None = self._library.get("compute", name)
        if config is None:  # of a backend's file; those of the sweep are checked already
            raise Mismatch(self._library.unknown("compute", name) or f"compute '{name}' is faulty")
        asked = {key: value for key, value in values.items() if key.startswith(COMPUTE_OPTION)}
        try:
            defaults = computes.option_defaults(config)
        except (loader.CannotImport, WrongBackend):  # as of a backend
            self._used |= set(asked)
            given = {key.removeprefix(COMPUTE_OPTION): value for key, value in asked.items()}
            return tuple(sorted({**config.options, **given}.items()))
        known = {key: value for key, value in asked.items() if key.removeprefix(COMPUTE_OPTION) in defaults}
        self._used |= set(known)
        given = {key.removeprefix(COMPUTE_OPTION): value for key, value in known.items()}
        options = {**config.options, **given}
        try:
            return tuple(sorted(computes.resolved(config, options).items()))
        except WrongBackend:  # as above
            return tuple(sorted({**defaults, **options}.items()))

    def _backend_options(self, values: Mapping[str, Any]) -> tuple[tuple[str, Scalar], ...]:
        name = values["backend"]
        asked = tuple((key, value) for key, value in values.items() if key.startswith(BACKEND_OPTION))
        key = (name, tuple((k, v) for k, v in asked))
        if key not in self._options:
            self._options[key] = self._resolve_options(self._library.get("backend", name), dict(asked))
        return self._options[key]

    def _resolve_options(self, config: BackendConfig, asked: dict[str, Scalar]) -> tuple[tuple[str, Scalar], ...]:
        try:
            defaults = loader.option_defaults(config)
        except (loader.CannotImport, WrongBackend):
            # it will be a row that says so; its options cannot be checked on this machine
            self._used |= set(asked)
            return tuple(
                sorted({**config.options, **{k.removeprefix(BACKEND_OPTION): v for k, v in asked.items()}}.items())
            )
        known = {key: value for key, value in asked.items() if key.removeprefix(BACKEND_OPTION) in defaults}
        self._used |= set(known)
        options = {**config.options, **{key.removeprefix(BACKEND_OPTION): value for key, value in known.items()}}
        try:
            return tuple(sorted(loader.load(replace(config, options=options)).options.items()))
        except WrongBackend:  # as above
            return tuple(sorted({**defaults, **options}.items()))


def placement_of(placement: Placement, model: Model, ep_size: int) -> Placement:
    """The placement with its number of slots: one per expert, or for replicas the next multiple of the EP size."""
    if placement.num_slots:
        return placement
    slots = model.num_experts
    if placement.kind is PlacementKind.REPLICATED:
        slots = math.ceil(slots / ep_size) * ep_size
    return replace(placement, num_slots=slots)


_PLAIN_ROUTING = Routing()


def _unused_text(name: str) -> str:
    if name.startswith(BACKEND_OPTION):
        return f"no backend of the sweep has the option '{name.removeprefix(BACKEND_OPTION)}'"
    if name.startswith(COMPUTE_OPTION):
        return f"no expert stage of the sweep has the option '{name.removeprefix(COMPUTE_OPTION)}'"
    if name in _OF_EXPERTS:
        return f"{name} is read by layers and expert stages only, and the sweep has none"
    group = name.split(".")[0]
    return f"{name} is read by {group}={' or '.join(_USED_BY[name])} only, which the sweep does not use"
