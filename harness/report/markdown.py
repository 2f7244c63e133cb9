"""A report as Markdown whose tables read as well in a terminal: no line is wider than `WIDTH` unless a word is."""

import textwrap
from collections.abc import Sequence

from epcross.harness.report.document import Block, Bullets, Code, Document, Paragraph, Picture, Table

WIDTH = 100

_NARROW = 12  # a column folds no further


def to_markdown(document: Document) -> str:
    """The document as Markdown; figures are links to `figures/<name>.svg`."""
    parts = [f"# {document.title}", _wrap(document.subtitle)]
    for section in document.sections:
        parts.append(f"## {section.title}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool) -> str:
    """A padded table. Where it is too wide, the text of its widest column goes on in further lines."""
    cells = [[_escape(cell) for cell in row] for row in (head, *rows)]
    least = [max(len(title), _NARROW) for title in cells[0]]  # a head of two lines would be no head in Markdown
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    while (excess := sum(widths) + 3 * len(head) + 1 - WIDTH) > 0:
        spare = [width - low for width, low in zip(widths, least, strict=True)]
        widest = max((column for column, room in enumerate(spare) if room > 0), key=widths.__getitem__, default=None)
        if widest is None:
            break
        rival = max((width for column, width in enumerate(widths) if column != widest and spare[column] > 0), default=0)
        widths[widest] -= min(excess, spare[widest], max(widths[widest] - rival, 1))
    lines = [_lines(cells[0], widths, numbers=numbers), _rule(widths, numbers=numbers)]
    return "\n".join([*lines, *(_lines(row, widths, numbers=numbers) for row in cells[1:])])


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return _wrap(block.text)
        case Bullets():
            return "\n".join(_item(item) for item in block.entries)
        case Code():
            return f"```\n{block.text}\n```"
        case Table():
            notes = "\n".join(_item(note) for note in block.notes)
            text = table(block.head, block.rows, numbers=block.numbers)
            return f"**{block.title}**\n\n{text}" + (f"\n\n{notes}" if notes else "")
        case Picture():
            figure = block.figure
            notes = "\n".join(_item(sentence) for sentence in figure.caption)
            return f"### {figure.title}\n\n![{figure.title}](figures/{figure.name}.svg)\n\n{notes}"


def _lines(row: Sequence[str], widths: Sequence[int], *, numbers: bool) -> str:
    folded = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)
    ]
    height = max(len(lines) for lines in folded)
    out = []
    for number in range(height):
        cells = [lines[number] if number < len(lines) else "" for lines in folded]
        padded = [
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        out.append(f"| {' | '.join(padded)} |")
    return "\n".join(out)


def _rule(widths: Sequence[int], *, numbers: bool) -> str:
    cells = ["-" * (width - 1) + (":" if numbers and column else "-") for column, width in enumerate(widths)]
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
