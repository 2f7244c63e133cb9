"""Somebody else's class, imported and made once in a process of its own, before it is here.

A module or a constructor that ends its process (`os._exit`, a library that aborts) would take a command along without a
word. What comes with epcross is not tried, and neither is anything in a process whose end costs one answer alone.
"""

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO

LIMIT_S = 60.0
"""How long it may take; importing torch cold takes 20 s."""

_ALONE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from epcross.harness.backends.trial import main; main()"
)
"""What the other process runs, with this one's path, which may have grown since its start."""

_IMPORTED, _DONE = b"i", b"d"
_OWN = "epcross"

_expendable = False


@dataclass(frozen=True, slots=True)
class Fatal:
    """What ended the process in which a class was tried."""

    imported: bool  # whether its module could be imported, so that it was the constructor
    reason: str  # a sentence


def expendable() -> None:
    """Try nothing from here on: this process was started for the sake of somebody else's code, and is watched."""
    global _expendable
    _expendable = True


def fatal(target: str, folder: str) -> Fatal | None:
    """What importing module and making class of `target` (module:Class, maybe in `folder`) does to a process, if it
    ends it; None otherwise, also where it raises, which can be told of here."""
    module_name, _, class_name = target.partition(":")
    if _expendable or module_name.partition(".")[0] == _OWN:
        return None
    return _tried(module_name, class_name, folder)


@functools.cache
def _tried(module_name: str, class_name: str, folder: str) -> Fatal | None:
    try:
        ended, reached, last = _run(module_name, class_name, folder)
    except OSError:  # no process can be started, of which others will tell
        return None
    if _DONE in reached:
        return None
    imported = _IMPORTED in reached
    step = f"making an instance of {module_name}:{class_name}" if imported else f"importing {module_name}"
    said = f" ({last})" if last else ""
    return Fatal(
        imported,
        f"{step} {_how(ended)}{said}, as it was tried in a process of its own; correct {module_name}, which must "
        "return or raise",
    )


def _run(module_name: str, class_name: str, folder: str) -> tuple[int | None, bytes, str]:
    """The exit status of the other process, None if it took too long; how far it came; its last words. Raises
    `OSError`."""
    path = [*sys.path, *([folder] if folder and folder not in sys.path else [])]
    with tempfile.TemporaryFile() as progress, tempfile.TemporaryFile() as errors:
        words = [json.dumps(path), module_name, class_name, str(progress.fileno())]
        ended: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                [sys.executable, "-P", "-c", _ALONE, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[progress.fileno()],
                timeout=LIMIT_S,
                check=False,
            ).returncode
        lines = _read(errors).decode(errors="replace").strip().splitlines()
        return ended, _read(progress), lines[-1] if lines else ""


def _how(ended: int | None) -> str:
    if ended is None or ended == -signal.SIGALRM:
        return f"takes longer than {LIMIT_S:g} s"
    if ended >= 0:
        return f"ends the process with status {ended}"
    with contextlib.suppress(ValueError):
        return f"ends the process by {signal.Signals(-ended).name}"
    return f"ends the process by signal {-ended}"


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def main() -> None:
    """Import and make, and leave word in a file how far that came."""
    signal.alarm(int(LIMIT_S) + 1)  # whoever waits may have gone
    module_name, class_name, progress = sys.argv[2], sys.argv[3], int(sys.argv[4])
    with contextlib.suppress(BaseException):  # whatever can be caught will be told of where it is asked for
        found = getattr(importlib.import_module(module_name), class_name, None)
        os.write(progress, _IMPORTED)
        if isinstance(found, type):
            defaults = getattr(found, "option_defaults", None)  # of a backend, which takes them all; a stage takes none
            found(*([] if defaults is None else [defaults()]))
    os.write(progress, _DONE)
    os._exit(0)  # no destructor bears on the answer
