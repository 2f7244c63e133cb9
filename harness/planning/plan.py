"""The plan: every point of a sweep, which cannot run and why, and the jobs that run the others. Runs nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from epcross.harness.backends import loader
from epcross.harness.backends.base import Backend
from epcross.harness.errors import ConfigError, StoreError
from epcross.harness.planning.assemble import Assembler, assignments
from epcross.harness.planning.checks import MAX_EP_SIZE, point_problems, timing_problems
from epcross.harness.planning.config import Config, resolve
from epcross.harness.planning.draw import drawn_points
from epcross.harness.planning.paths import absolute
from epcross.harness.planning.schema import BackendConfig, Cluster, Launcher
from epcross.harness.planning.typed import Mismatch, convert
from epcross.harness.point import Point, Timing
from epcross.harness.terms import Domain, Regime, Scope, Sharing, Status

SLURM = "slurm"
"""The launcher that hands the jobs of a plan to Slurm; every other starts them on this host."""

_DEVICES = {
    Domain.CPU: ("cpu",),
    Domain.NVLINK: ("cuda",),
    Domain.SHARED_GPU: ("cuda_one_launch", "cuda_processes"),
}
"""What makes points of each domain: the files of conf/device."""

__all__ = ["SLURM", "Impossible", "Job", "Plan", "alone", "build", "is_slurm_plan", "point_problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """A planned point that is not tried: its rows carry this status and reason."""

    point: Point
    status: Status  # UNSUPPORTED or UNAVAILABLE
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything compared at one EP size: one allocation, the same ranks for all backends."""

    ep_size: int
    domain: Domain
    sharing: Sharing
    scope: Scope
    cluster: str
    backends: tuple[str, ...]  # in the order of the sweep; empty for a floor-only job
    points: tuple[Point, ...]  # those that can run

    @property
    def name(self) -> str:
        """A word for its ranks, which names its files and its floor."""
        sharing = "" if self.sharing is Sharing.NONE else f"_{self.sharing}"
        scope = "" if self.scope is Scope.SCALE_UP else f"_{self.scope}"
        return f"{self.domain}{sharing}{scope}_ep{self.ep_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """How long a soak lasts, and which case each point of the plan is."""

    seconds: float
    seed: int
    cases: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do. A run directory keeps it, and `--resume` rebuilds it from there."""

    sweep: str
    description: str
    points: tuple[Point, ...]  # all, also the impossible ones
    impossible: tuple[Impossible, ...]
    jobs: tuple[Job, ...]
    timing: Timing
    launcher: Launcher
    cluster: Cluster
    output_dir: Path  # absolute
    backends: Mapping[str, BackendConfig]
    config: Mapping[str, Any] = field(default_factory=dict)  # what was resolved, as plain JSON
    soak: SoakPlan | None = None  # the points are cases to be stressed, not only measured

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values from which `from_json` rebuilds the plan. Jobs and reasons refer to points by number."""
        numbers = {point: number for number, point in enumerate(self.points)}
        return {
            "sweep": self.sweep,
            "description": self.description,
            "points": [{"point_id": point.point_id, **point.to_json()} for point in self.points],
            "impossible": [
                {"point": numbers[i.point], "status": str(i.status), "reason": i.reason} for i in self.impossible
            ],
            "jobs": [
                {
                    "ep_size": job.ep_size,
                    "domain": str(job.domain),
                    "sharing": str(job.sharing),
                    "scope": str(job.scope),
                    "cluster": job.cluster,
                    "backends": list(job.backends),
                    "points": [numbers[point] for point in job.points],
                }
                for job in self.jobs
            ],
            "timing": asdict(self.timing),
            "launcher": asdict(self.launcher),
            "cluster": asdict(self.cluster),
            "output_dir": str(self.output_dir),
            "backends": {name: backend.to_json() for name, backend in self.backends.items()},
            "config": dict(self.config),
            "soak": None if self.soak is None else {**asdict(self.soak), "cases": list(self.soak.cases)},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` described.

        Raises:
            StoreError: it is something else; another version, or an editor, wrote it.
        """
        try:
            plan = cls._from_json(data)
            if problems := timing_problems(plan.timing):
                raise Mismatch("; ".join(problems))
        except (Mismatch, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            words = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
            raise StoreError(
                f"the stored plan is none that this epcross can read ({words}). Use the epcross that wrote it, "
                "restore plan.json from a copy, or start a new run"
            ) from error
        return plan

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> "Plan":
        points = tuple(
            convert({key: value for key, value in point.items() if key != "point_id"}, Point)
            for point in data["points"]
        )
        soak = convert(data.get("soak"), SoakPlan | None)  # plans of earlier versions have none
        if soak is not None and len(soak.cases) != len(points):
            raise Mismatch(f"soak has {len(soak.cases)} case numbers for {len(points)} points")
        return cls(
            sweep=convert(data["sweep"], str),
            description=convert(data["description"], str),
            points=points,
            impossible=tuple(
                Impossible(point=points[i["point"]], status=Status(i["status"]), reason=convert(i["reason"], str))
                for i in data["impossible"]
            ),
            jobs=tuple(
                Job(
                    ep_size=convert(job["ep_size"], int),
                    domain=Domain(job["domain"]),
                    sharing=Sharing(job["sharing"]),
                    scope=Scope(job.get("scope", Scope.SCALE_UP)),  # plans of earlier versions have none
                    cluster=convert(job["cluster"], str),
                    backends=convert(job["backends"], tuple[str, ...]),
                    points=tuple(points[number] for number in job["points"]),
                )
                for job in data["jobs"]
            ),
            timing=convert(data["timing"], Timing),
            launcher=convert(data["launcher"], Launcher),
            cluster=convert(data["cluster"], Cluster),
            output_dir=Path(data["output_dir"]),
            backends=convert(data["backends"], Mapping[str, BackendConfig]),
            config=convert(data["config"], Mapping[str, Any]),
            soak=soak,
        )


def is_slurm_plan(stored: Mapping[str, Any]) -> bool:
    """Whether the jobs of a stored plan are Slurm's."""
    launcher = stored.get("launcher")
    return isinstance(launcher, Mapping) and launcher.get("name") == SLURM


def build(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Plan:
    """The plan that `overrides` ask for, such as ["sweep=quickstart", "tokens_per_rank=1,8"].

    Raises:
        ConfigError: with every problem found.
    """
    config = resolve(overrides, config_dirs)
    soak: SoakPlan | None = None
    if config.soak is not None:
        drawn = drawn_points(config, config.soak)
        points = tuple(drawn)
        soak = SoakPlan(seconds=config.soak.seconds, seed=config.soak.seed, cases=tuple(drawn.values()))
    else:
        points = () if config.floor_only else tuple(Assembler(config).points(config))
    backends = {name: _with_computes(config, name, points) for name in dict.fromkeys(p.backend for p in points)}
    impossible = _impossible(points, backends, here=config.launcher.name != SLURM)
    return Plan(
        sweep=config.sweep,
        description=config.description,
        points=points,
        impossible=tuple(impossible.values()),
        jobs=_floor_jobs(config) if config.floor_only else _jobs(points, impossible, config.cluster.name),
        timing=config.timing,
        launcher=config.launcher,
        cluster=config.cluster,
        output_dir=absolute(config.output_dir),
        backends=backends,
        config=_resolved(config),
        soak=soak,
    )


def _with_computes(config: Config, name: str, points: Sequence[Point]) -> BackendConfig:
    """A backend's configuration with those of the expert stages that `points` have it run."""
    named = dict.fromkeys(point.compute for point in points if point.backend == name and point.compute)
    return replace(
        config.library.get("backend", name), computes={each: config.library.get("compute", each) for each in named}
    )


def alone(plan: Plan, point: Point, *, timing: Timing, output_dir: Path, note: str) -> Plan:
    """A plan of one point of `plan`, with its own backend's configuration; `note` says what for, and is kept.

    Raises:
        ConfigError: the backend cannot be loaded, as when its folder has gone.
    """
    backends = {point.backend: plan.backends[point.backend]}
    impossible = _impossible([point], backends)
    return replace(
        plan,
        sweep="point",
        description=note,
        points=(point,),
        impossible=tuple(impossible.values()),
        jobs=_jobs([point], impossible, plan.cluster.name),
        launcher=Launcher(name="local"),  # wherever the run was
        timing=timing,
        output_dir=output_dir.absolute(),
        backends=backends,
        config={**plan.config, "note": note},
    )


def _impossible(
    points: Sequence[Point], configs: Mapping[str, BackendConfig], *, here: bool = True
) -> dict[Point, Impossible]:
    """Why points cannot run. A limit of the backend comes before a missing library: it holds on any machine.

    Unless they run `here`, what this machine lacks says nothing: the ranks will ask theirs.
    """
    found: dict[Point, Impossible] = {}
    absent: dict[tuple[Any, ...], str | None] = {}
    instances: dict[tuple[Any, ...], Backend | None] = {}
    for point in points:
        key = (point.backend, point.options, point.compute, point.compute_options)
        if key not in instances:
            try:
                instances[key] = loader.for_point(configs[point.backend], point)
            except loader.CannotImport:
                instances[key] = None  # `unavailable` says so
        reason = _unsupported(instances[key], point)
        if reason is not None:
            found[point] = Impossible(point=point, status=Status.UNSUPPORTED, reason=reason)
            continue
        if here and point.scope is Scope.SCALE_OUT:
            reason = "this host is one domain, and scope=scale_out spans several; take launcher=slurm"
            found[point] = Impossible(point=point, status=Status.UNAVAILABLE, reason=reason)
            continue
        asked = (point.backend, point.options, point.compute)  # an option may name a file that is not there
        if asked not in absent:
            config = replace(configs[point.backend], options=dict(point.options))
            absent[asked] = loader.unavailable(config, point.compute) if here else None
        reason = absent[asked]
        if reason is not None:
            found[point] = Impossible(point=point, status=Status.UNAVAILABLE, reason=reason)
    return found


def _unsupported(backend: Backend | None, point: Point) -> str | None:
    if backend is None:
        return None
    if point.domain not in backend.domains:
        devices = " or ".join(
            f"device={name}" for domain in sorted(backend.domains) for name in _DEVICES.get(domain, ())
        )
        domains = ", ".join(sorted(backend.domains))
        return f"{point.backend} runs in domain {domains}, not in {point.domain}" + (devices and f": take {devices}")
    if point.scope not in backend.scopes:
        return f"{point.backend} needs all ranks in one domain; scope={point.scope} is for backends that span several"
    if point.scope is Scope.SCALE_OUT and point.domain is Domain.CPU and point.regime is Regime.ENTRY:
        return "regime=entry needs one clock, and nodes have each their own; regime=steady is timed across nodes"
    try:
        return backend.unsupported(point)
    except Exception as error:  # one careless adapter must not end the plan
        return f"its check of the point failed with {type(error).__name__}: {error}"


def _jobs(points: Sequence[Point], impossible: Mapping[Point, Impossible], cluster: str) -> tuple[Job, ...]:
    groups: dict[tuple[int, Domain, Sharing, Scope], list[Point]] = {}
    for point in points:
        if point not in impossible:
            groups.setdefault((point.ep_size, point.domain, point.sharing, point.scope), []).append(point)
    return tuple(
        Job(
            ep_size=ep_size,
            domain=domain,
            sharing=sharing,
            scope=scope,
            cluster=cluster,
            backends=tuple(dict.fromkeys(point.backend for point in members)),
            points=tuple(members),
        )
        for (ep_size, domain, sharing, scope), members in groups.items()
    )


def _floor_jobs(config: Config) -> tuple[Job, ...]:
    groups = dict.fromkeys((values["ep_size"], values["device"]) for values in assignments(config))
    wrong = [f"ep_size={n} must lie between 1 and {MAX_EP_SIZE}" for n, _ in groups if not 1 <= n <= MAX_EP_SIZE]
    if wrong:
        raise ConfigError(wrong)
    devices = {name: config.library.get("device", name) for _, name in groups}
    return tuple(
        Job(
            ep_size=ep_size,
            domain=devices[name].domain,
            sharing=devices[name].sharing,
            scope=Scope.SCALE_UP,
            cluster=config.cluster.name,
            backends=(),
            points=(),
        )
        for ep_size, name in groups
    )


def _resolved(config: Config) -> dict[str, Any]:
    resolved = {
        "sweep": config.sweep,
        "overrides": list(config.overrides),
        "config_dirs": [str(folder) for folder in config.library.folders],
        "timing": config.timing_name,
        "blocks": [asdict(block) for block in config.blocks],
        "defaults": dict(config.defaults),
        "absent_backends": list(config.absent),
    }
    return json.loads(json.dumps(resolved))  # tuples and enums as JSON has them, so that a stored plan equals this one
