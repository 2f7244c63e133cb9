"""The column dictionary of results/README.md, made from `Record`, so that the page cannot say something else.

After a change of `Record`: `python -m epcross.harness.storing.record_docs results/README.md`.
"""

import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import get_args

from epcross.harness.record import Record

BEGIN = "<!-- columns: made from harness/record.py by harness/storing/record_docs.py -->"
END = "<!-- end of columns -->"

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false"}


def column_table() -> str:
    """A Markdown table of every column of a row: name, type, meaning."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in fields(Record):
        kinds = get_args(column.type) or (column.type,)
        words = ", or null".join([_WORDS[kind] for kind in kinds if kind is not NoneType] + [""] * (NoneType in kinds))
        lines.append(f"| `{column.name}` | {words} | {column.metadata['doc']} |")
    return "\n".join(lines)


def with_column_table(page: str) -> str:
    """`page` with the table between its two marks made anew.

    Raises:
        ValueError: the page lacks the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the marks {BEGIN!r} and {END!r} around its table")
    return f"{before}{BEGIN}\n{column_table()}\n{END}{after}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_column_table(path.read_text()))
