"""The command `epcross`. Verbs are imported only when they are used, so that `--help` stays fast."""

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

import epcross
from epcross.harness.errors import INTERRUPTED, EpcrossError

VERBS = {
    "plan": "epcross.harness.commands.plan:command",
    "run": "epcross.harness.commands.run:command",
    "status": "epcross.harness.commands.status:command",
    "doctor": "epcross.harness.commands.doctor:command",
    "cancel": "epcross.harness.commands.cancel:command",
    "reproduce": "epcross.harness.commands.reproduce:command",
    "report": "epcross.harness.commands.report:command",
    "compare": "epcross.harness.commands.compare:command",
    "crossover": "epcross.harness.commands.crossover:command",
    "claims": "epcross.harness.commands.claims:command",
    "backends": "epcross.harness.commands.backends:command",
    "check": "epcross.harness.commands.check:command",
    "point": "epcross.harness.commands.point:command",
}
"""Verb -> module:command, in the order of the help text."""


class _Verbs(click.Group):
    """Verbs by name; each module is imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from epcross.harness.planning.typed import suggest

            raise click.UsageError(f"unknown verb '{args[0]}'{suggest(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(epcross.__version__, "--version", prog_name="epcross")
def cli() -> None:
    """Measure the expert-parallel all-to-all of Mixture-of-Experts inference: verified, timed, on the same routing.

    \b
    Example: epcross plan sweep=quickstart
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: errors meant for people are printed without a traceback."""
    _open_closed_streams()
    _outlive_readers()
    sys.exit(run(arguments))


def _open_closed_streams() -> None:
    """Give each standard stream that the caller closed (`>&-`) a place, lest the first file we open take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115 - for the life of the process
            setattr(sys, name, nowhere)
            setattr(sys, f"__{name}__", nowhere)  # which keeps it open when the other is replaced


class _Outliving(io.FileIO):
    """A standard stream whose reader may go, such as `head` or a terminal: from then on what is written is dropped."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._gone = {errno.EPIPE, errno.EIO} if self.isatty() else {errno.EPIPE}

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._gone:
                raise
            _drop_output(self.fileno())
            return len(data)


def _outlive_readers() -> None:
    """Let a command go on to its own end and exit code when nobody reads on: rich and click would end it, a run half
    measured with it, and each with an exit code of its own."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        new = io.TextIOWrapper(
            io.BufferedWriter(_Outliving(old.fileno())),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering or old.write_through,
        )
        setattr(sys, name, new)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments), prog_name="epcross", standalone_mode=False
        )
        sys.stdout.flush()
    except EpcrossError as error:
        click.echo(f"epcross: {error}", err=True)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("epcross: interrupted", err=True)
        return INTERRUPTED
    except OSError as error:  # the output goes to a full disk, say; files have errors of their own
        _drop_output(sys.stdout.fileno())
        click.echo(f"epcross: {error.filename or 'the output'} cannot be read or written: {error.strerror}", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _drop_output(number: int) -> None:
    """Write what goes to this stream nowhere, and keep the interpreter from complaining at its end about it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


if __name__ == "__main__":
    main()
