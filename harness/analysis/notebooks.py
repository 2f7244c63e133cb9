"""Notebooks, executed: each pair of `notebooks/` with its outputs, in a folder of its own.

    python -m epcross.harness.analysis.notebooks                     all of them, into build/notebooks
    python -m epcross.harness.analysis.notebooks NAME... -o FOLDER   some, elsewhere

A notebook is a pair: NAME.py, which is read, reviewed and linted, and NAME.ipynb, which opens everywhere. Both hold the
same cells and no outputs; `make notebooks-sync` carries an edit of one over to the other.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epcross.harness.errors import EpcrossError, InputError
from epcross.kernels.extras import Extra

if TYPE_CHECKING:
    from nbformat import NotebookNode

SOURCES = Path("notebooks")
EXECUTED = Path("build/notebooks")
CELL_LIMIT_S = 120
"""Wall limit of one cell: what is longer is no longer something to look at while reading."""

_SYNC = "`make notebooks-sync` makes the older one like the newer"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def names(sources: Path) -> list[str]:
    """The notebooks of a folder, in order."""
    return sorted(path.stem for path in sources.glob("*.py"))


def disagreements(sources: Path, name: str) -> list[str]:
    """Sentences on what makes `name` no pair: cells that differ, a half that is missing, outputs that were kept."""
    import jupytext

    halves = [sources / f"{name}{suffix}" for suffix in (".py", ".ipynb")]
    if missing := [path for path in halves if not path.is_file()]:
        return [f"{path} is missing; {_SYNC}" for path in missing]
    text, notebook = (jupytext.read(path) for path in halves)
    problems = []
    cells = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (text, notebook)]
    for number, (ours, theirs) in enumerate(zip(*cells, strict=False), 1):
        if ours != theirs:
            problems.append(f"{name}: cell {number} differs between .py and .ipynb; {_SYNC}")
    if len(cells[0]) != len(cells[1]):
        problems.append(f"{name}: {len(cells[0])} cells in .py, {len(cells[1])} in .ipynb; {_SYNC}")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if any(cell.outputs or cell.execution_count is not None for cell in code):
        problems.append(f"{name}.ipynb holds outputs, which are not committed; clear them and save")
    return problems


def execute(source: Path) -> "NotebookNode":
    """The notebook `source` (.py or .ipynb) with its outputs, every cell run in the folder that it lies in.

    Raises:
        EpcrossError: a cell raised, or was not done within `CELL_LIMIT_S`; with the cell and the traceback.
    """
    import jupytext
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = jupytext.read(source)
    client = NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.parent)}},
        extra_arguments=["--log-level=ERROR"],  # a warning that loopback is not encrypted is no output of a notebook
    )
    try:
        return client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise EpcrossError(f"{source}: {_COLORS.sub('', str(error))}") from error


def main(arguments: Sequence[str]) -> int:
    """Execute notebooks of the clone in the current folder, and say where they lie."""
    parser = argparse.ArgumentParser(prog="python -m epcross.harness.analysis.notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", help="which ones; all if none is named")
    parser.add_argument("-o", "--output", type=Path, default=EXECUTED, help="folder for the executed notebooks")
    words = parser.parse_args(arguments)
    try:
        known = names(SOURCES)
        if not known:
            raise InputError(f"{Path.cwd() / SOURCES} holds no notebooks; go to the root of a clone")
        if unknown := sorted(set(words.names) - set(known)):
            raise InputError(f"there is no notebook {', '.join(unknown)}; there are {', '.join(known)}")
        for name in words.names or known:
            begin = time.monotonic()
            _write(execute(SOURCES / f"{name}.py"), words.output / f"{name}.ipynb")
            sys.stdout.write(f"{words.output / name}.ipynb in {time.monotonic() - begin:.0f} s\n")
    except EpcrossError as error:
        sys.stderr.write(f"epcross: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        sys.stderr.write(f"epcross: {error}. Notebooks need an extra: {Extra.NOTEBOOKS.install}\n")
        return 1
    return 0


def _write(notebook: "NotebookNode", path: Path) -> None:
    import nbformat

    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
