"""The command `epcross`. Verbs are imported only when they are used, so that `--help` stays fast."""

import importlib
import os
import sys
from collections.abc import Sequence

import click

import epcross
from epcross.harness.errors import EpcrossError

VERBS = {
    "plan": "epcross.harness.commands.plan:command",
    "run": "epcross.harness.commands.run:command",
    "status": "epcross.harness.commands.status:command",
    "cancel": "epcross.harness.commands.cancel:command",
    "report": "epcross.harness.commands.report:command",
    "compare": "epcross.harness.commands.compare:command",
    "backends": "epcross.harness.commands.backends:command",
    "check": "epcross.harness.commands.check:command",
    "point": "epcross.harness.commands.point:command",
}
"""Verb -> module:command, in the order of the help text."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


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
    sys.exit(run(arguments))


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
    except BrokenPipeError:
        # the reader, such as head, has seen enough; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
