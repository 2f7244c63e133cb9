"""Compile the extension on the user's machine, once, into a cache keyed by everything that goes into it.

`python -m epcross.kernels.shm.build` builds ahead; otherwise the first use does. An artifact is the shared object
followed by the SHA-256 of it: a torn or empty file is recognised and built again.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import cast

from epcross.kernels.cache import LOCK_LIMIT_S, cache_directory, locked
from epcross.kernels.errors import BuildError
from epcross.kernels.shm.native import Native

MODULE = "_epcross_shm"
FLAGS = ("-std=c++20", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_LIMIT_S = 300.0

_SOURCES = Path(__file__).parent / "csrc"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MISSING = "install a C++20 compiler (Debian: apt-get install g++) or name one in CXX"


def find_compiler() -> list[str] | None:
    """The compiler's command: CXX (which may hold arguments), else the first of `COMPILERS` that exists."""
    variable = os.environ.get("CXX", "")
    try:
        named = shlex.split(variable)
    except ValueError:  # an open quotation mark
        named = [variable]
    if named:
        return named if shutil.which(named[0]) else None
    return next(([found] for name in COMPILERS if (found := shutil.which(name))), None)


def sources() -> list[Path]:
    """Every C++ file of the extension."""
    return sorted(_SOURCES.glob("*.[ch]pp"))


@cache
def sources_hash() -> str:
    """First 16 hex digits of the SHA-256 of all sources: the version of the kernels."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def unavailable() -> str | None:
    """Why the extension can neither be loaded nor built here; None if it can. Builds nothing, never raises."""
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        why = f"CXX={named} does not exist" if named else f"none of {', '.join(COMPILERS)} is on PATH"
        return None if _prebuilt() else f"the shared-memory kernels are not built and {why}: {_MISSING}"
    if not (python_header := _python_include() / "Python.h").exists():
        return None if _prebuilt() else f"{python_header} is missing: install Python's headers (Debian: python3-dev)"
    return None


def build(*, lock_limit_s: float = LOCK_LIMIT_S) -> Path:
    """The artifact for this machine and these sources, compiled unless an intact one is cached.

    Raises:
        BuildError: no compiler, the compiler failed, the cache cannot be written, or another process holds the lock
            for longer than `lock_limit_s`.
    """
    compiler = find_compiler()
    if compiler is None:
        if prebuilt := _prebuilt():
            return prebuilt
        raise BuildError(unavailable() or _MISSING)
    recipe = _recipe(tuple(compiler))
    artifact = _artifact(recipe.key)
    if is_intact(artifact):
        return artifact
    try:
        artifact.parent.mkdir(parents=True, exist_ok=True)
        with locked(artifact.with_suffix(".lock"), lock_limit_s):
            if not is_intact(artifact):  # the holder we waited for has built it
                _compile(recipe, artifact)
    except OSError as error:
        raise BuildError(
            f"cannot write the kernel cache {artifact.parent}: {error}; set EPCROSS_CACHE_DIR to a writable directory"
        ) from error
    return artifact


def is_intact(artifact: Path) -> bool:
    """Whether the file is there and ends with the digest of the rest."""
    try:
        data = artifact.read_bytes()
    except OSError:
        return False
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return len(body) > 0 and hashlib.sha256(body).digest() == digest


@cache
def load() -> Native:
    """The extension module, built if need be. Raises `BuildError`."""
    artifact = build()
    loader = ExtensionFileLoader(MODULE, str(artifact))
    spec = importlib.util.spec_from_file_location(MODULE, artifact, loader=loader)
    if spec is None:
        raise BuildError(f"Python does not take {artifact} for an extension module; remove it and build again")
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"cannot load {artifact}: {error}; remove it and build again") from error
    return cast("Native", module)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    command: tuple[str, ...]  # without the output
    key: str


@cache
def _recipe(compiler: tuple[str, ...]) -> _Recipe:
    import pybind11  # light, and needed only to build

    flags = FLAGS + (("-march=native",) if _accepts(compiler, "-march=native") else ())
    includes = ("-isystem", pybind11.get_include(), "-isystem", str(_python_include()))
    version = _run((*compiler, "--version")).stdout
    ingredients = [sources_hash(), *flags, *compiler, version, pybind11.__version__, _host_key()]
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    return _Recipe(command=(*compiler, *flags, *includes, str(_SOURCES / "module.cpp")), key=key)


def _python_include() -> Path:
    return Path(sysconfig.get_path("include"))


def _artifact(key: str) -> Path:
    return cache_directory() / f"{MODULE}-{sources_hash()}-{key}.so"


def _prebuilt() -> Path | None:
    """An intact artifact of these sources for this interpreter and CPU, whatever compiler made it."""
    index = cache_directory() / f"{MODULE}-{sources_hash()}-{_host_hash()}.current"
    try:
        artifact = index.with_name(index.read_text())
    except OSError:
        return None
    return artifact if is_intact(artifact) else None


@cache
def _host_key() -> str:
    """What the machine code depends on besides the compiler: the interpreter's ABI and, for -march=native, the CPU."""
    abi = str(sysconfig.get_config_var("SOABI"))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{abi} {platform.machine()}"
    wanted = ("flags", "Features", "model name", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(
        [abi, platform.machine(), *sorted({line for line in lines if line.split("\t")[0].strip() in wanted})]
    )


def _host_hash() -> str:
    return hashlib.sha256(_host_key().encode()).hexdigest()[:16]


def _compile(recipe: _Recipe, artifact: Path) -> None:
    """Compile into a directory of our own, then rename: no other process ever sees half a file."""
    with tempfile.TemporaryDirectory(dir=artifact.parent, prefix=".build-") as scratch:
        output = Path(scratch) / artifact.name
        result = _run((*recipe.command, "-o", str(output)))
        if result.returncode:
            raise BuildError(
                f"the shared-memory kernels do not compile (exit {result.returncode}): {shlex.join(recipe.command)}\n"
                f"{result.stderr.strip()}"
            )
        body = output.read_bytes()
        with output.open("ab") as file:
            file.write(hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        output.replace(artifact)
        index = Path(scratch) / "current"
        index.write_text(artifact.name)
        index.replace(artifact.parent / f"{MODULE}-{sources_hash()}-{_host_hash()}.current")


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{shlex.join(command)} took more than {COMPILE_LIMIT_S:.0f} s; try another CXX") from error
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}; {_MISSING}") from error


def _accepts(compiler: tuple[str, ...], flag: str) -> bool:
    return _run((*compiler, flag, "-fsyntax-only", "-x", "c++", "/dev/null")).returncode == 0


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as failure:
        sys.exit(str(failure))
