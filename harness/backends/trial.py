"""Somebody else's class, imported, made and asked once in a process of its own, before it is here.

A module, a constructor or an answer that ends its process (`os._exit`, a library that aborts) would take a command
along without a word. What comes with epcross is not tried, and neither is anything in a process whose end costs one
answer alone.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epcross.harness.point import Point

LIMIT_S = 60.0
"""How long it may take; importing torch cold takes 20 s."""
LIMIT_OF_POINT_S = 0.1
"""How much longer for each point that is asked about; a plan has thousands."""

_ALONE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from epcross.harness.backends.{0} import {1}; {1}()"
"""What the other process runs, a function of a module here, with this one's path, which may have grown since its start.
"""

_IMPORTED, _MADE, _DONE = b"i", b"m", b"d"
_OWN = "epcross"

_expendable = False
_asked: dict[tuple[str, ...], str | None] = {}


@dataclass(frozen=True, slots=True)
class Fatal:
    """What ended the process in which a class was tried."""

    imported: bool  # whether its module could be imported, so that it was the constructor or `unavailable()`
    made: bool  # whether there was an instance, so that it was `unavailable()`
    reason: str  # a sentence


def expendable() -> None:
    """Try nothing from here on: this process was started for the sake of somebody else's code, and is watched."""
    global _expendable
    _expendable = True


def fatal(target: str, folder: str) -> Fatal | None:
    """What importing module and making class of `target` (module:Class, maybe in `folder`) does to a process, if it
    ends it; None otherwise, also where it raises, which can be told of here."""
    found = _fatal(target, folder)
    return None if found is None or found.made else found


def fatal_unavailable(target: str, folder: str) -> str | None:
    """The same of `unavailable()` of the class with its default options, as a sentence."""
    found = _fatal(target, folder)
    return found.reason if found is not None and found.made else None


def fatal_answer(
    targets: Sequence[str], folder: str, backend: Mapping[str, Any], points: "Sequence[Point]"
) -> str | None:
    """What `unsupported(point)` and `workspace_bytes(point)` do to a process, if they end it at any of `points`, as a
    sentence. A backend, and its expert stage, are tried once, with the first points that are asked about, as a process
    takes longer than a plan.

    Args:
        targets: of the backend and, if it has one, of its expert stage.
        folder: that the backend's module may lie in.
        backend: its configuration as JSON values.
        points: with this expert stage.
    """
    foreign = [target.partition(":")[0] for target in targets if not _is_own(target)]
    if _expendable or not foreign:
        return None
    key = (*targets, folder)
    if key not in _asked:
        try:
            _asked[key] = _answered(targets, folder, backend, points, " or ".join(foreign))
        except OSError:  # as below
            return None
    return _asked[key]


def _answered(
    targets: Sequence[str], folder: str, backend: Mapping[str, Any], points: "Sequence[Point]", foreign: str
) -> str | None:
    with tempfile.TemporaryFile() as words:
        words.write(json.dumps({"backend": backend, "points": [point.to_json() for point in points]}).encode())
        words.seek(0)
        ended, reached, last = _alone(
            ("loader", "answer_alone"), [], folder, words, LIMIT_S + LIMIT_OF_POINT_S * len(points)
        )
    *_, (method, number) = [line.split() for line in reached.decode().splitlines()] or [("", "0")]
    if method in ("", _DONE.decode()):  # where none was asked, another trial tells
        return None
    at = points[int(number)]
    step = f"{method}() of {' with '.join(targets)} for ep_size={at.ep_size}, tokens_per_rank={at.tokens_per_rank}"
    return _sentence(step, ended, last, foreign)


def _is_own(target: str) -> bool:
    return target.partition(":")[0].partition(".")[0] == _OWN


def _fatal(target: str, folder: str) -> Fatal | None:
    module_name, _, class_name = target.partition(":")
    return None if _expendable or _is_own(target) else _tried(module_name, class_name, folder)


@functools.cache
def _tried(module_name: str, class_name: str, folder: str) -> Fatal | None:
    try:
        ended, reached, last = _run(module_name, class_name, folder)
    except OSError:  # no process can be started, of which others will tell
        return None
    if _DONE in reached:
        return None
    imported, made = _IMPORTED in reached, _MADE in reached
    step = f"making an instance of {module_name}:{class_name}" if imported else f"importing {module_name}"
    step = f"unavailable() of {module_name}:{class_name}" if made else step
    return Fatal(imported, made, _sentence(step, ended, last, module_name))


def _sentence(step: str, ended: int | None, last: str, module: str) -> str:
    said = f" ({last})" if last else ""
    return (
        f"{step} {_how(ended)}{said}, as it was tried in a process of its own; correct {module}, which must "
        "return or raise"
    )


def _run(module_name: str, class_name: str, folder: str) -> tuple[int | None, bytes, str]:
    return _alone(("trial", "main"), [module_name, class_name], folder, subprocess.DEVNULL, LIMIT_S)


def _alone(
    function: tuple[str, str], words: Sequence[str], folder: str, stdin: int | IO[bytes], limit_s: float
) -> tuple[int | None, bytes, str]:
    """The exit status of another process, None if it took longer than `limit_s`; how far it came; its last words.
    Raises `OSError`."""
    path = [*sys.path, *([folder] if folder and folder not in sys.path else [])]
    with tempfile.TemporaryFile() as progress, tempfile.TemporaryFile() as errors:
        given = (json.dumps(path), str(progress.fileno()))
        ended: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                [sys.executable, "-P", "-c", _ALONE.format(*function), *given, *words],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[progress.fileno()],
                timeout=limit_s,
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
    """Import, make and ask, and leave word in a file how far that came."""
    signal.alarm(int(LIMIT_S) + 1)  # whoever waits may have gone
    progress, module_name, class_name = int(sys.argv[2]), sys.argv[3], sys.argv[4]
    with contextlib.suppress(BaseException):  # whatever can be caught will be told of where it is asked for
        found = getattr(importlib.import_module(module_name), class_name, None)
        os.write(progress, _IMPORTED)
        if isinstance(found, type):
            defaults = getattr(found, "option_defaults", None)  # of a backend, which takes them all; a stage takes none
            made = found(*([] if defaults is None else [defaults()]))
            os.write(progress, _MADE)
            made.unavailable()
    os.write(progress, _DONE)
    os._exit(0)  # no destructor bears on the answer


def answer(of_json: Callable[[Mapping[str, Any], "Point"], Any]) -> None:
    """Ask the backends that `of_json` makes about points, and leave word in a file which answer is next."""
    from epcross.harness.point import Point

    expendable()
    asked, progress = json.load(sys.stdin), int(sys.argv[2])
    signal.alarm(int(LIMIT_S + LIMIT_OF_POINT_S * len(asked["points"])) + 1)
    made = {}
    for number, point in enumerate(map(Point.from_json, asked["points"])):
        with contextlib.suppress(BaseException):  # as above
            key = (point.options, point.compute_options)
            if key not in made:
                os.write(progress, f"__init__ {number}\n".encode())
                made[key] = of_json(asked["backend"], point)
            backend = made[key]
            os.write(progress, f"unsupported {number}\n".encode())
            if backend.unsupported(point) is None:
                os.write(progress, f"workspace_bytes {number}\n".encode())
                backend.workspace_bytes(point)
    os.write(progress, _DONE + b" 0\n")
    os._exit(0)
