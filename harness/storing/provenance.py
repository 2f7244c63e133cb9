"""Where a number comes from: hashes of the code that can change it and of the machine, and the commit."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import epcross.harness
import epcross.kernels

MEASURED_FOLDERS = (
    "kernels",
    "harness/backends",
    "harness/measuring",
    "harness/verification",
    "harness/workload",
)
"""Folders whose every source can change a number: what is exchanged, by whom, how it is timed and checked."""

UNMEASURED_FOLDERS = ("kernels/model",)
"""Folders inside these that no measurement runs: the model of the protocols is checked, not measured."""

MEASURED_FILES = ("harness/running/gpu_place.py", "harness/running/rank_place.py", "harness/running/worker.py")
"""Files besides: where a rank runs, and the process that calls the measurement."""

_SOURCE_SUFFIXES = frozenset({".py", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh"})
_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The commit the harness runs from; empty and clean outside a checkout."""

    sha: str = ""
    dirty: bool = False


def measured_sources(kernels: Path | None = None, harness: Path | None = None) -> dict[str, Path]:
    """The sources that can change a number, by their name inside the package, sorted.

    The folders are found through the imported packages, so a checkout, an editable install and a wheel give the same
    names.
    """
    roots = {"kernels": kernels or _folder(epcross.kernels), "harness": harness or _folder(epcross.harness)}
    found: dict[str, Path] = {}
    for name in MEASURED_FOLDERS:
        top, _, rest = name.partition("/")
        folder = roots[top] / rest
        for path in folder.rglob("*"):
            inside = f"{name}/{path.relative_to(folder).as_posix()}"
            if inside.startswith(tuple(f"{left_out}/" for left_out in UNMEASURED_FOLDERS)):
                continue
            if path.suffix in _SOURCE_SUFFIXES and path.is_file():
                found[inside] = path
    for name in MEASURED_FILES:
        top, _, rest = name.partition("/")
        if (roots[top] / rest).is_file():
            found[name] = roots[top] / rest
    return dict(sorted(found.items()))


def sources_of(backends: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """The sources of those `backends` (name -> configuration, as a plan holds it) that lie in a folder of the user: the
    module of each, or the package that it is in."""
    found: dict[str, Path] = {}
    for name, config in backends.items():
        if not (folder := config.get("folder")):
            continue
        top = Path(folder) / str(config["target"]).partition(":")[0].partition(".")[0]
        for path in [top.with_suffix(".py"), *top.rglob("*")]:
            if path.suffix in _SOURCE_SUFFIXES and path.is_file():
                found[f"{name}/{path.relative_to(folder).as_posix()}"] = path
    return dict(sorted(found.items()))


def measure_hash(
    kernels: Path | None = None, harness: Path | None = None, *, besides: Mapping[str, Path] | None = None
) -> str:
    """SHA-256 over names and contents of `measured_sources` and of those `besides` (see `sources_of`), in hex: equal
    if and only if the code is equal."""
    digest = hashlib.sha256()
    for part in _parts({**measured_sources(kernels, harness), **(besides or {})}):
        digest.update(len(part).to_bytes(8, "little"))  # lengths keep one file's end apart from the next one's start
        digest.update(part)
    return digest.hexdigest()


def machine_hash(facts: Mapping[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of `facts` (see `environment.machine_facts`) as canonical JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def git_state(file: Path | None = None) -> GitState:
    """The commit that `file` (this one by default) is tracked in, and whether tracked files differ from it.

    A file that merely lies inside some repository, as an installed package does in a project's `.venv`, is not part
    of it: the answer is empty then, as it is without git.
    """
    file = (file or Path(__file__)).resolve()  # through the links under src/
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return GitState()
    sha = _git(file.parent, "rev-parse", "--verify", "HEAD")
    changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return GitState(sha=sha or "", dirty=bool(changes))


def _folder(package: Any) -> Path:
    return Path(package.__file__).resolve().parent


def _parts(sources: Mapping[str, Path]) -> Iterator[bytes]:
    for name, path in sources.items():
        yield name.encode()
        yield path.read_bytes()


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says, or None if it fails, is absent or takes too long."""
    # GIT_DIR and its kin, set in hooks, would point it at another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.strip()
