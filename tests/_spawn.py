"""Real supervisors and workers for tests: a job of a few tiny points, faults on demand, and what is left afterwards.

`backend` and `measure` are loaded by workers, so this module must import quickly and need nothing but numpy.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from epcross.harness.backends.base import Backend, Description, Group, Received
from epcross.harness.errors import WaitExpired
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Model, Placement, Point, Timing, Unit
from epcross.harness.record import Samples, UnitResult
from epcross.harness.running.job import Job
from epcross.harness.running.launch import JobEnd, run_job
from epcross.harness.running.schedule import turns
from epcross.harness.storing.rows import RunContext, base_record, planned_records
from epcross.harness.storing.run_directory import RunDirectory, create_run
from epcross.harness.terms import Boundary, Domain, Flag, Phase, Regime, Stage, Status
from epcross.kernels.errors import DoesNotFit

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
"""Of commands that tests start: these sources and the tests' backends. Not this process's sys.path, to which folders of
users' backends are added as it loads them."""

EVERY_RANK = -1
HERE = Path(__file__).resolve().parent
TIMING = Timing(
    launches=2,
    seeds=1,
    chains=2,
    chain_ms=1,
    min_pairs=1,
    max_pairs=1,
    iterations=2,
    warmup_pairs=1,
    sets=2,
    wall_limit_s=4.0,
)


def point(
    tokens: int, backend: str = "fake", ep_size: int = 2, regime: Regime = Regime.STEADY, **options: Any
) -> Point:
    """A tiny point; `options` tell the fake backend how to fail."""
    return Point(
        backend=backend,
        options=tuple(sorted({**Fake.option_defaults(), **options}.items())),
        model=Model(name="tiny", num_experts=8, top_k=2, hidden=64, intermediate=64),
        ep_size=ep_size,
        tokens_per_rank=tokens,
        tokens=(tokens,) * ep_size,
        max_tokens_per_rank=tokens,
        placement=Placement(num_slots=8),
        regime=Regime.STEADY,
    )


def fail(fault: str, group: Group | None) -> None:
    """What can go wrong in a process."""
    match fault:
        case "raise":
            raise RuntimeError("the fake was told to raise")
        case "exit":
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(1000)
        case "wait_expired":
            raise WaitExpired("rank 1 waited 1 s for peer 0 in dispatch, epoch 3")
        case "does_not_fit":
            raise DoesNotFit("the workspace takes 2 bytes and 1 byte is free: lower max_tokens_per_rank")
        case "silent":  # a peer's bounded wait runs out; this rank never says a word
            assert group is not None
            group.all_gather(b"silent")
            time.sleep(1000)
        case _:
            raise AssertionError(fault)


class Fake(Backend):
    """Moves nothing. Fails as its options say: `fault` on `rank` in `stage`."""

    name = "fake"
    domains = frozenset({Domain.CPU})
    boundary: ClassVar = {phase: frozenset({Boundary.TRANSFER}) for phase in Phase}
    host_sync = False

    @classmethod
    def option_defaults(cls) -> Mapping[str, Any]:
        return {"fault": "", "rank": 1, "stage": "time", "launch": 0, "refuse": False, "child": False, "sleep_s": 0.0}

    def unavailable(self) -> str | None:
        return os.environ.get("FAKE_UNAVAILABLE")

    def unsupported(self, point: Point) -> str | None:
        return "the fake refuses 77 tokens; choose another number" if point.tokens_per_rank == 77 else None

    def refused_here(self, point: Point) -> str | None:
        loaded = os.environ.get("FAKE_LOADED")  # what stands for a library that the process has loaded
        refused = loaded and point.tokens_per_rank in (66, 67, 68)
        return f"the fake has loaded {loaded}" if refused else None

    def workspace_bytes(self, point: Point) -> int:
        return 0

    def prepare(self, point: Point, shard: Any, group: Group) -> None:
        raise NotImplementedError

    def refill(self, set_index: int, batch: Any) -> None:
        raise NotImplementedError

    def dispatch(self, set_index: int) -> None:
        raise NotImplementedError

    def received(self, set_index: int) -> Received:
        raise NotImplementedError

    def stage(self, set_index: int, partials: Any) -> None:
        raise NotImplementedError

    def experts(self, set_index: int) -> None:
        raise NotImplementedError

    def combine(self, set_index: int) -> None:
        raise NotImplementedError

    def combined(self, set_index: int) -> Any:
        return np.zeros((0, 0), np.uint16)

    def describe(self) -> Description:
        return Description(version="1", transport="none")

    def close(self) -> None:
        return


