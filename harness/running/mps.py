"""NVIDIA MPS, without which processes that share a GPU take turns of milliseconds and every wait between them is one.

A control daemon that runs already is used and left alone. Otherwise one is started in a folder of its own, for this
run's workers only, and ended with it.
"""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from epcross.harness.errors import EpcrossError
from epcross.harness.storing.probe import Probe

CONTROL = "nvidia-cuda-mps-control"
OVERLAP = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""torch refuses symmetric memory to processes on one GPU unless told that it is meant."""

_ANSWER_LIMIT_S = 10.0
_START_LIMIT_S = 15.0


class MpsRefused(EpcrossError):
    """There is no MPS to share a GPU under; the message says why and what to do."""


Ask = Callable[[str, Mapping[str, str]], str | None]
"""Sends a word to the control daemon that the environment names; its answer, or None if there is no daemon."""


@contextlib.contextmanager
def mps_environment(probe: Probe | None = None, *, ask: Ask | None = None) -> Iterator[dict[str, str]]:
    """What workers that share a GPU need in their environment, while the context lasts.

    Raises:
        MpsRefused: MPS is not installed, or does not start.
    """
    variables = dict((probe or Probe()).variables)
    ask = ask or _ask
    if ask("get_server_list", variables) is not None:
        yield dict(OVERLAP)
        return
    program = shutil.which(CONTROL, path=variables.get("PATH"))
    if program is None:
        raise MpsRefused(
            f"several processes on one GPU need NVIDIA MPS, and {CONTROL} is not installed: it comes with the driver; "
            "or let one launch serve all ranks, device=cuda_one_launch"
        )
    folder = Path(tempfile.mkdtemp(prefix="epcross-mps-"))  # short: a socket's path may have 107 bytes
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    try:
        # a daemon that sees some GPUs numbers them anew, and clients would count among those again: `1` of one is none
        seen = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
        _start(program, {**seen, **own}, folder, ask)
        try:
            yield {**own, **OVERLAP}
        finally:
            ask("quit", {**variables, **own})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(program: str, variables: Mapping[str, str], folder: Path, ask: Ask) -> None:
    log = folder / "start.log"
    with log.open("wb") as output:
        try:
            # -d returns at once and leaves a daemon in a session of its own
            started = subprocess.run(
                [program, "-d"], env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                timeout=_START_LIMIT_S, check=False,
            )  # fmt: skip
            code: int | str = started.returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            code = str(error)
    deadline = time.monotonic() + _START_LIMIT_S
    while code == 0 and ask("get_server_list", variables) is None:
        if time.monotonic() > deadline:
            code = f"no answer within {_START_LIMIT_S:g} s"
        time.sleep(0.1)
    if code != 0:
        words = " ".join(log.read_text(errors="replace").split())[-300:] or "no words"
        raise MpsRefused(
            f"{CONTROL} -d did not start ({code}; {words}): start it yourself, or let one launch serve all ranks, "
            "device=cuda_one_launch"
        )


def _ask(word: str, variables: Mapping[str, str]) -> str | None:
    try:
        answered = subprocess.run(
            [CONTROL],
            input=f"{word}\n",
            env=dict(variables),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    failed = answered.returncode != 0 or "Cannot find MPS control daemon" in answered.stdout + answered.stderr
    return None if failed else answered.stdout
