"""One file per verb of the command line, each with `command`. Options that verbs share are here."""

import contextlib
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 100
"""Columns of printed tables; a pipe has no width of its own."""


def console(*, stderr: bool = False) -> Console:
    """Where tables go: as wide as the terminal, at most `WIDTH`. On stderr where stdout is a JSON document."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = min(WIDTH, shutil.get_terminal_size().columns) if terminal else WIDTH
    return Console(width=width, highlight=False, stderr=stderr)


class Number(click.FloatRange):
    """A number within a range. nan is in none: it compares as false, so a wait of that length would never end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that the word is; a usage error if it is none, or outside."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"nan is not in the range {self._describe_range()}.", param, ctx)
        return number


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print what is warned of inside, such as damaged units left out, as lines for people on stderr, each once."""
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:  # also before an error, which they may explain
        for text in dict.fromkeys(str(warning.message) for warning in told if warning.category is UserWarning):
            click.echo(f"epcross: {text}", err=True)


def overrides_argument(function: F) -> F:
    """Words such as sweep=quickstart tokens_per_rank=1,8, as `overrides`."""
    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)


def config_dir_option(function: F) -> F:
    """`--config-dir DIR`, repeatable, as `config_dirs`."""
    return click.option(
        "--config-dir",
        "config_dirs",
        multiple=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="A folder with more backend/, model/, sweep/, ... files; may be given several times.",
    )(function)


def json_option(function: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(function)