class FailsAtImport(Fake):
    """Cannot even be made."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        raise ImportError("libfancy.so.3: cannot open shared object file")


class FailsAtStart(Fake):
    """Of the ranks that ask whether a point is supported, the first has the fault."""

    def unsupported(self, point: Point) -> str | None:
        if self.options["fault"]:
            try:
                (Path(os.environ["FAKE_FOLDER"]) / f"first-{point.point_id}").touch(exist_ok=False)
            except FileExistsError:
                return None
            fail(str(self.options["fault"]), None)
        return None


class LeavesSlowly(Fake):
    """Its process takes a second to end, and leaves a file: when it was started, first did anything, and was gone."""

    def unavailable(self) -> str | None:
        process, begun = psutil.Process(), time.time()

        def go() -> None:
            time.sleep(1.0)
            name = f"{os.environ['EPCROSS_TEST_RUN']}/gone-{os.getpid()}"
            Path(name).write_text(json.dumps([process.create_time(), begun, time.time()]))

        atexit.register(go)
        return None


def measure(
    backend: Backend,
    unit: Unit,
    timing: Timing,
    group: Group,
    context: RunContext,
    report_stage: Callable[[Stage], None],
    flags: frozenset[Flag] = frozenset(),
) -> UnitResult | None:
    """Goes through the stages with a barrier at each, as the real one does, and fails where it is told to."""
    options = backend.options
    if options["child"]:  # something a compiler might leave behind
        subprocess.Popen(["sleep", "1000"])
    segment = Path("/dev/shm") / f"epcross-{group.shared_name}-{group.rank}"
    segment.write_bytes(b"x" * 100)
    for stage in (Stage.PREPARE, Stage.VERIFY_BEFORE, Stage.TIME, Stage.VERIFY_AFTER, Stage.CLOSE):
        report_stage(stage)
        group.barrier()
        if stage is Stage.TIME:
            time.sleep(float(options["sleep_s"] or 0))
        if options["fault"] and options["stage"] == stage and options["launch"] == unit.launch:
            if options["rank"] in (group.rank, EVERY_RANK):
                fail(str(options["fault"]), group)
            elif options["fault"] == "silent":
                group.all_gather(b"silent")
                raise WaitExpired(f"rank {group.rank} waited 1 s for peer {options['rank']} in combine, epoch 9")
    segment.unlink()
    if group.rank:
        return None
    base = replace(base_record(unit.point, context), flags=" ".join(sorted(flags)), estimator="median", n_samples=2)
    latencies = {"latency_us": 2.0, "latency_min_us": 1.0, "latency_max_us": 3.0, "status": Status.OK}
    records = tuple(replace(record, **latencies) for record in planned_records(base, timing, unit.launch))
    samples = tuple(Samples(phase=r.phase, repeat=r.repeat, values_us=[[1.0, 2.0], [2.0, 3.0]]) for r in records)
    return UnitResult(point_id=unit.point.point_id, launch=unit.launch, records=records, samples=samples)


def measure_floor(group: Group) -> dict[str, Any]:
    """A floor that shows who took part."""
    return {"ranks": [int(data) for data in group.all_gather(b"%d" % group.rank)]}


def config(name: str = "fake", target: str = "_spawn:Fake", **changes: Any) -> BackendConfig:
    """A backend in this file."""
    defaults = {"label": name, "color": "#000000", "folder": str(HERE)}
    return BackendConfig(name=name, target=target, **{**defaults, **changes})


def new_run(output_dir: Path) -> RunDirectory:
    """An empty run folder."""
    return create_run(output_dir, "test", {}, {})


def job(run: RunDirectory, points: Sequence[Point], *, timing: Timing = TIMING, **changes: Any) -> Job:
    """A job of `points` in `run`, with the fake backend and the fake measurement."""
    context = RunContext(
        run_id=run.run_id, measure_hash="m", machine="box", allocation_id=run.allocation_id, git_sha="", git_dirty=False
    )
    values = {
        "name": f"ep{points[0].ep_size}",
        "run_dir": str(run.path),
        "ep_size": points[0].ep_size,
        "timing": timing,
        "context": context,
        "backends": {p.backend: config(p.backend) for p in points},
        "points": {p.point_id: p for p in points},
        "turns": turns(points, timing.launches),
        "start_limit_s": 20.0,
        "measure": "_spawn:measure",
        "floor": "_spawn:measure_floor",
    }
    return Job(**{**values, **changes})


def finish(job: Job, limit_s: float = 60.0) -> tuple[JobEnd, float]:
    """Run a job to its end, which must come within `limit_s`; returns how it ended and the seconds it took."""
    os.environ["EPCROSS_TEST_RUN"] = job.run_dir  # inherited by all that the job starts
    try:
        begin = time.monotonic()
        end = run_job(job, stop_asked=lambda: "too slow" if time.monotonic() - begin > limit_s else None)
        return end, time.monotonic() - begin
    finally:
        del os.environ["EPCROSS_TEST_RUN"]


def left_overs(run: RunDirectory) -> list[str]:
    """Processes of a run that still live, shared memory under its names, and supervisors that broke."""
    tokens = [json.loads(path.read_text())["token"] for path in run.path.glob("jobs/*.address")]
    found = [str(path) for token in tokens for path in Path("/dev/shm").glob(f"epcross-{token[:12]}*")]
    found += [log.read_text() for log in run.logs.glob("*.supervisor.*") if "Traceback" in log.read_text()]
    for process in psutil.process_iter(["pid", "cmdline", "environ", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        environ = process.info["environ"] or {}
        if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            continue
        if str(run.path) in line or environ.get("EPCROSS_TEST_RUN") == str(run.path):
            found.append(f"{process.pid}: {line}")
    return found


def processes(run: RunDirectory, word: str) -> list[psutil.Process]:
    """Living processes of a run whose command line holds `word`."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or ())
        if word in line and (process.info["environ"] or {}).get("EPCROSS_TEST_RUN") == str(run.path):
            found.append(process)
    return found


def until(condition: Callable[[], Any], limit_s: float = 10.0, by: "subprocess.Popen[str] | None" = None) -> Any:
    """What `condition` returns once it is true. Fails if that does not happen in time, or, at once and with what it
    said, if the process that is to bring it about has ended."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if by and by.poll() is not None and not condition():
            raise AssertionError(f"{by.args} ended with {by.returncode}: {by.communicate()}")
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value
