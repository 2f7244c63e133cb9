"""`epcross report`: one page about one or more runs, and everything a paper or a deposit needs of them."""

from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the report; RUN/report of the first run if not given.",
)
@click.option(
    "--pack",
    "archive",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.tar.gz",
    help="Also write one checksummed archive of runs and report, fit for deposit.",
)
def command(runs: tuple[Path, ...], output: Path | None, archive: Path | None) -> None:
    """Write an HTML page about one or more runs of one domain, with figures, tables, all statuses and where they were
    taken; the same as Markdown, tables as CSV, and figures as PDF and SVG. Prints the path of the page.

    \b
    Example: epcross report results/runs/20260131-120000-quickstart-1a2b
    """
    from epcross.harness.analysis import material as materials
    from epcross.harness.report import content, page
    from epcross.harness.report import pack as packs

    if archive:
        packs.check_name(archive)
    material = materials.load(runs)
    folder = output or runs[0] / "report"
    click.echo(str(page.write(content.document(material), folder)))
    if archive:
        click.echo(str(packs.pack(material, folder, archive)))
