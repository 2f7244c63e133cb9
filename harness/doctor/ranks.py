"""Facts of every rank: of this host's at once, of a cluster's by a short job on its nodes."""

import json
import os
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from epcross.harness.backends import loader
from epcross.harness.backends.answers import WrongBackend
from epcross.harness.doctor.facts import Facts, collect
from epcross.harness.doctor.probe import NodeProbe
from epcross.harness.errors import ConfigError, EpcrossError
from epcross.harness.planning.library import Library
from epcross.harness.planning.schema import Cluster
from epcross.harness.running.seat import Seat, seat_here
from epcross.harness.slurm import script
from epcross.harness.slurm.layout import Layout
from epcross.harness.slurm.start import own_seat, slurm_start
from epcross.harness.slurm.state import ALIVE, SlurmSilent, ask
from epcross.harness.slurm.submit import SlurmWords, submit_tasks
from epcross.harness.storing.provenance import measure_hash
from epcross.harness.storing.sealed import write_whole

TIME_MIN = 10
POLL_S = 1.0
GRACE_S = 15.0  # from the end of a job until its files are seen here


@dataclass(slots=True, kw_only=True)
class DoctorTask:
    """What submitit runs on each rank: look, and leave the facts in a file."""

    folder: str
    size_on_node: int
    config_dirs: tuple[str, ...] = ()

    def __call__(self) -> str:
        """Write this rank's facts."""
        start = slurm_start()
        facts = look(own_seat(start), self.size_on_node, tuple(map(Path, self.config_dirs)))
        path = Path(self.folder) / f"rank{start.rank}.json"
        write_whole(path, json.dumps(facts.to_json()).encode())
        return str(path)


def look(seat: Seat, local_size: int, config_dirs: tuple[Path, ...] = (), probe: NodeProbe | None = None) -> Facts:
    """The facts of one rank. Baselines are asked once on each node, by its first rank."""
    whole = Seat.from_json({**seat.to_json(), "local_size": local_size})
    return collect(
        whole,
        probe,
        backends=backends_here(config_dirs) if seat.local_rank == 0 else None,
        measure_hash=measure_hash(),
    )


def backends_here(config_dirs: tuple[Path, ...] = ()) -> dict[str, str | None]:
    """Why each backend cannot be used on this node; None if it can."""
    library = Library(config_dirs)
    names = library.names("backend")
    library.load([("backend", name) for name in names], [])
    found: dict[str, str | None] = {}
    for name in names:
        config = library.get("backend", name)
        try:
            found[name] = "its YAML is faulty: epcross backends" if config is None else loader.unavailable(config)
        except (ConfigError, WrongBackend) as error:
            found[name] = str(error)
    return found


def here(size: int, config_dirs: tuple[Path, ...] = ()) -> list[Facts]:
    """The facts of `size` ranks of this host."""
    return spread(look(seat_here(0, size), size, config_dirs), size)


def spread(first: Facts, size: int) -> list[Facts]:
    """What each of `size` ranks of a host sees, if its first one sees `first`."""
    return [Facts.from_json({**first.to_json(), "seat": seat_here(rank, size).to_json()}) for rank in range(size)]


def on_cluster(
    cluster: Cluster, layout: Layout, folder: Path, config_dirs: tuple[Path, ...], wait_s: float
) -> list[Facts]:
    """The facts of the ranks of a short job.

    Raises:
        EpcrossError: the job is refused, does not start in time, or ends without a word from a rank.
    """
    if problems := script.cluster_problems(cluster):
        raise ConfigError(problems)
    size = layout.tasks
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    folder = folder.absolute() / stamp
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise EpcrossError(
            f"cannot make {folder}: {error.strerror}; the doctor's ranks write there, so every node must "
            "see it: give --folder DIR"
        ) from error
    task = DoctorTask(
        folder=str(folder),
        size_on_node=layout.ranks_per_node,
        config_dirs=tuple(str(d.absolute()) for d in config_dirs),
    )
    words = SlurmWords(cluster=cluster, layout=layout, name="epcross-doctor", time_min=min(TIME_MIN, cluster.time_min))
    try:
        (job_id,) = submit_tasks(words, folder, [task])
    except EpcrossError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _wait(job_id, folder, size, wait_s)
    files = [folder / f"rank{rank}.json" for rank in range(size)]
    if silent := [str(rank) for rank, path in enumerate(files) if not path.exists()]:
        raise EpcrossError(
            f"job {job_id} ended, and ranks {', '.join(silent)} left no word; their logs are in {folder}"
        )
    return [Facts.from_json(json.loads(path.read_text())) for path in files]


def _wait(job_id: str, folder: Path, size: int, wait_s: float) -> None:
    """Until every rank has written, or the job has ended."""
    deadline = time.monotonic() + wait_s
    ended_at: float | None = None
    while len(list(folder.glob("rank*.json"))) < size:
        now = time.monotonic()
        try:
            state = ask([job_id])[job_id]
            words = f"{state.word} {state.reason}".strip() + (f": {state.hint}" if state.hint else "")
            if state.word not in ALIVE:
                ended_at = ended_at or now
        except SlurmSilent as error:
            words = str(error)
        if ended_at is not None and now > ended_at + GRACE_S:
            return
        if now > deadline:
            raise EpcrossError(
                f"job {job_id} has not answered within {wait_s:g} s ({words}). It stays in the queue: wait longer with "
                f"--wait SECONDS, or end it with scancel {job_id}"
            )
        time.sleep(POLL_S)
