"""Where a worker stands that does not come back: it writes its stack to its log when it gets a signal.

Imports no torch, CUDA, MPI or numpy.
"""

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker write where each of its threads is to its log, whatever it is stuck in."""
DUMP_S = 0.5  # to write it
_CALLERS = ("epcross/harness/measuring/", "epcross/harness/verification/")  # whose frames are not the backend's
_TOLD = 3  # places, of what may be 64 ranks
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def listen() -> None:
    """Have this process write its stack on `DUMP_SIGNAL`, which would end it otherwise."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def ask(pids: Iterable[int]) -> None:
    """Have workers that listen write where they are, and give them the time to. A stopped one writes nothing."""
    asked = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
            asked = True
    if asked:
        time.sleep(DUMP_S)


def frames(log: Path) -> list[str]:
    """Where in the backend a worker stands, as it wrote last: the backend's own call, then the line it has come to, if
    that is another. Empty if it wrote nothing, or stands in no call of a backend."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    begin = max((n for n, line in enumerate(lines) if line.startswith("Current thread")), default=len(lines))
    written = [line for line in lines[begin + 1 :] if line.startswith("File ")]
    own = list(itertools.takewhile(lambda frame: not any(caller in frame for caller in _CALLERS), written))
    return own[-1:] + own[:1] if len(own) > 1 else own


def place(log: Path) -> str:
    """`frames` in a few words without folders, as a row may hold them: `my_kernel.py line 31 in dispatch`."""
    short = [f"{Path(m[1]).name} line {m[2]} in {m[3]}" for m in map(_FRAME.match, frames(log)) if m]
    return ", at ".join(short)


def told(places: Sequence[str]) -> str:
    """The places of all ranks, in rank order, as words behind a reason; empty if none is known.

    Where fewest ranks are comes first: often it is what the others wait for.
    """
    ranks: dict[str, list[str]] = {}
    for rank, where in enumerate(places):
        if where:
            ranks.setdefault(where, []).append(str(rank))
    rarest = sorted(ranks.items(), key=lambda item: len(item[1]))[:_TOLD]
    return "".join(f"; rank{'s' * (len(of) > 1)} {_few(of)}: {where}" for where, of in rarest)


def _few(ranks: list[str]) -> str:
    return ", ".join(ranks) if len(ranks) <= _TOLD else f"{ranks[0]} and {len(ranks) - 1} more"
