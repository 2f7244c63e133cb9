"""Up to how many tokens Sentinel is the faster protocol: measured on one kind of machine, stored, never guessed.

A file of entries, each with where it was measured:

    {"crossovers": [{"machine": "NVIDIA H200, posix_fd, 1 rank a GPU", "ep_size": 2, "hidden": 7168,
                     "dispatch_format": "bf16", "sentinel_up_to_tokens": 96, "source": "<run id>"}]}
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from epcross.kernels.cache import write_whole
from epcross.kernels.errors import NoCrossover as NoCrossover
from epcross.kernels.formats import RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a crossover holds for. `machine` is as `machine_name` has it."""

    machine: str
    ep_size: int
    hidden: int
    dispatch_format: RowFormat


def machine_name(gpu: str, transport: str, ranks_on_gpu: int) -> str:
    """GPU product, how ranks reach each other and how many are on a GPU: what moves a crossover besides the shapes."""
    return f"{gpu}, {transport}, {ranks_on_gpu} rank{'s' if ranks_on_gpu > 1 else ''} a GPU"


class Crossovers:
    """The entries of a file. `entries` maps a setting to (largest token count at which Sentinel is faster, source)."""

    def __init__(self, entries: Mapping[Setting, tuple[int, str]], name: str = "the given crossovers") -> None:
        self.entries = dict(entries)
        self.name = name

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Crossovers":
        """Read a file.

        Raises:
            NoCrossover: it cannot be read, or an entry is not one.
        """
        try:
            found = json.loads(Path(path).read_text())["crossovers"]
            entries: dict[Setting, tuple[int, str]] = {}
            for entry in found:
                setting = _setting(entry)
                if setting in entries:
                    raise ValueError(f"two entries for {setting}, and nothing says which one holds")
                entries[setting] = _count(entry["sentinel_up_to_tokens"]), str(entry["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoCrossover(
                f"{path} is no crossover file: {type(error).__name__}: {error}; write one with "
                "`epcross crossover RUN --save FILE`, or choose protocol='fence' or 'sentinel'"
            ) from error
        return cls(entries, os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all entries, whole or not at all."""
        listed = [
            asdict(setting) | {"sentinel_up_to_tokens": count, "source": source}
            for setting, (count, source) in sorted(self.entries.items(), key=lambda item: str(item[0]))
        ]
        write_whole(Path(path), (json.dumps({"crossovers": listed}, indent=1) + "\n").encode())

    def sentinel_up_to(self, setting: Setting) -> int:
        """The largest token count of any rank at which Sentinel is the faster protocol; 0 if it never is.

        Raises:
            NoCrossover: this setting was not measured.
        """
        if setting not in self.entries:
            raise NoCrossover(
                f"{self.name} has no crossover for machine={setting.machine!r} ep_size={setting.ep_size} "
                f"hidden={setting.hidden} dispatch_format={setting.dispatch_format}: measure both protocols there and "
                "add the entry with `epcross crossover RUN --save FILE`, or choose protocol='fence' or 'sentinel'"
            )
        return self.entries[setting][0]


def _setting(entry: Mapping[str, object]) -> Setting:
    return Setting(
        machine=str(entry["machine"]),
        ep_size=_count(entry["ep_size"]),
        hidden=_count(entry["hidden"]),
        dispatch_format=RowFormat(str(entry["dispatch_format"])),
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
