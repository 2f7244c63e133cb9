"""`progress.jsonl`: what happened in a run, one JSON object a line, and what follows from it: counts, pace, ETA.

Jobs of one run that go on at the same time, perhaps on different nodes, have a file each, `progress.NAME.jsonl`: only
one writer can append to a file on a network disk.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.storing.regular_file import open_regular


def notes_file(run_path: Path, name: str = "") -> Path:
    """The file of a run's notes, or of those of one of its jobs."""
    return run_path / (f"progress.{name}.jsonl" if name else "progress.jsonl")


_WORD, _COUNT = (str,), (int,)
_MAYBE_WORD = (str, type(None))
_HOLDS: dict[str, dict[str, tuple[type, ...]]] = {
    "session": {"units": _COUNT, "done": _COUNT},
    "prebuild": {"backends": (list,)},
    "turn": {"job": _WORD, "kind": _WORD, "backend": _WORD, "launch": _COUNT},
    "start": {"point_id": _WORD, "launch": _COUNT},
    "unit": {
        "point_id": _WORD,
        "launch": _COUNT,
        "backend": _WORD,
        "statuses": (dict,),
        "reason": _MAYBE_WORD,
        "failed_rank": (int, type(None)),
        "failed_stage": _MAYBE_WORD,
    },
    "stopped": {"reason": _WORD},
    "end": {"end": _WORD, "reason": _WORD},
}
"""What a note of an event must hold to be used."""


class ProgressLog:
    """Appends notes; each is one write, so that a reader sees whole lines and writers do not mix. Once open, it never
    fails.

    Raises:
        StoreError: the file cannot be opened, or is no regular file.
    """

    def __init__(self, run_path: Path, name: str = "") -> None:
        path = notes_file(run_path, name)
        with _told(path):
            self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, event: str, **values: Any) -> None:
        """Append one event with the time in UTC."""
        note = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "monotonic_s": round(time.monotonic(), 3),  # durations follow from this one: a clock may be set back
            "event": event,
            **values,
        }
        line = (json.dumps(note) + "\n").encode()
        # a note is no result: that a disk is full is for those to say who store rows
        with contextlib.suppress(OSError):
            if os.write(self._file, line) < len(line):
                os.write(self._file, b"\n")  # so that the next note at least stands on a line of its own


class ProgressReader:
    """Reads the notes of a run as they come."""

    def __init__(self, run_path: Path, name: str = "") -> None:
        self._path = notes_file(run_path, name)
        self._offset = 0

    def skip_to_end(self) -> None:
        """Leave out what was noted before now."""
        self.read()

    def read(self) -> list[dict[str, Any]]:
        """The notes since the last call; a line that is not finished yet waits for the next, a torn one is left out.

        Raises:
            StoreError: the file cannot be read, or is no regular file.
        """
        try:
            with _told(self._path), os.fdopen(open_regular(self._path, os.O_RDONLY), "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [note for line in whole.split(b"\n") if (note := _parsed(line)) is not None]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Why notes cannot be opened, in words; that there are none yet is no fault."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(
            f"{path} cannot be opened: {error.strerror}. It tells how far the run is and holds no results: make it "
            "readable and writable, or move it away"
        ) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The note that a line holds; None if it was torn or is none."""
    try:
        note = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(note, dict) or not isinstance(note.get("event"), str):
        return None
    wanted = _HOLDS.get(note["event"], {})
    # exact types: True is no count
    return note if all(name in note and type(note[name]) in kinds for name, kinds in wanted.items()) else None


def attempts(notes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each unit, named "point_id.launch", was started."""
    return dict(Counter(f"{n['point_id']}.{n['launch']}" for n in notes if n["event"] == "start" and n["point_id"]))


@dataclass(slots=True, kw_only=True)
class Pace:
    """How far a run is, and how long the rest may take at the pace of the running session."""

    planned: int = 0  # units
    done: int = 0
    measured: int = 0  # units that took time since the run began or went on
    measured_s: float = 0.0  # from the session's first turn to its last unit
    turn: str = ""  # the process group at work
    failures: list[dict[str, Any]] = field(default_factory=list)
    _begin_s: float | None = None  # of the monotonic clock of the machine that rank 0 runs on

    def take(self, note: Mapping[str, Any]) -> None:
        """Count one note."""
        now_s = note.get("monotonic_s")
        match note["event"]:
            case "session":
                self.planned, self.done = note["units"], note["done"]
                self.measured, self.measured_s, self._begin_s = 0, 0.0, None
            case "prebuild":
                self.turn = f"building {', '.join(map(str, note['backends']))}, once on this machine"
            case "turn":
                if self._begin_s is None and isinstance(now_s, int | float):
                    self._begin_s = now_s
                what = "floor" if note["kind"] == "floor" else f"{note['backend']}, launch {note['launch']}"
                self.turn = f"{note['job']}: {what}"
            case "unit":
                self.done += 1
                if self._begin_s is not None and isinstance(now_s, int | float):
                    self.measured += 1
                    self.measured_s = now_s - self._begin_s
                if note["reason"]:
                    self.failures.append(dict(note))

    @property
    def eta_s(self) -> float | None:
        """Seconds from the last unit to the end of the run; None before the first unit."""
        return (self.planned - self.done) * self.measured_s / self.measured if self.measured else None
