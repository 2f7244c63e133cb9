"""Claims judged by runs on disk: what the command line and notebooks call.

judgements, note = evaluate(read_book(), reference_folders(), ["results/measured"])
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epcross.harness.claims.book import Book
from epcross.harness.claims.findings import Judgement
from epcross.harness.claims.judge import judge
from epcross.harness.errors import InputError
from epcross.harness.terms import Domain, Flag

if TYPE_CHECKING:
    import pandas as pd


def evaluate(
    book: Book,
    folders: Sequence[Path],
    runs: Sequence[Path | str],
    *,
    keep: Iterable[Flag | str] = (),
    optional: bool = False,
) -> tuple[list[Judgement], str]:
    """A judgement of each claim of `book`, and a sentence on what was judged by; see `judge.judge`.

    Args:
        folders: of published values; see `sources.reference_folders`.
        runs: run directories, merged folders, or folders that hold such.
        optional: runs that are not there are no error; then nothing is measured.

    Raises:
        StoreError: a run is damaged.
        ConfigError: a run or source cannot be used.
    """
    from epcross.harness.analysis import frame
    from epcross.harness.claims import published
    from epcross.harness.claims.hardware import with_products
    from epcross.harness.storing.parquet import ROWS_SCHEMA

    values = published.load(folders)
    paths = runs_in([Path(run) for run in runs], optional=optional)
    if not paths:
        measured, note = values.iloc[:0].assign(product=""), f"no run: {', '.join(map(str, runs))} is not here"
        assert set(ROWS_SCHEMA.names) <= set(measured.columns)
        return judge(book, measured, values, keep=keep), note
    measured = with_products(frame.load(*paths), paths)
    return judge(book, measured, values, keep=keep), _judged_by(measured, keep)


def _judged_by(measured: "pd.DataFrame", keep: Iterable[Flag | str]) -> str:
    """Which rows could count for a verdict, and which of them do not."""
    from epcross.harness.analysis import frame

    if measured.empty:
        return "judged by no row: the runs that were given hold none"
    able = measured[measured["domain"] == Domain.NVLINK]
    left_out = frame.headline(able, keep).note
    names = sorted(map(str, (able if len(able) else measured)["run_id"].unique()))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    note = f"judged by {len(able)} rows of domain {Domain.NVLINK} in {shown}"
    return note + (f"; {left_out}" if left_out else "")


def runs_in(paths: Sequence[Path], *, optional: bool = False) -> list[Path]:
    """The runs that `paths` name or hold, each once.

    Raises:
        InputError: a path is not there (unless `optional`), or holds no run.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if optional and not path.exists():
            continue
        inside = [path] if path.is_file() or _is_run(path) else sorted(filter(_is_run, path.glob("*")))
        if not inside:
            raise InputError(f"{path} holds no run; give a run directory, a merged folder, or a folder that holds such")
        found |= {run.resolve(): run for run in inside}
    return list(found.values())


def _is_run(path: Path) -> bool:
    return (path / "run.json").exists() or (path / "rows.parquet").exists()
