"""The plan: every point of a sweep, which cannot run and why, and the jobs that run the others. Kept as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.planning.checks import timing_problems
from epcross.harness.planning.schema import BackendConfig, Cluster, Launcher
from epcross.harness.planning.typed import Mismatch, convert
from epcross.harness.point import Point, Timing
from epcross.harness.terms import Domain, Scope, Sharing, Status

SLURM = "slurm"
"""The launcher that hands the jobs of a plan to Slurm; every other starts them on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """A planned point that is not tried: its rows carry this status and reason."""

    point: Point
    status: Status  # UNSUPPORTED or UNAVAILABLE; ERROR of a backend that breaks the contract
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
