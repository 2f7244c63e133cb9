"""The real kernels, without a GPU: they compile for every architecture, and read what `layout.py` packs."""

import re
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from epcross.kernels.onesided import jit, prebuild
from epcross.kernels.onesided.layout import (
    ARMED_WORD,
    CALL,
    CONTROL,
    COUNT_BITS,
    EPOCH_SHIFT,
    ESCAPE_WORD,
    EXCHANGE,
    FAILURE,
    MAX_CAPACITY,
    MAX_FLAGS,
    MAX_LOCAL_RANKS,
    MAX_RANKS,
    Protocol,
)
from epcross.kernels.onesided.plan import BLOCKS, kernel_names
from epcross.kernels.shm.build import find_compiler

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))

SPILL_LIMIT_BYTES = 128
"""Stores and loads of one kernel together: above that, a change has gone wrong."""

LEAST_THREADS = 6 * 128
"""That a multiprocessor must hold, if it is given as many: `EPCROSS_WIDE_BLOCKS` of csrc/kernels.cu."""

REGISTERS = 65536
"""Of a multiprocessor. Source: CUDA programming guide, compute capabilities 9.0 and 10.x."""


def names_used() -> dict[str, str]:
    """The variant of each kernel."""
    return {name: variant for protocol in Protocol for (_, variant), name in kernel_names(protocol).items()}


@needs_nvrtc
@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
def test_every_kernel_that_is_launched_is_there_and_fits(
    arch: str, record_property: Callable[[str, object], None]
) -> None:
    cubin = jit.build(arch)
    usage = {kernel.name: kernel for kernel in cubin.usage}
    assert names_used().keys() <= usage.keys()
    for name, kernel in usage.items():
        record_property(kernel.name, f"{kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
        block = BLOCKS[names_used()[name]]
        threads = block.threads * block.per_sm if block.per_sm else LEAST_THREADS
        assert kernel.registers * threads <= REGISTERS, kernel
        assert kernel.spill_bytes <= SPILL_LIMIT_BYTES, kernel


def struct_asserts() -> str:
    """C++ that compiles only if every field lies where numpy puts it. NVRTC has no offsetof; both share one ABI."""
    lines = [
        "#define __device__",
        "#define __forceinline__ inline",
        '#include "params.cuh"',
        "using namespace epcross;",
    ]
    for name, dtype in (("Exchange", EXCHANGE), ("Call", CALL), ("Failure", FAILURE), ("Control", CONTROL)):
        for field, (inner, offset, *_) in dict(dtype.fields or {}).items():
            lines.append(f"static_assert(__builtin_offsetof({name}, {field}) == {offset});")
            lines.append(f"static_assert(sizeof({name}::{field}) == {inner.itemsize});")
        if name != "Control":  # which is aligned to a vector, and nothing follows it
            lines.append(f"static_assert(sizeof({name}) == {dtype.itemsize});")
    lines += [
        f"static_assert(kArmed == {ARMED_WORD}ull && kEscape == {ESCAPE_WORD}ull);",
        f"static_assert(kMaxRanks == {MAX_RANKS} && kMaxLocalRanks == {MAX_LOCAL_RANKS});",
    ]
    return "\n".join([*lines, ""])


def test_words_have_room_for_what_the_host_allows() -> None:
    """Headers and flags are made in files that only a CUDA compiler reads, so their numbers are taken from the text."""
    text = "".join(path.read_text() for path in jit.sources())
    kernels = {name: int(value) for name, value in re.findall(r"\b(k[A-Z]\w+) = (\d+)[,;]", text)}
    assert kernels["kMaxFlags"] == MAX_FLAGS < 1 << kernels["kFlagShift"]
    assert kernels["kCountBits"] == COUNT_BITS
    assert MAX_CAPACITY < 1 << COUNT_BITS
    assert "kEpochShift = kCountBits + 1;" in text
    assert EPOCH_SHIFT == COUNT_BITS + 1
    assert kernels["kLanes"] * 3 == MAX_RANKS


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler (Debian: apt-get install g++)")
def test_structures_are_packed_as_the_kernels_read_them() -> None:
    compiler = find_compiler()
    assert compiler is not None

    def compiles(source: str) -> str:
        command = [*compiler, "-std=c++20", "-fsyntax-only", f"-I{jit.sources()[0].parent}", "-x", "c++", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr

    assert compiles(struct_asserts()) == ""
    assert "static assertion failed" in compiles(struct_asserts().replace("timeout_ns) ==", "timeout_ns) == 8 +"))
    assert EXCHANGE.itemsize + CALL.itemsize <= 4096, "parameters of a kernel"


def test_reserved_words_are_what_no_one_sends_by_chance() -> None:
    halves = np.array([ARMED_WORD, ESCAPE_WORD], "<u8").view("<u2")
    exponent, mantissa = halves >> 7 & 0xFF, halves & 0x7F
    assert np.all((exponent == 0xFF) & (mantissa != 0)), "four bf16 NaNs"
    assert 0x7FC0 not in halves, "not the NaN that arithmetic makes"
    assert 0xFFFF not in halves


@needs_nvrtc
def test_building_ahead_says_what_each_kernel_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert prebuild.main(["sm_90a"]) is None
    cubin, *kernels = capsys.readouterr().out.splitlines()
    assert cubin.startswith(str(jit.build("sm_90a").path))
    assert {line.split(":")[0].strip() for line in kernels} >= names_used().keys()
    assert all(" registers, " in line and " bytes spilled, " in line for line in kernels)
    assert "arch=sm_80 is not one of sm_90a, sm_100a, sm_103a" in str(prebuild.main(["sm_80"]))
