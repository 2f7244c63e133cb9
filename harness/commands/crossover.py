"""`epcross crossover`: up to how many tokens Sentinel is the faster protocol, as a file that `onesided_auto` reads."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from epcross.harness.commands import console, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from epcross.harness.analysis.protocol_choice import Choice
    from epcross.kernels.onesided.crossover import Setting


@click.command("crossover")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the limits to this file, beside those of other settings that it holds already.",
)
@json_option
def command(runs: tuple[Path, ...], save: Path | None, as_json: bool) -> None:
    """Up to how many tokens Sentinel is the faster protocol, from runs of onesided_sentinel and onesided_fence: one
    limit for each machine, EP size, hidden size and format. Backend onesided_auto, and protocol="auto" of the kernels,
    go by the file.

    Of several runs of one setting those count that agree with the newest in kernels, harness, machine and conditions;
    every other one, and every soak, is left out by name, with the reason.

    \b
    Example: epcross crossover results/runs/RUN --save crossover.json
             epcross run sweep=onesided_nvlink backend=onesided_auto backend.options.crossover=$PWD/crossover.json
    """
    from epcross.harness.analysis.material import open_runs
    from epcross.harness.analysis.protocol_choice import choices
    from epcross.harness.errors import EpcrossError
    from epcross.harness.planning.tokens import counted
    from epcross.kernels.onesided.crossover import Crossovers

    found = choices(open_runs(runs))
    if save is not None:
        entries = _entries(save)
        entries |= {one.setting: (one.sentinel_up_to, one.source) for one in found.chosen}
        try:
            Crossovers(entries).save(save)
        except OSError as error:
            raise EpcrossError(f"{save} cannot be written: {error.strerror}; name a file that can") from error
    if as_json:
        lines = [
            {
                "machine": one.setting.machine,
                "ep_size": one.setting.ep_size,
                "hidden": one.setting.hidden,
                "dispatch_format": str(one.setting.dispatch_format),
                "sentinel_up_to_tokens": one.sentinel_up_to,
                "medians_us": {str(tokens): list(both) for tokens, both in one.medians_us.items()},
                "repeats": list(one.repeats),
                "source": one.source,
            }
            for one in found.chosen
        ]
        left_out = [
            {
                "run_id": one.run_id,
                "of": None if one.setting is None else asdict(one.setting),
                "reason": one.reason,
            }
            for one in found.left_out
        ]
        told = {"crossovers": lines, "left_out": left_out, "saved": None if save is None else str(save)}
        click.echo(json.dumps(told))
        return
    out = console()
    for one in found.chosen:
        out.print(_table(one))
        more = "; it was still ahead there, so more tokens may be its own: measure more" if one.open_ended else ""
        n = " to ".join(map(str, dict.fromkeys(one.repeats)))
        out.print(f"Sentinel up to {counted(one.sentinel_up_to)}{more}", soft_wrap=True, markup=False)
        out.print(f"medians of n = {n} repeats, steady; {one.source}\n", soft_wrap=True, markup=False)
    for one in found.left_out:
        out.print(one.words, soft_wrap=True, markup=False)
    if save is not None:
        out.print(str(save), soft_wrap=True, markup=False)


def _entries(save: Path) -> "dict[Setting, tuple[int, str]]":
    """What the file holds already; somebody's other file is not written over.

    Raises:
        InputError: it is there and holds something else.
    """
    from epcross.harness.errors import InputError
    from epcross.kernels.onesided.crossover import Crossovers, NoCrossover

    if not save.exists():
        return {}
    try:
        return Crossovers.load(save).entries
    except NoCrossover as error:
        cause = error.__cause__
        if isinstance(cause, OSError):
            why = f"it cannot be read: {cause.strerror}"
        elif isinstance(cause, ValueError):  # its words are for people, those of the others name a type of Python
            why = str(cause)
        else:
            why = "it is no object with a list of entries under 'crossovers'"
        raise InputError(
            f"--save {save}: this file holds no crossovers ({why}), so it is left as it is; name another file, or move "
            "it away"
        ) from error


def _table(choice: "Choice") -> "Table":
    from rich import box
    from rich.table import Table

    from epcross.harness.analysis.protocol_choice import words

    table = Table(title=words(choice.setting), box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("tokens", "Sentinel (us)", "Fence (us)", "Fence / Sentinel"):
        table.add_column(heading, justify="right")
    for tokens, (sentinel, fence) in choice.medians_us.items():
        table.add_row(str(tokens), f"{sentinel:.2f}", f"{fence:.2f}", f"{fence / sentinel:.3f}")
    return table
