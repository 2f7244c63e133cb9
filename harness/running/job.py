"""What one set of supervisors does: the turns of one EP size, as one file that every rank reads."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Point, Timing, processes
from epcross.harness.running.seat import Seat, seat_here
from epcross.harness.storing.rows import RunContext
from epcross.harness.terms import Domain, Sharing

MEASURE = "epcross.harness.measuring.measure:measure_unit"
SOAK = "epcross.harness.measuring.soak:soak_unit"
FLOOR = "epcross.harness.measuring.floor:measure_floor"
GPU_FLOOR = "epcross.harness.measuring.cuda_floor:measure_gpu_floor"


class TurnKind(StrEnum):
    """What a process group is for."""

    FLOOR = "floor"
    MEASURE = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One process group: one backend visits its points once. `backend` is empty for the floor."""

    kind: TurnKind = TurnKind.MEASURE
    backend: str = ""
    launch: int = 0
    position: int = 0
    point_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The turns of one EP size. Everything a rank needs besides the run folder."""

    name: str
    run_dir: str
    ep_size: int
    timing: Timing
    context: RunContext
    backends: Mapping[str, BackendConfig]
    points: Mapping[str, Point]
    turns: tuple[Turn, ...]
    domain: Domain = Domain.CPU
    sharing: Sharing = Sharing.NONE
    env: Mapping[str, str] = field(default_factory=dict)  # of every worker, for what the domain needs
    failed: Mapping[str, str] = field(default_factory=dict)  # point_id -> why it is not tried again
    attempts: Mapping[str, int] = field(default_factory=dict)  # "point_id.launch" -> starts before
    fail_fast: bool = False
    profile: str = ""  # command that workers of a backend are started under; {rank} and {log} are filled in
    start_limit_s: float = 90.0  # for a worker to import its backend and join
    stop_at_s: float | None = None  # no unit begins after this moment of the host's monotonic clock
    measure: str = MEASURE  # module:function
    floor: str = FLOOR
    seats: tuple[Seat, ...] = ()  # of all ranks; empty: all on this host
    listen: str = "127.0.0.1"  # address at which rank 0's host is reached
    in_batch: bool = False  # a scheduler sends its signals to every process of the job, before it ends or restarts it
    floor_name: str = ""  # of its floor, where that is not its own name
    notes: str = ""  # which file of notes; jobs of one run that go on at the same time have one each

    def seat(self, rank: int) -> Seat:
        """Where a rank sits."""
        return self.seats[rank] if self.seats else seat_here(rank, self.processes)

    @property
    def processes(self) -> int:
        """Supervisors, each with a worker: one for each rank, or one for all that a single launch serves."""
        return processes(self.ep_size, self.sharing)

    @property
    def folder(self) -> Path:
        """Where this job's file and rendezvous lie."""
        return Path(self.run_dir) / "jobs"

    def write(self, start: str = "") -> Path:
        """Store the job in the run folder; returns the path. `start` names one of several starts of the same job."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{self.name}{start and '-'}{start}.json"
        path.with_suffix(".address").unlink(missing_ok=True)  # of an earlier session of this run
        path.write_text(json.dumps(self.to_json()))
        return path

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values from which `from_json` rebuilds the job."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            **plain,
            "timing": asdict(self.timing),
            "context": asdict(self.context),
            "backends": {name: config.to_json() for name, config in self.backends.items()},
            "points": {point_id: point.to_json() for point_id, point in self.points.items()},
            "turns": [asdict(turn) for turn in self.turns],
            "seats": [seat.to_json() for seat in self.seats],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Job":
        """The job that `to_json` described."""
        return cls(
            **{
                **data,
                "domain": Domain(data["domain"]),
                "sharing": Sharing(data["sharing"]),
                "timing": Timing(**data["timing"]),
                "context": RunContext(**data["context"]),
                "backends": {name: BackendConfig.from_json(config) for name, config in data["backends"].items()},
                "points": {point_id: Point.from_json(point) for point_id, point in data["points"].items()},
                "turns": tuple(
                    Turn(**{**turn, "kind": TurnKind(turn["kind"]), "point_ids": tuple(turn["point_ids"])})
                    for turn in data["turns"]
                ),
                "seats": tuple(map(Seat.from_json, data["seats"])),
            }
        )

    @classmethod
    def read(cls, path: Path) -> "Job":
        """The job stored at `path`."""
        return cls.from_json(json.loads(path.read_text()))
