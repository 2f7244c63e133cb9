"""The folder of one run: who made it, what it plans, and where it ran.

<output_dir>/<run_id>/
  run.json          schema version, run id, sweep, creation time, allocation; written last, so it marks a whole folder
  plan.json         what is to be measured
  environment.json  the machine and the software
  floor.json        what the machine can do at best, once measured
  units/            one file for each finished unit: <point_id>.<launch>.json
  attempts/         one file for each unit ever started, one byte for each start
  logs/             output of the ranks
  owner             the process that writes here; gone when it has ended well
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import epcross
from epcross.harness.errors import NothingThere, StoreError
from epcross.harness.record import SCHEMA_VERSION
from epcross.harness.storing.environment import as_stored
from epcross.harness.storing.run_owner import take
from epcross.harness.storing.sealed import DamagedFile, read_sealed, seal, write_whole

_HEADER = {
    "schema_version": int,
    "epcross_version": str,
    "run_id": str,
    "created": str,
    "sweep": str,
    "allocation_id": str,
}
_LOCK_LIMIT_S = 10.0  # for a file of a few hundred bytes
_SUFFIX_ATTEMPTS = 64  # of 65,536 suffixes: exhausted only if something else is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """A run on disk, opened and checked."""

    path: Path
    run_id: str
    sweep: str
    created: str  # UTC, ISO 8601
    allocation_id: str  # what was held while it ran; the run id itself for a local run
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def units(self) -> Path:
        """Folder of the finished units."""
        return self.path / "units"

    @property
    def damaged(self) -> Path:
        """Folder of unit files that were set aside."""
        return self.units / "damaged"

    @property
    def attempts(self) -> Path:
        """Folder of the marks of starts."""
        return self.path / "attempts"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' output."""
        return self.path / "logs"


def create_run(
    output_dir: Path,
    sweep: str,
    plan_json: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    allocation_id: str | None = None,
) -> RunDirectory:
    """A new run folder under `output_dir`, owned by this process and shared with no other run.

    Raises:
        StoreError: the folder cannot be made or filled; what was made of it is removed.
    """
    now = datetime.now(UTC)
    path = _make_exclusive(output_dir, f"{now:%Y%m%d-%H%M%S}-{_folder_word(sweep)}")
    header = {
        "schema_version": SCHEMA_VERSION,
        "epcross_version": epcross.__version__,
        "run_id": path.name,
        "created": now.isoformat(timespec="microseconds"),
        "sweep": sweep,
        "allocation_id": allocation_id or path.name,
    }
    try:
        for folder in ("units", "attempts", "logs"):
            (path / folder).mkdir()
        take(path)
        for name, content in (("plan", plan_json), ("environment", as_stored(environment)), ("run", header)):
            write_whole(path / f"{name}.json", seal(content, indent=1))
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # ours alone: the mkdir was exclusive
        raise StoreError(
            f"cannot create a run in {output_dir}: {error.strerror}; nothing was measured yet. "
            "Free space there or choose another output_dir"
        ) from error
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return open_run(path)


def open_run(path: Path) -> RunDirectory:
    """The run at `path`, for reading; `claim` it before writing.

    Raises:
        NothingThere: it is no run folder.
        StoreError: it was written by a newer epcross, or its plan is missing or damaged.
    """
    if not (path / "run.json").exists():
        raise NothingThere(
            f"{path} is not a run directory: it has no run.json. Give the path that `epcross run` printed, "
            "such as results/runs/<run_id>"
        )
    header = _read_part(path, "run")
    if not _HEADER.items() <= {name: type(value) for name, value in header.items()}.items():
        raise StoreError(f"{path / 'run.json'} is not the header of a run; give the path that `epcross run` printed")
    if header["schema_version"] > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {header['schema_version']} and was written by epcross "
            f"{header['epcross_version']}; this is epcross {epcross.__version__}, which reads up to version "
            f"{SCHEMA_VERSION}. Install epcross {header['epcross_version']} or later to read it"
        )
    return RunDirectory(
        path=path,
        run_id=header["run_id"],
        sweep=header["sweep"],
        created=header["created"],
        allocation_id=header["allocation_id"],
        plan=_read_part(path, "plan"),
        environment=_read_part(path, "environment"),
    )


