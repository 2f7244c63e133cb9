"""Live progress of a run: a bar on a terminal, lines with the time anywhere else."""

import time
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from epcross.harness.commands.plan import duration
from epcross.harness.running.progress import Pace, ProgressReader

LINE_EVERY_S = 10.0
REFRESH_HZ = 2  # the ranks want the cores


class Display:
    """Shows the notes of a run as they come. `update` is cheap and called a few times a second."""

    def __init__(self, reader: ProgressReader, console: Console) -> None:
        self._reader, self._console = reader, console
        self._pace = Pace()
        self._line_at = 0.0
        self._progress = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=REFRESH_HZ,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, eta="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self) -> None:
        """Show what happened since the last call."""
        notes = self._reader.read()
        for note in notes:
            self._pace.take(note)
            if note["event"] == "unit" and note["reason"]:
                self._print(failure_line(note), "red")
        pace = self._pace
        if self._console.is_terminal:
            eta = "" if pace.eta_s is None else f"{duration(pace.eta_s)} left"
            self._progress.update(
                self._task, total=pace.planned or None, completed=pace.done, description=pace.turn, eta=eta
            )
        elif notes and (time.monotonic() >= self._line_at or notes[-1]["event"] == "prebuild"):
            self._line_at = time.monotonic() + LINE_EVERY_S
            self._print(progress_line(pace), "")

    def _print(self, line: str, style: str) -> None:
        stamp = "" if self._console.is_terminal else f"{datetime.now():%H:%M:%S} "
        self._console.print(Text(stamp + line, style=style), soft_wrap=True)


def progress_line(pace: Pace) -> str:
    """How far the run is, as one line."""
    eta = "" if pace.eta_s is None else f", about {duration(pace.eta_s)} left"
    return f"{pace.done} of {pace.planned} units{eta}; {pace.turn or 'starting'}"


def failure_line(note: dict[str, Any]) -> str:
    """What went wrong with one unit, as one line."""
    words = " ".join(f"{count} {status}" for status, count in note["statuses"].items())
    where = "" if note["failed_rank"] is None else f", rank {note['failed_rank']} in {note['failed_stage']}"
    return f"{note['backend']} {note['point_id']} launch {note['launch']}: {words}{where}: {note['reason']}"
