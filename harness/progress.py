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
        """The notes since the last call; a line that is not finished yet waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def attempts(notes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each unit, named "point_id.launch", was started."""
    return dict(Counter(f"{n['point_id']}.{n['launch']}" for n in notes if n["event"] == "start" and n["point_id"]))


@dataclass(slots=True, kw_only=True)
class Pace:
    """How far a run is, and how long the rest may take at the pace so far."""

    planned: int  # units
    done: int = 0
    seconds: float = 0.0  # from the first note of this session to the last
    measured: int = 0  # units of this session
    statuses: Counter[str] = field(default_factory=Counter)
    current: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)
    _first: datetime | None = None

    def take(self, note: Mapping[str, Any]) -> None:
        """Count one note."""
        now = datetime.fromisoformat(note["time"])
        if note["event"] == "session":
            self._first, self.measured = now, 0
        self._first = self._first or now
        self.seconds = (now - self._first).total_seconds()
        match note["event"]:
            case "turn":
                self.current = "floor" if note["kind"] == "floor" else f"{note['backend']} launch {note['launch']}"
            case "unit":
                self.done += 1
                self.measured += 1
                self.statuses.update(note["statuses"])
                if note["reason"]:
                    self.failures.append(dict(note))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last unit at this session's pace; None before its first unit."""
        if not self.measured:
            return None
        return (self.planned - self.done) * self.seconds / self.measured
