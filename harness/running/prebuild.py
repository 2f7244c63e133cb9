"""Compile what backends can compile ahead, each in a child with its own interpreter, before any rank starts.

Run as a module it prebuilds one backend: configuration as JSON on stdin, what went wrong on stdout.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Point
from epcross.harness.running.child import environment
from epcross.harness.running.processes import kill_group
from epcross.harness.running.rank_place import import_folder
from epcross.harness.storing.regular_file import NotRegular, open_regular

LIMIT_S = 900.0  # of all of them; a cold compile of a large CUDA library takes minutes
POLL_S = 0.1


def prebuild(
    configs: Mapping[str, BackendConfig],
    scratch: Path,
    logs: Path,
    *,
    tick: Callable[[], Any] = lambda: None,
    stop_asked: Callable[[], str | None] = lambda: None,
    limit_s: float = LIMIT_S,
) -> dict[str, str]:
    """Prebuild all of `configs` at once; returns the reason for each that failed.

    Backends that share an artifact meet at its lock; no rank ever waits for a compiler.
    """
    failures: dict[str, str] = {}
    children: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    try:
        for name, config in configs.items():
            log = logs / f"prebuild.{name}.log"
            try:
                children[name] = (_start(config, scratch, log), log)
            except NotRegular as error:
                failures[name] = f"{log} cannot be written: {error.strerror}"
            except OSError as error:
                failures[name] = f"its interpreter {config.python} cannot be started: {error.strerror}"
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and stop_asked() is None:
            running = [child for child, _ in children.values() if child.poll() is None]
            if not running:
                break
            tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(POLL_S)
        if stop_asked() is None:
            for name, (child, log) in children.items():
                reason = _reason(child, log, limit_s)
                if reason:
                    failures[name] = f"building it ahead failed: {reason}"
    finally:
        for child, _ in children.values():
            kill_group(child.pid)
            child.wait()
    return failures


def builds(points: Iterable[Point], backends: Mapping[str, BackendConfig]) -> dict[Point, tuple[str, BackendConfig]]:
    """What is to be built for each point of a plan: a name, and the configuration with the point's options, on which
    kernels may depend. The name is the backend's, with a number for its second and further sets of options."""
    names: dict[tuple[Any, ...], str] = {}
    sets: dict[str, int] = {}
    found = {}
    for point in points:
        key = (point.backend, point.options)
        if key not in names:
            sets[point.backend] = number = sets.get(point.backend, 0) + 1
            names[key] = point.backend if number == 1 else f"{point.backend}-{number}"
        found[point] = names[key], replace(backends[point.backend], options=dict(point.options))
    return found


def _start(config: BackendConfig, scratch: Path, log: Path) -> "subprocess.Popen[bytes]":
    with os.fdopen(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as output:
        child = subprocess.Popen(
            [config.python or sys.executable, "-P", "-m", "epcross.harness.running.prebuild"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment(config.env, import_folder(scratch) if config.python else None),
            start_new_session=True,
        )
    pipe: IO[bytes] | None = child.stdin
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(json.dumps(config.to_json()).encode())
    return child


def _reason(child: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> str | None:
    code = child.poll()
    if code == 0:
        return None
    if code is None:
        return f"it took longer than {limit_s:g} s; see {log}"
    lines = log.read_text(errors="replace").strip().splitlines()
    return " ".join(lines[-12:]) if lines else f"it ended with status {code} and wrote nothing to {log}"


def _main() -> int:
    from epcross.harness.backends import loader, trial
    from epcross.harness.errors import EpcrossError

    trial.expendable()
    config = BackendConfig.from_json(json.load(sys.stdin))
    try:
        loader.load(config).prebuild()
    except SystemExit as error:  # whose status could be that of a success
        sys.stdout.write(f"prebuild() raised SystemExit: {error}\n")
        return 1
    except (EpcrossError, loader.CannotImport) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
