"""The ways in which this machine can be asked about itself. A test passes another `Probe` and so another machine."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path


class Probe:
    """Reads files, commands and the environment of the machine it runs on."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables of this process."""
        return os.environ

    def hostname(self) -> str:
        """Name of this host."""
        return platform.node()

    def architecture(self) -> str:
        """Instruction set, such as x86_64 or aarch64."""
        return platform.machine()

    def affinity(self) -> list[int]:
        """The cores this process may run on, ascending."""
        return sorted(os.sched_getaffinity(0))

    def text(self, path: str) -> str:
        """Contents of a file. Raises `OSError`."""
        return Path(path).read_text(errors="replace")

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return Path(path).exists()

    def entries(self, folder: str) -> list[str]:
        """Names in a folder, sorted. Raises `OSError`."""
        return sorted(os.listdir(folder))

    def space(self, folder: str) -> tuple[int, int]:
        """Total and free bytes of the file system of `folder`. Raises `OSError`."""
        status = os.statvfs(folder)
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def version(self, distribution: str) -> str:
        """Version of an installed distribution. Raises `importlib.metadata.PackageNotFoundError`."""
        return metadata.version(distribution)

    def output(self, command: Sequence[str], timeout_s: float) -> str:
        """Standard output of a command. Raises `LookupError` with the reason if it is absent, fails or is too slow."""
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
            )
        except FileNotFoundError:
            raise LookupError(f"{command[0]} is not installed") from None
        except subprocess.TimeoutExpired:
            raise LookupError(f"{' '.join(command)} took more than {timeout_s:g} s") from None
        if result.returncode or not result.stdout.strip():
            words = (result.stderr or result.stdout).strip() or "no output"
            raise LookupError(f"{' '.join(command)} failed with exit status {result.returncode}: {words}")
        return result.stdout
