"""A report as plain values, before it is HTML or Markdown: sections of paragraphs, lists, code, tables and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epcross.harness.analysis.figures.canvas import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """Words."""

    text: str
    kind: str = "paragraph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """Short sentences of one kind."""

    entries: Sequence[str]
    kind: str = "bullets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Commands to type."""

    text: str
    kind: str = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it is read, and the numbers behind it as they are computed with."""

    name: str  # of its CSV file
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    data: Sequence[Mapping[str, Any]] = ()  # what the CSV file holds; empty: head and rows
    numbers: bool = False  # columns after the first are aligned right
    kind: str = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its caption."""

    figure: Figure
    kind: str = "picture"


Block = Paragraph | Bullets | Code | Table | Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """The name that links to it."""
        return "-".join("".join(letter if letter.isalnum() else " " for letter in self.title.lower()).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    sections: Sequence[Section]

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all sections."""
        return [block for section in self.sections for block in section.blocks]

    @property
    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [block.figure for block in self.blocks if isinstance(block, Picture)]
