"""A report as one HTML page that needs nothing beside it, and the folder with everything else it is made of."""

import base64
import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import epcross
from epcross.harness.analysis.figures import canvas
from epcross.harness.errors import StoreError
from epcross.harness.report.document import Document, Table
from epcross.harness.report.markdown import to_markdown

PAGE = "report.html"
MARKDOWN = "report.md"
_OURS = {"tables": ("*.csv",), "figures": ("*.svg", "*.pdf", "*.csv")}


def to_html(document: Document, drawings: Mapping[str, bytes]) -> str:
    """The document as HTML. `drawings` holds the SVG of each figure by name; they go into the page as data."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("epcross.harness.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sources = {name: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}" for name, svg in drawings.items()}
    template = environment.get_template("page.html.j2")
    return template.render(document=document, sources=sources, version=epcross.__version__)


def write(document: Document, folder: Path) -> Path:
    """Write page, Markdown, tables and figures of `document` to `folder`; the path of the page.

    A report that is there already is replaced; a folder with anything else in it is left alone.

    Raises:
        StoreError: the folder holds something else, or cannot be written.
    """
    drawings = {figure.name: canvas.svg(figure) for figure in document.figures}
    files = {
        PAGE: to_html(document, drawings).encode(),
        MARKDOWN: to_markdown(document).encode(),
        **{f"tables/{table.name}.csv": _table_csv(table) for table in document.tables},
        **{f"figures/{name}.svg": svg for name, svg in drawings.items()},
        **{f"figures/{figure.name}.pdf": canvas.pdf(figure) for figure in document.figures},
        **{f"figures/{figure.name}.csv": _csv(figure.data) for figure in document.figures},
    }
    try:
        _clear(folder)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise StoreError(
            f"the report could not be written to {folder}: {error.strerror}. Choose another folder with --output"
        ) from error
    return folder / PAGE


def report_files(folder: Path) -> list[Path]:
    """The files of the report in `folder`, without whatever else lies there."""
    places = [(folder, (PAGE, MARKDOWN)), *((folder / name, patterns) for name, patterns in _OURS.items())]
    return sorted(path for place, patterns in places for pattern in patterns for path in place.glob(pattern))


def _clear(folder: Path) -> None:
    """Remove the files of an earlier report, so that none of its figures or tables stays beside the new ones."""
    if not folder.exists():
        return
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PAGE).is_file():
        raise StoreError(f"{folder} is not empty and holds no report; choose another folder with --output")
    for name, patterns in _OURS.items():
        for pattern in patterns:
            for path in (folder / name).glob(pattern):
                path.unlink()


def _table_csv(table: Table) -> bytes:
    return _csv(table.data or [dict(zip(table.head, row, strict=True)) for row in table.rows])


def _csv(lines: Iterable[Mapping[str, Any]]) -> bytes:
    lines = list(lines)
    names = list(dict.fromkeys(name for line in lines for name in line))
    sink = io.StringIO()
    writer = csv.DictWriter(sink, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return sink.getvalue().encode()
