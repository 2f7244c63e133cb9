"""`progress.jsonl`: what happened in a run, one JSON object a line, and what follows from it: counts, pace, ETA."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FILE_NAME = "progress.jsonl"

_NEEDED = {
    "session": {"units", "done"},
    "prebuild": {"backends"},
    "turn": {"job", "kind", "backend", "launch"},
    "start": {"point_id", "launch"},
    "unit": {"backend", "point_id", "launch", "statuses", "reason", "failed_rank", "failed_stage"},
    "stopped": {"reason"},
    "end": {"reason"},
}
"""What readers look for in a note, besides its time."""


class ProgressLog:
    """Appends notes; each is one write, so that a reader sees whole lines and writers do not mix."""

    def __init__(self, run_path: Path) -> None:
        self._file = os.open(run_path / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, event: str, **values: Any) -> None:
        """Append one event with the time in UTC."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        os.write(self._file, (json.dumps({"time": now, "event": event, **values}) + "\n").encode())


class ProgressReader:
    """Reads the notes of a run as they come."""

    def __init__(self, run_path: Path) -> None:
        self._path = run_path / FILE_NAME
        self._offset = 0

    def skip_to_end(self) -> None:
        """Leave out what was noted before now."""
        self.read()

    def read(self) -> list[dict[str, Any]]:
        """The notes since the last call; a line that is not finished yet waits for the next.

        A line that a crash or a disk spoiled is left out: notes are for people, what was measured is in units/.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        notes = [_note(line) for line in whole.split(b"\n")]
        return [note for note in notes if note is not None]


def _note(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is no whole note."""
    try:
        note = json.loads(line)
        if not isinstance(note, dict) or not isinstance(note["event"], str):
            return None
        needed = _NEEDED.get(note["event"], frozenset())
        if needed:
            datetime.fromisoformat(note["time"])
    except (ValueError, KeyError, TypeError):
        return None
    return note if needed <= note.keys() else None


def attempts(notes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each unit, named "point_id.launch", was started."""
    return dict(Counter(f"{n['point_id']}.{n['launch']}" for n in notes if n["event"] == "start" and n["point_id"]))


@dataclass(slots=True, kw_only=True)
class Pace:
    """How far a run is, and how long the rest may take at the pace of the running session."""

    planned: int = 0  # units
    done: int = 0
    measured: int = 0  # units of this session that took time
    measured_s: float = 0.0  # from the session's first turn to its last unit
    turn: str = ""  # the process group at work
    failures: list[dict[str, Any]] = field(default_factory=list)
    _begin: datetime | None = None

    def take(self, note: Mapping[str, Any]) -> None:
        """Count one note."""
        now = datetime.fromisoformat(note["time"])
        match note["event"]:
            case "session":
                self.planned, self.done = note["units"], note["done"]
                self.measured, self.measured_s, self._begin = 0, 0.0, None
            case "prebuild":
                self.turn = f"building {', '.join(note['backends'])}, once on this machine"
            case "turn":
                self._begin = self._begin or now
                what = "floor" if note["kind"] == "floor" else f"{note['backend']}, launch {note['launch']}"
                self.turn = f"{note['job']}: {what}"
            case "unit":
                self.done += 1
                if self._begin is not None:
                    self.measured += 1
                    self.measured_s = (now - self._begin).total_seconds()
                if note["reason"]:
                    self.failures.append(dict(note))

    @property
    def eta_s(self) -> float | None:
        """Seconds from the last unit to the end of the run; None before the first unit."""
        return (self.planned - self.done) * self.measured_s / self.measured if self.measured else None
