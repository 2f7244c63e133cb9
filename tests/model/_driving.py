"""Build and run the threads driver: which sanitizers, which faults, which schedules."""

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from epcross.kernels.shm import build
from epcross.kernels.shm.layout import ProtocolName, Shape, layout

DRIVER = Path(__file__).parent / "threads_driver.cpp"
CSRC = Path(build.__file__).parent / "csrc"

STEPS = {
    ProtocolName.FENCE: ("begin", "record", "announce", "await", "experts", "combine", "await_combine", "sum"),
    ProtocolName.SENTINEL: (
        "begin", "announce", "record", "part", "header", "rearm_partials", "await", "experts", "combine",
        "rearm_records", "sum",
    ),
    ProtocolName.TWO_SIDED: ("begin", "record", "announce", "await", "experts", "combine", "await_combine", "sum"),
}  # fmt: skip
"""Where a rank can be held up."""


class Build(Enum):
    """How the driver is compiled."""

    PLAIN = ("-O2", "-march=native")
    QUICK = ("-O0",)  # to compile, for faults
    # gcc says that its ThreadSanitizer does not know stand-alone fences: see kernels/model/README.md
    THREAD = ("-O1", "-g", "-fsanitize=thread", "-Wno-tsan")
    ADDRESS = ("-O0", "-g", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Hold `rank` up at every `step`, or all ranks at random places (`any`)."""

    rank: int
    step: str
    microseconds: int
    seed: int


def compiler() -> str | None:
    return shutil.which("g++")


def compiled(folder: Path, how: Build, faults: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """The driver; `faults` replaces text of a source file, which must be there once."""
    sources = folder / "csrc"
    shutil.copytree(CSRC, sources)
    for name, (right, wrong) in (faults or {}).items():
        text = (sources / name).read_text()
        assert text.count(right) == 1, f"{name} has changed: {right!r} is there {text.count(right)} times"
        (sources / name).write_text(text.replace(right, wrong))
    program = folder / "driver"
    warn = ("-Wall", "-Wextra", "-Werror")
    command = [compiler() or "g++", "-std=c++20", *warn, *how.value, "-I", sources, DRIVER, "-o", program, "-pthread"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return program


def driven(
    program: Path,
    protocol: ProtocolName,
    ep_size: int,
    schedules: Iterable[Schedule],
    *,
    rounds: int = 6,
    limit_s: float = 60.0,
    timeout_s: float = 250.0,
) -> subprocess.CompletedProcess[str]:
    """Run the driver; its answer is the number of rounds verified."""
    # a row of more than one chunk of Sentinel's polls, scales, and a last word of a partial that is not full
    shape = Shape(ep_size=ep_size, capacity=3, row_bytes=1104, scale_bytes=16, top_k=3, hidden=70)
    places = layout(protocol, shape)
    numbers = places.offsets() | {"total_bytes": places.total_bytes}
    numbers |= {name: getattr(shape, name) for name in ("ep_size", "capacity", "top_k", "hidden")}
    numbers |= {"num_slots": 2 * ep_size, "rounds": rounds, "limit_ms": round(limit_s * 1000)}
    lines = [protocol.value, *(f"{name} {number}" for name, number in numbers.items()), "end"]
    lines += [f"{s.rank} {s.step} {s.microseconds} {s.seed}" for s in schedules]
    # a fixed address layout: sanitizers of some compilers do not start under every kernel's random one
    command = [*(("setarch", "-R") if shutil.which("setarch") else ()), str(program)]
    return subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False, timeout=timeout_s
    )
