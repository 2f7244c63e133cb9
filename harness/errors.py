"""Errors that a person is meant to read.

`EpcrossError` and its children carry a finished message: what was given, what is allowed, what to do next. The
command line prints them without a traceback and exits with `exit_code`.
"""

from collections.abc import Sequence

from epcross.kernels.errors import BuildError, EpcrossError, WaitExpired

__all__ = [
    "BuildError",
    "ConfigError",
    "EpcrossError",
    "GroupError",
    "InputError",
    "NothingThere",
    "StoreError",
    "WaitExpired",
]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

NOTHING_SHOWN = 3
"""Exit code of a command that went well and shows nothing: no point was measured, compared, judged or passed."""


class ConfigError(EpcrossError):
    """One or more problems in configuration or input files, all reported together."""

    exit_code = 2

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            text = f"{len(self.problems)} problems:\n" + "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(text)


class InputError(ConfigError):
    """A file given by the user (trace, matrix, result, sweep) cannot be used."""


class StoreError(EpcrossError):
    """A run directory or result file cannot be written, read or merged."""


class NothingThere(StoreError):
    """What was typed leads to no run, no table and no folder of them: wrong usage, whatever the command."""

    exit_code = 2


class GroupError(EpcrossError):
    """The ranks of a group lost each other: a peer aborted, died or came too late."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
