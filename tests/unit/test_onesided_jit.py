"""Compiling by NVRTC: the cache and its faults, on a kernel of one line. The real kernels: test_onesided_compile.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epcross.kernels.errors import BuildError
from epcross.kernels.onesided import jit

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPCROSS_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "value.cuh").write_text("#pragma once\ninline constexpr int kValue = 7;\n")
    (sources / "kernels.cu").write_text(
        '#include "value.cuh"\nextern "C" __global__ void store(int* to) { *to = kValue + threadIdx.x; }\n'
    )
    return sources


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled = []
    real = jit._compile

    def counting(*arguments: object) -> None:
        compiled.append("once")
        real(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(jit, "_compile", counting)
    return compiled


@needs_nvrtc
def test_one_build_serves_until_a_source_an_option_or_the_architecture_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    cubin = jit.build("sm_90a", folder=folder)
    assert cubin.read()[:4] == b"\x7fELF"
    (kernel,) = cubin.usage
    assert (kernel.name, kernel.spill_bytes, kernel.shared_bytes) == ("store", 0, 0)
    assert 2 <= kernel.registers <= 32
    assert jit.build("sm_90a", folder=folder) == cubin
    assert len(compiled) == 1
    paths = {cubin.path, jit.build("sm_100a", folder=folder).path}
    paths.add(jit.build("sm_90a", folder=folder, defines={"SOME": "1"}).path)
    (folder / "value.cuh").write_text("#pragma once\ninline constexpr int kValue = 8;\n")
    paths.add(jit.build("sm_90a", folder=folder).path)
    assert (len(paths), len(compiled)) == (4, 4)


@needs_nvrtc
@pytest.mark.parametrize("damage", ["cubin torn", "cubin gone", "log torn", "log gone", "log overwritten"])
def test_a_damaged_artifact_is_built_again(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    cubin = jit.build("sm_90a", folder=folder)
    code = cubin.read()
    victim = cubin.path if damage.startswith("cubin") else cubin.log_path
    if damage.endswith("gone"):
        victim.unlink()
    elif damage.endswith("overwritten"):
        victim.write_bytes(b"\xff\xfe\x80 no text")
    else:
        victim.write_bytes(victim.read_bytes()[:40])
    assert jit.build("sm_90a", folder=folder) == cubin
    assert cubin.read() == code
    assert len(compiled) == 2


@needs_nvrtc
def test_the_compilers_words_reach_the_user_and_its_log_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "value.cuh").write_text("#pragma once\ninline constexpr int kOther = 7;\n")
    with pytest.raises(BuildError, match=r'kernels\.cu does not compile for sm_90a: .*"kValue" is undefined') as caught:
        jit.build("sm_90a", folder=folder)
    log = Path(str(caught.value).rpartition("the whole log: ")[2])
    assert '"kValue" is undefined' in log.read_text()
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock", ".log"}


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a file is no directory, for root either")
    monkeypatch.setenv("EPCROSS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot write the kernel cache .*set EPCROSS_CACHE_DIR"):
        jit.build("sm_90a", folder=folder)


CHILD = """
import sys, time
from pathlib import Path
from epcross.kernels.onesided import jit
folder, marks, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
real = jit._compile
def slow(*arguments):
    with marks.open("a") as file:
        file.write("x")
    time.sleep(seconds)
    real(*arguments)
jit._compile = slow
print(jit.build("sm_90a", folder=folder).path)
"""


def start_child(folder: Path, marks: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(marks), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@needs_nvrtc
def test_processes_that_start_together_compile_once(folder: Path, tmp_path: Path) -> None:
    children = [start_child(folder, tmp_path / "marks", 0.5) for _ in range(3)]
    outputs = {child.communicate(timeout=120)[0] for child in children}
    assert outputs == {f"{jit.build('sm_90a', folder=folder).path}\n"}
    assert (tmp_path / "marks").read_text() == "x"


@needs_nvrtc
def test_a_holder_that_lives_is_named_and_one_that_was_killed_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    holder = start_child(folder, tmp_path / "marks", 60)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "marks").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(BuildError, match=rf"process {holder.pid} has been building"):
            jit.build("sm_90a", folder=folder, lock_limit_s=0.2)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert jit.build("sm_90a", folder=folder, lock_limit_s=5).usage
    finally:
        holder.kill()
        holder.communicate()


def test_only_what_the_kernels_are_made_for_is_compiled() -> None:
    assert [jit.architecture(*capability) for capability in ((9, 0), (10, 0), (10, 3))] == list(jit.ARCHITECTURES)
    with pytest.raises(BuildError, match=r"8\.0 is none .*sm_90a, sm_100a, sm_103a\): use an H100"):
        jit.architecture(8, 0)
    with pytest.raises(BuildError, match="arch=sm_80 is not one of sm_90a"):
        jit._options("sm_80", {})


def test_without_the_compiler_the_next_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    jit._compiler.cache_clear()
    try:
        assert "NVRTC cannot be used" in str(jit.unavailable())
        assert "pip install -e '.[cuda]'" in str(jit.unavailable())
        with pytest.raises(BuildError, match="NVRTC cannot be used"):
            jit.build("sm_90a")
    finally:
        jit._compiler.cache_clear()


def test_registers_and_spills_are_read_from_what_ptxas_says() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
ptxas info    : Function properties for wide
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size, 768 bytes smem
ptxas info    : Compile time = 104.277 ms
ptxas info    : Compiling entry function 'empty' for 'sm_90a'
ptxas info    : Function properties for empty
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
"""
    empty, wide = jit.parse_usage(log)
    assert empty == jit.KernelUsage(name="empty", registers=4, stack_bytes=0, spill_bytes=0, shared_bytes=0)
    assert wide == jit.KernelUsage(name="wide", registers=64, stack_bytes=8, spill_bytes=16, shared_bytes=768)
    assert jit.parse_usage("") == ()