def write_floor(run: RunDirectory, floor: Mapping[str, Any]) -> None:
    """Store what the machine can do at best.

    Raises:
        StoreError: it cannot be written.
    """
    with _written(run.path / "floor.json", "; the floor is lost"):
        write_whole(run.path / "floor.json", seal(floor, indent=1))


def add_floor(run: RunDirectory, name: str, entry: Mapping[str, Any]) -> None:
    """Store the floor of one job beside those of the others, which may be stored at the same time from other nodes.

    Raises:
        StoreError: it cannot be written, or the stored floor is damaged.
    """
    with _written(run.path / "floor.json", "; the floor is lost"), _lock_file(run.path / "floor.lock"):
        write_floor(run, {**(read_floor(run) or {}), name: entry})


def replace_environment(run: RunDirectory, environment: Mapping[str, Any]) -> None:
    """Store where the ranks run, when that is known only after the run was created elsewhere.

    Raises:
        StoreError: it cannot be written.
    """
    with _written(run.path / "environment.json"):
        write_whole(run.path / "environment.json", seal(as_stored(environment), indent=1))


def read_floor(run: RunDirectory) -> dict[str, Any] | None:
    """The stored floor; None if none was measured.

    Raises:
        StoreError: the file is damaged.
    """
    if not (run.path / "floor.json").exists():
        return None
    floor = _read_part(run.path, "floor")
    if wrong := [name for name, entry in floor.items() if not isinstance(entry, dict)]:
        raise StoreError(f"{run.path / 'floor.json'} holds no numbers for {', '.join(wrong)}; restore it from a copy")
    return floor


def make_folder(path: Path) -> None:
    """Make a folder of a run anew if somebody has tidied it up.

    Raises:
        StoreError: something else has its name, or it cannot be made.
    """
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise StoreError(
            f"{path} is no folder, and the run keeps its {path.name} there. Restore it from a copy, or move what is "
            "there away and go on with what is left"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot make {path}: {error.strerror}. Make {path.parent} writable") from error


@contextlib.contextmanager
def _written(file: Path, lost: str = "") -> Iterator[None]:
    """What the disk says while `file` is written, in words; `lost` is what that costs."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {file}: {error.strerror}{lost}") from error


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Held by whoever makes the file, on any disk, from any node; one left by the dead is taken over after a while."""
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _make_exclusive(output_dir: Path, stem: str) -> Path:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for _ in range(_SUFFIX_ATTEMPTS):
            path = output_dir / f"{stem}-{secrets.token_hex(2)}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise StoreError(
            f"cannot create a run in {output_dir}: {error.strerror}. Choose another output_dir that can be written"
        ) from error
    raise StoreError(f"cannot find a free name {stem}-<4 hex digits> in {output_dir}; choose another output_dir")


def _folder_word(sweep: str) -> str:
    """`sweep` as one word that is safe in a folder's name; launchers choke on `=` and commas in paths."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(sweep).name.removesuffix(".yaml")).strip("-") or "sweep"


def _read_part(path: Path, name: str) -> dict[str, Any]:
    file = path / f"{name}.json"
    try:
        content = read_sealed(file)
    except DamagedFile as error:
        raise StoreError(f"{error}. {_mend(path)}") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}. {_mend(path)}") from error
    if not isinstance(content, dict):
        raise StoreError(f"{file} holds no JSON object. {_mend(path)}")
    return content


def _mend(path: Path) -> str:
    """What to do about a damaged document: documents of a committed folder have no units beside them."""
    if (path / "units").is_dir():
        return "Restore it from a copy, or start a new run; units/ is untouched"
    return "Restore it from version control or from a copy"
