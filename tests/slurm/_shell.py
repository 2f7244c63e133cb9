"""The command line as a person uses it on a cluster, and a run that it submitted."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _cluster import SlurmCluster, until

from epcross.harness.planning.plan import Plan
from epcross.harness.record import UnitResult
from epcross.harness.running.progress import ProgressReader
from epcross.harness.storing.run_directory import RunDirectory, open_run
from epcross.harness.storing.units import missing_rows, read_units

HERE = Path(__file__).parent


@dataclass(slots=True)
class Shell:
    """The command, in a folder of its own, with this Slurm."""

    folder: Path
    cluster: SlurmCluster
    path: str = ""  # folders that commands are looked for in before all others

    def environment(self) -> dict[str, str]:
        paths = [str(HERE.parents[1]), str(HERE.parents[1] / "src"), str(HERE / "conf")]
        # ranks inherit it: the tests' backends are in no installed package
        return {
            **os.environ,
            "SLURM_CONF": str(self.cluster.conf),
            "PATH": os.pathsep.join(filter(None, [self.path, os.environ["PATH"]])),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
        }

    def __call__(
        self, *words: str, code: int | None = 0, limit_s: float = 90.0, variables: Mapping[str, str] | None = None
    ) -> str:
        """Standard output of `epcross`, which must end with `code`."""
        result = subprocess.run(
            [sys.executable, "-m", "epcross.harness.cli", *words],
            cwd=self.folder,
            env={**self.environment(), **(variables or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert "Traceback" not in result.stderr
        assert code is None or result.returncode == code, result.stdout + result.stderr
        return result.stdout + (result.stderr if code else "")

    def submit(self, *words: str, **variables: str) -> "SlurmRun":
        """A run on this cluster."""
        common = ("launcher=slurm", "cluster=ci", "--config-dir", str(HERE / "conf"), "--json")
        summary = json.loads(self("run", *words, *common, variables=variables))
        return SlurmRun(self, Path(summary["path"]), summary["jobs"])


@dataclass(slots=True)
class SlurmRun:
    """A run that was submitted."""

    shell: Shell
    path: Path
    jobs: dict[str, str]

    @property
    def job_id(self) -> str:
        (job_id,) = self.jobs.values()
        return job_id

    @property
    def directory(self) -> RunDirectory:
        return open_run(self.path)

    def status(self) -> dict[str, Any]:
        return json.loads(self.shell("status", str(self.path), "--json"))

    def results(self) -> list[UnitResult]:
        return read_units(self.directory)[0]

    def units(self) -> int:
        return len(list((self.path / "units").glob("[!.]*.json")))

    def wait(self, *states: str, limit_s: float = 90.0) -> dict[str, Any]:
        """The status once the run is in one of `states`."""
        plan = Plan.from_json(self.directory.plan)
        whole = len(plan.points) * plan.timing.launches
        last: dict[str, Any] = {}

        def there() -> bool:
            # each question is a process that takes a core from the ranks: none while the answer is known
            if states == ("finished",) and self.units() < whole:
                return False
            last.update(self.status())
            return last["state"] in states

        try:
            until(there, limit_s)
        except TimeoutError as error:
            last.update(self.status())
            logs = [f"== {log}\n{log.read_text()[-3000:]}" for log in sorted((self.path / "slurm").glob("*.out"))]
            raise AssertionError(f"{last}\n" + "\n".join(logs)) from error
        return last

    def check_rows(self, statuses: set[str] | None = None) -> None:
        """Every planned row is there exactly once."""
        run = self.directory
        plan = Plan.from_json(run.plan)
        units, problems = read_units(run)
        assert problems == []
        assert missing_rows(units, plan.points, plan.timing) == []  # raises if a row is there twice
        assert {str(row.status) for unit in units for row in unit.records} == (statuses or {"ok"})

    def slurm_says(self, field: str) -> str:
        """What `scontrol show job` says of it, one field."""
        words = self.shell.cluster.command("scontrol", "show", "job", self.job_id).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def kill(self) -> None:
        """End this start of the job, as an administrator does who wants the nodes back; Slurm queues it again."""
        self.shell.cluster.command("scontrol", "requeue", self.job_id)

    def notes(self, piece: str) -> list[dict[str, Any]]:
        return ProgressReader(self.path, piece).read()
