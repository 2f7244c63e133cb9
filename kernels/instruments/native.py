"""The instruments as Python calls: each enqueues one kernel on a stream given by its handle."""

from pathlib import Path
from typing import Any

import numpy as np

from epcross.kernels.onesided import jit
from epcross.kernels.onesided.launch import Arguments, Module

SOURCES = Path(__file__).parent / "csrc"
ENTRY = "instruments.cu"
MAX_PROCESSES = 128
"""Ranks that `line_up` can bring together: a thread for each."""

_COPY_THREADS = 512
_POINTER, _I32, _I64, _U64 = "<u8", "<i4", "<i8", "<u8"

_SIGNATURES: dict[str, tuple[int, tuple[str, ...]]] = {
    # threads, arguments; as in csrc
    "line_up": (MAX_PROCESSES, (_POINTER, _I32, _I32, _POINTER, _U64, _U64, _POINTER, _POINTER, _POINTER)),
    "stamp": (1, (_POINTER,)),
    "hold": (1, (_U64,)),
    "empty": (128, ()),
    "timer_step": (1, (_I32, _POINTER)),
    "ping_clock": (1, (_POINTER, _POINTER, _I32, _I32, _U64, _POINTER, _POINTER)),
    "ping_pong": (1, (_POINTER, _POINTER, _I32, _I32, _U64, _POINTER, _POINTER)),
    "copy_vectors": (_COPY_THREADS, (_POINTER, _POINTER, _I64)),
}


def build(arch: str) -> jit.Cubin:
    """Compile, or find what was compiled before. Needs no GPU. Raises `BuildError`."""
    return jit.build(arch, entry=ENTRY, folder=SOURCES)


class Instruments:
    """The kernels, loaded into the current CUDA context."""

    def __init__(self, arch: str) -> None:
        """Raises `BuildError`, or `DriverError` if the context does not take them."""
        self._module = Module(build(arch))
        self._bound: dict[tuple[str, bool], tuple[Arguments, Any]] = {}

    def enqueue(self, name: str, stream: int, *values: int, blocks: int = 1, dependent: bool = False) -> None:
        """Launch kernel `name` with `values` (addresses as integers) on the stream of this handle.

        `dependent`: programmatic dependent launch, for kernels that wait by themselves (`empty`).
        """
        if (name, dependent) not in self._bound:
            threads, kinds = _SIGNATURES[name]
            arguments = Arguments(*(np.zeros((), kind) for kind in kinds))
            launcher = self._module.kernel(name, threads).launcher(arguments, dependent=dependent)
            self._bound[name, dependent] = arguments, launcher
        arguments, launcher = self._bound[name, dependent]
        for held, value in zip(arguments.values, values, strict=True):
            held[...] = value
        launcher((blocks, 1, 1), stream)
