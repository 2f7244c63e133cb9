"""The table of faults names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
NODE = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
ROWS = [
    line
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| ---", "| Fault |"))
]


def test_the_table_is_found() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_each_row_names_tests_that_exist(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 4
    assert all(cells)
    named = NODE.findall(cells[3])
    assert named
    for file, function in named:
        (path,) = (ROOT / "tests").rglob(file)
        tree = ast.parse(path.read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{function}"
