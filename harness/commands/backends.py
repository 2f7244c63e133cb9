"""`epcross backends`: every backend, and whether it can be used here."""

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from epcross.harness.commands import config_dir_option, console, json_option


@click.command("backends", short_help="List every backend, usable or why not.")
@config_dir_option
@json_option
def command(config_dirs: tuple[Path, ...], as_json: bool) -> None:
    """List every backend: where it runs, and whether it can be used here or why not.

    \b
    Example: epcross backends
    """
    entries = survey(config_dirs)
    if as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    table = Table(expand=True)
    table.add_column("backend", overflow="fold")
    table.add_column("label", max_width=14, overflow="fold")
    table.add_column("domains")
    table.add_column("usable here", overflow="fold")
    for entry in entries:
        reason = entry["unavailable"]
        table.add_row(
            Text(str(entry["name"]), style="bold"),
            Text(str(entry["label"])),
            Text("\n".join(entry["domains"])),  # below each other, to leave the width to the reason
            Text("yes", style="green") if reason is None else Text(f"no: {reason}", style="yellow"),
        )
    console().print(table)
    stages = Table(expand=True)
    stages.add_column("compute", no_wrap=True)
    stages.add_column("label", max_width=14, overflow="fold")
    stages.add_column("usable here", overflow="fold")
    for name, label, reason in expert_stages(config_dirs):
        words = Text("yes", style="green") if reason is None else Text(f"no: {reason}", style="yellow")
        stages.add_row(Text(name, style="bold"), Text(label), words)
    console().print(stages)


def expert_stages(config_dirs: tuple[Path, ...] = ()) -> list[tuple[str, str, str | None]]:
    """Name, label, and why it cannot be used here, of each expert stage that layers may have. A layer whose backend has
    an interpreter of its own has its stage there."""
    from epcross.harness.backends import answers, computes, loader
    from epcross.harness.errors import ConfigError
    from epcross.harness.planning.library import Library

    library, found = Library(config_dirs), []
    for name in library.names("compute"):
        problems: list[str] = []
        library.load([("compute", name)], problems)
        config = library.get("compute", name)
        if config is None:
            found.append((name, "", "; ".join(problems)))
            continue
        try:
            reason = computes.unavailable(config, computes.maker(config, dict(config.options))())
        except (ConfigError, loader.CannotImport, answers.WrongBackend) as error:
            reason = str(error)
        found.append((name, config.label, reason))
    return found


def survey(config_dirs: tuple[Path, ...] = ()) -> list[dict]:
    """What is known of each backend, as plain JSON values; a faulty one is listed with what is wrong."""
    from epcross.harness.backends import answers, loader
    from epcross.harness.errors import ConfigError
    from epcross.harness.planning.library import Library

    library = Library(config_dirs)
    entries: list[dict] = []
    for name in library.names("backend"):
        problems: list[str] = []
        library.load([("backend", name)], problems)
        config = library.get("backend", name)
        entry = {"name": name, "label": config.label if config else "", "domains": [], "unavailable": None}
        if config is None:
            entry["unavailable"] = "; ".join(problems)
        else:
            try:
                found = loader.backend_class(config)
                entry["kind"] = str(found.kind)
                entry["domains"] = sorted(str(domain) for domain in found.domains)
                loader.load(config)
                entry["unavailable"] = loader.unavailable(config)
            except (ConfigError, loader.CannotImport, answers.WrongBackend) as error:
                entry["unavailable"] = str(error)
            entry["target"] = config.target
            entry["python"] = config.python
        entries.append(entry)
    return entries
