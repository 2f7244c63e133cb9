"""A run with a person before it: its path and progress on standard error, signals that end it in good order, and the
exit code that says how it went."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from epcross.harness.errors import INTERRUPTED, NOTHING_SHOWN

if TYPE_CHECKING:
    from epcross.harness.running.launch import JobEnd
    from epcross.harness.running.session import Session

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def execute(session: "Session", *, said: str = "") -> "JobEnd":
    """Take `session` to its end; `said` is for the person, after the path of the run.

    Raises:
        KeyboardInterrupt: at a second signal.
    """
    from epcross.harness.running.display import Display
    from epcross.harness.running.progress import ProgressReader

    session.stop_asked = StopSignal().asked
    reader = ProgressReader(session.run.path)
    reader.skip_to_end()
    errors = Console(stderr=True, highlight=False)
    errors.print(f"run {session.run.path}", soft_wrap=True)
    if said:
        errors.print(said, soft_wrap=True, markup=False)
    with Display(reader, errors) as display:
        session.tick = display.update
        end = session.execute()
        display.update()
    return end


def exit_code(end: "JobEnd", *, fine: bool, measured: bool) -> int:
    """Of a run, or of a point again: by how it ended, whether all rows are as they should be, and any was measured."""
    from epcross.harness.running.launch import End

    if end.end is End.CANCELLED:
        return INTERRUPTED
    if not fine:
        return 1
    return 0 if measured else NOTHING_SHOWN


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """Let signals that end a process interrupt it as Ctrl-C does, so that it says what it leaves behind.

    Raises:
        KeyboardInterrupt: at a signal; at the end, if Python dropped it, as it does in a finaliser.
    """
    heard = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        raise KeyboardInterrupt


class StopSignal:
    """Turns the first signal into a request to end in good order; a second one interrupts at once."""

    def __init__(self) -> None:
        self._reason: str | None = None
        for number in _ENDING:
            signal.signal(number, self._note)

    def asked(self) -> str | None:
        """Why to end; None to go on."""
        return self._reason

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._reason is not None:
            raise KeyboardInterrupt
        self._reason = f"cancelled by {signal.Signals(number).name}"
