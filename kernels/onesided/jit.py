"""CUDA sources -> cubin, by NVRTC, once for each architecture, into a cache keyed by everything that goes into it.

NVRTC needs no GPU: `prebuild.py` (`make prebuild`) builds ahead. What ptxas says, registers and spills of each kernel
among it, lies beside the cubin.

    onesided-<sources>-<arch>-<key>.cubin     a plain ELF file, for cuobjdump
                                    .log      first line: SHA-256 of the cubin; then the compiler's words
"""

import contextlib
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from epcross.kernels.cache import LOCK_LIMIT_S, cache_directory, locked, write_whole
from epcross.kernels.errors import BuildError
from epcross.kernels.extras import Extra

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""H100 and H200; B200 and GB200; B300 and GB300."""

ENTRY = "kernels.cu"
"""The file that includes the others."""

STANDARD = "c++17"
PTXAS_OPTIONS = ("-v",)

_SOURCES = Path(__file__).parent / "csrc"
_INSTALL = f"{Extra.CUDA.install}, or `make nvrtc` there"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUsage:
    """What ptxas gave one kernel. `spill_bytes` are stores and loads together."""

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """A compiled set of kernels."""

    arch: str
    path: Path
    log_path: Path
    usage: tuple[KernelUsage, ...]

    def read(self) -> bytes:
        """The machine code."""
        return self.path.read_bytes()


def sources(folder: Path = _SOURCES) -> list[Path]:
    """Every CUDA file."""
    return sorted(path for path in folder.iterdir() if path.suffix in {".cu", ".cuh"})


def sources_hash(folder: Path = _SOURCES) -> str:
    """First 16 hex digits of the SHA-256 of all sources: the version of the kernels."""
    digest = hashlib.sha256()
    for path in sources(folder):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def architecture(major: int, minor: int) -> str:
    """The target for a GPU of this compute capability.

    Raises:
        BuildError: the kernels are not made for it.
    """
    arch = f"sm_{major}{minor}a"
    if arch not in ARCHITECTURES:
        raise BuildError(
            f"compute capability {major}.{minor} is none that the one-sided kernels are compiled for "
            f"({', '.join(ARCHITECTURES)}): use an H100, H200, B200, GB200, B300 or GB300"
        )
    return arch


def unavailable() -> str | None:
    """Why nothing can be compiled here; None if it can. Never raises."""
    try:
        _compiler()
    except BuildError as error:
        return str(error)
    return None


def build(
    arch: str,
    *,
    entry: str = ENTRY,
    defines: Mapping[str, str] | None = None,
    folder: Path = _SOURCES,
    lock_limit_s: float = LOCK_LIMIT_S,
) -> Cubin:
    """The cubin for `arch`, compiled unless an intact one is cached.

    Args:
        arch: one of `ARCHITECTURES`.
        entry: the file in `folder` that is compiled; what it includes lies in `folder` too.
        defines: macros.

    Raises:
        BuildError: the compiler is missing or failed (the message names its log), the cache cannot be written, or
            another process holds the lock for longer than `lock_limit_s`.
    """
    version, options = _compiler(), _options(arch, defines or {})
    sourced = sources_hash(folder)
    key = hashlib.sha256("\0".join([sourced, entry, version, repr(options)]).encode()).hexdigest()[:16]
    path = cache_directory() / f"onesided-{sourced}-{arch}-{key}.cubin"
    if found := _cached(path, arch):
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), lock_limit_s):
            if found := _cached(path, arch):  # the holder we waited for has built it
                return found
            _compile(folder / entry, options, path)
    except OSError as error:
        raise BuildError(
            f"cannot write the kernel cache {path.parent}: {error}; set EPCROSS_CACHE_DIR to a writable directory"
        ) from error
    if found := _cached(path, arch):
        return found
    raise BuildError(f"{path} vanished or was damaged right after it was written: build again")


_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'"
    r"|(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


def parse_usage(log: str) -> tuple[KernelUsage, ...]:
    """What `ptxas -v` says of each kernel, in the order of their names."""
    found: dict[str, KernelUsage] = {}
    name, stack, spill = "", 0, 0
    for match in _PTXAS.finditer(log):
        if match["name"]:
            name, stack, spill = match["name"], 0, 0
        elif match["stack"]:
            stack, spill = int(match["stack"]), int(match["stores"]) + int(match["loads"])
        elif name:
            shared = re.search(r"(\d+) bytes smem", match["rest"])
            found[name] = KernelUsage(
                name=name,
                registers=int(match["registers"]),
                stack_bytes=stack,
                spill_bytes=spill,
                shared_bytes=int(shared[1]) if shared else 0,
            )
    return tuple(found[name] for name in sorted(found))


@cache
def _compiler() -> str:
    """What decides the code besides the sources and options: NVRTC's version, and that of the package it came from."""
    from importlib import metadata

    try:
        import cuda.core
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: the library itself cannot be opened
        raise BuildError(
            f"NVRTC cannot be used: {type(error).__name__}: {str(error).splitlines()[0]}; {_INSTALL}"
        ) from error
    if int(status):
        raise BuildError(f"NVRTC does not say its version ({status!r}); {_INSTALL}")
    package = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        package = metadata.version("nvidia-cuda-nvrtc")
    return f"nvrtc {major}.{minor} {package}, cuda.core {cuda.core.__version__}"


def _options(arch: str, defines: Mapping[str, str]) -> dict[str, object]:
    if arch not in ARCHITECTURES:
        raise BuildError(f"arch={arch} is not one of {', '.join(ARCHITECTURES)}")
    return {
        "arch": arch,
        "std": STANDARD,
        "define_macro": sorted(defines.items()),
        "ptxas_options": list(PTXAS_OPTIONS),
        "device_as_default_execution_space": False,
    }


def _cached(path: Path, arch: str) -> Cubin | None:
    """What an earlier build left, if it is whole. The log is written last, and names the cubin's digest."""
    log_path = path.with_suffix(".log")
    try:
        digest, _, log = log_path.read_text().partition("\n")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return None
    except (OSError, UnicodeDecodeError):
        return None
    return Cubin(arch=arch, path=path, log_path=log_path, usage=parse_usage(log))


def _compile(entry: Path, options: Mapping[str, object], path: Path) -> None:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    given = {name: value for name, value in options.items() if value} | {"include_path": str(entry.parent)}
    try:
        program = Program(entry.read_text(), "c++", ProgramOptions(name=entry.name, **given))
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's own errors: NVRTC's words are in the message
        words = f"{log.getvalue()}{error}\n"
        failed = path.with_suffix(".failed.log")
        write_whole(failed, words.encode())
        first = next((line.strip() for line in words.splitlines() if "error:" in line), str(error))
        raise BuildError(
            f"{entry.name} does not compile for {options['arch']}: {first}; the whole log: {failed}"
        ) from error
    write_whole(path, code)
    write_whole(path.with_suffix(".log"), f"{hashlib.sha256(code).hexdigest()}\n{log.getvalue()}".encode())
