"""Building the extension: the cache and its faults. A shell script stands in for the compiler where speed matters."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epcross.kernels.errors import BuildError
from epcross.kernels.shm import build


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EPCROSS_CACHE_DIR", str(tmp_path / "cache"))
    build._recipe.cache_clear()
    yield
    build._recipe.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make CXX a script that writes what it is told, and counts its compilations in `<script>.count`."""

    def make(body: str = "printf object > $out") -> Path:
        script = tmp_path / "fake-cxx"
        script.write_text(
            '#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\n'
            'case "$1" in --version) echo fake 1.0; exit 0;; -march=native) exit 0;; esac\n'
            f'echo x >> "$0.count"\n{body}\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


def _count(script: Path) -> int:
    return len(script.with_name(script.name + ".count").read_text().split())


def test_one_build_serves_until_something_changes(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler("printf object > $out")
    artifact = build.build()
    assert artifact.read_bytes().startswith(b"object")
    assert build.build() == artifact
    assert _count(script) == 1
    monkeypatch.setattr(build, "_host_key", lambda: "another interpreter or CPU")
    build._recipe.cache_clear()
    assert build.build() != artifact
    assert _count(script) == 2


@pytest.mark.parametrize("damage", [b"", b"obj", b"object" + bytes(32)])
def test_a_torn_artifact_is_built_again(compiler: Callable[[str], Path], damage: bytes) -> None:
    script = compiler("printf object > $out")
    artifact = build.build()
    artifact.write_bytes(damage)
    assert not build.is_intact(artifact)
    assert build.build() == artifact
    assert build.is_intact(artifact)
    assert _count(script) == 2


def test_the_compilers_words_reach_the_user(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler("echo 'module.cpp:1:1: error: no luck' >&2; exit 3")
    with pytest.raises(BuildError, match=r"exit 3[\s\S]*error: no luck"):
        build.build()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_no_compiler_is_said_and_an_artifact_makes_up_for_it(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler("printf object > $out")
    real = os.environ["CXX"]
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "CXX=/nowhere/c++ does not exist" in str(build.unavailable())
    with pytest.raises(BuildError, match="apt-get install g"):
        build.build()
    monkeypatch.setenv("CXX", real)
    artifact = build.build()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert build.unavailable() is None
    assert build.build() == artifact
    assert _count(script) == 1
    monkeypatch.setenv("CXX", "g++ 'open")
    artifact.write_bytes(b"")
    assert "CXX=g++ 'open does not exist" in str(build.unavailable())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "none of c++, g++, clang++ is on PATH" in str(build.unavailable())


def test_missing_python_headers_are_said(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler("printf object > $out")
    monkeypatch.setattr(build, "_python_include", lambda: tmp_path)
    assert "python3-dev" in str(build.unavailable())


def test_a_cache_that_cannot_be_written_is_said(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler("printf object > $out")
    (tmp_path / "file").write_text("a file is no directory, for root either")
    monkeypatch.setenv("EPCROSS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot write the kernel cache .*set EPCROSS_CACHE_DIR"):
        build.build()


def _hold_lock(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process whose compiler never ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "epcross.kernels.shm.build"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 20
    while not any(path.read_text() == f"{child.pid}\n" for path in (tmp_path / "cache").glob("*.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


def test_a_holder_that_lives_is_named_and_one_that_was_killed_is_not_waited_for(
    compiler: Callable[[str], Path], tmp_path: Path
) -> None:
    compiler('[ -e "$0.go" ] || sleep 60; printf object > $out')
    holder = _hold_lock(tmp_path)
    try:
        with pytest.raises(BuildError, match=rf"process {holder.pid} has been building"):
            build.build(lock_limit_s=0.2)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        (tmp_path / "fake-cxx.go").write_text("")
        assert build.is_intact(build.build(lock_limit_s=5))
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        if holder.stdout:
            holder.stdout.close()


def test_processes_that_start_together_compile_once(compiler: Callable[[str], Path]) -> None:
    script = compiler("sleep 0.5; printf object > $out")
    children = [
        subprocess.Popen([sys.executable, "-m", "epcross.kernels.shm.build"], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {child.communicate(timeout=60)[0] for child in children}
    assert len(outputs) == 1
    assert _count(script) == 1


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_the_real_sources_compile_without_a_warning(tmp_path: Path) -> None:
    """Portable flags and without optimisation: quick, and the path that other CPUs take."""
    compiler = build.find_compiler()
    assert compiler is not None
    import pybind11

    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fsyntax-only"]
    includes = ["-isystem", pybind11.get_include(), "-isystem", str(build._python_include())]
    source = next(path for path in build.sources() if path.name == "module.cpp")
    result = subprocess.run([*compiler, *flags, *includes, str(source)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
