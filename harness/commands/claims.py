"""`epcross claims`: what others claim, held against what was measured here; `claims add` enters more of it."""

import json
from pathlib import Path
from typing import Any

import click

from epcross.harness.commands import console, json_option, warnings_as_lines
from epcross.harness.errors import InputError, StoreError
from epcross.harness.terms import Flag

DEFAULT_RUNS = Path("results/measured")


@click.command("claims add")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--source", required=True, help="Name of the source: lower-case letters, digits and _.")
@click.option("--title", default="", help="Of a new source, as `--url` to `--not-stated`.")
@click.option("--url", default="", help="Where it can be read.")
@click.option("--date", default="", help="When it appeared.")
@click.option("--hardware", default="", help="What it was measured on, in its own words.")
@click.option("--bytes", "byte_convention", default="", help="What its bandwidths count, such as pairs or selections.")
@click.option("--ranks", "rank_reduction", default="", help="How it makes one number of many ranks.")
@click.option("--not-stated", multiple=True, help="What it leaves open; may be given several times.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results/reference"),
    show_default=True,
    help="Folder with a folder for each source.",
)
def add(file: Path, source: str, into: Path, **about: Any) -> None:
    """Enter FILE, a table of values (.csv) or claims (.yaml), from a paper you have, under a source.

    Both are checked with everything that is there, then copied as they are; docs/claims.md describes the columns and
    keys. From then on `epcross claims` and figures of published values use them.

    \b
    Example: epcross claims add table3.csv --source smith2026 --title "Smith et al., table 3" --hardware "GB200 NVL72"
    """
    from epcross.harness.claims.entry import enter

    entered = enter(file, source, about, into)
    count, what = (entered.values, "value") if entered.values else (entered.claims, "claim")
    click.echo(f"{count} {what}{'s' * (count != 1)} of {source}: wrote {', '.join(entered.files)} in {entered.folder}")


class _WithAdd(click.Command):
    """`claims RUN...`, and `claims add` as a verb of its own. A run in a folder called add is `./add`."""

    commands = {"add": add}  # noqa: RUF012 - as of click.Group, which would take a run for a verb

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return self.commands[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


@click.command("claims", cls=_WithAdd, short_help="Hold published claims against measured rows.")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option("--claim", "ids", multiple=True, help="All details of this claim; may be given several times.")
@click.option(
    "--keep",
    multiple=True,
    type=click.Choice([flag.value for flag in Flag]),
    help=(
        "Use rows with this flag too; may be given several times. Without it flagged rows are left out, "
        "but for within_launch and power_capped, which captions say."
    ),
)
@click.option(
    "--reference",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A further folder of sources; may be given several times. results/reference is read anyway.",
)
@json_option
def command(
    runs: tuple[Path, ...], ids: tuple[str, ...], keep: tuple[str, ...], reference: tuple[Path, ...], as_json: bool
) -> int:
    """Judge every known claim by the rows of RUNs: run directories, merged folders, or folders of them.

    Without RUN it is results/measured. A kernel as shipped reproduces a claim, the kernel of this repository
    replicates it. Bounds were written before anything was measured; an interval that straddles one is inconclusive.
    `epcross claims add FILE --source NAME ...` enters values or claims of a paper you have.

    \b
    Exit code: 0 no claim is outside its bounds
               1 at least one is
               2 wrong usage, or a run or file cannot be read
               3 nothing measured here could be held against a claim
    \b
    Example: epcross claims results/runs/RUN --claim P01
    """
    from epcross.harness.claims import claims_table as show
    from epcross.harness.claims.book import read_book
    from epcross.harness.claims.evaluate import evaluate
    from epcross.harness.claims.judge import exit_code
    from epcross.harness.claims.sources import reference_folders

    folders = reference_folders(reference)
    book = read_book(folders)
    wanted = [book.claim(name) for name in ids]
    try:
        with warnings_as_lines():
            judgements, note = evaluate(book, folders, runs or (DEFAULT_RUNS,), keep=keep, optional=not runs)
    except StoreError as error:
        raise InputError(str(error)) from error  # its own exit code, 1, means outside here
    if wanted:
        judgements = [one for one in judgements if one.claim in wanted]
    if as_json:
        click.echo(json.dumps(show.as_json(judgements), allow_nan=False))
    elif wanted:
        for one in judgements:
            console().print(show.claim_page(one))
    else:
        console().print(show.claims_table(judgements, note))
    return exit_code(judgements)
