"""docs/questions.md: every published number stands in the file it links to, and every formula gives what it says."""

import ast
import csv
import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "questions.md").read_text()
SOURCED = re.compile(r"\[([^\]]+)\]\(\.\./(results/reference/\w+/(?:quoted|published)\.csv)\)")
FORMULA = re.compile(r"`([^`=]+) = ([\d.]+)`")
METRICS = {"us": "latency_us", "GB/s": "bandwidth_gbps", "x": "speedup"}
"""Unit in the text -> metric of a published row."""

WORDS = {"all-to-alls": "count"}
"""Unit in the text -> unit of a quoted row, where they differ."""

MEASURED = re.compile(r"(?<![\w.])\d[\d.]*\s*(?:us|ms|GB/s|GB|MB|percent|%|x|times)\b")
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def value(node: ast.AST) -> float:
    """Of a formula of numbers."""
    if isinstance(node, ast.Expression):
        return value(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    return OPERATORS[type(node.op)](value(node.left), value(node.right))


def stated(file: Path, number: float, unit: str) -> bool:
    """Whether a row of a source's file has this value in this unit."""
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    if file.name == "published.csv":
        return any(float(row["value"]) == number and row["metric"] == METRICS.get(unit) for row in rows)
    wanted = WORDS.get(unit, unit)
    values = [(row["value"], row["unit"]) for row in rows]
    return any(
        row_unit == wanted and re.fullmatch(r"[\d.]+", text) is not None and float(text) == number
        for text, row_unit in values
    )


SOURCED_NUMBERS = sorted(set(SOURCED.findall(PAGE)))


def test_the_page_has_sources() -> None:
    assert len(SOURCED_NUMBERS) > 30
    assert len({file for _, file in SOURCED_NUMBERS}) >= 5


@pytest.mark.parametrize(("text", "file"), SOURCED_NUMBERS)
def test_a_published_number_stands_in_its_source(text: str, file: str) -> None:
    number, _, unit = text.partition(" ")
    assert stated(ROOT / file, float(number), unit), f"{file} has no {text}"


def test_a_number_that_no_source_states_is_found() -> None:
    file = ROOT / "results" / "reference" / "trtllm_blog18" / "published.csv"
    assert stated(file, 18.9, "us")
    assert not stated(file, 18.95, "us")
    assert not stated(file, 18.9, "GB/s")


@pytest.mark.parametrize(("formula", "result"), FORMULA.findall(PAGE))
def test_a_formula_gives_its_result(formula: str, result: str) -> None:
    digits = len(result.partition(".")[2])
    assert f"{value(ast.parse(formula, mode='eval')):.{digits}f}" == result


def test_no_other_figure_is_stated() -> None:
    prose = re.sub(r"<!-- evidence: .*?<!-- /evidence -->", "", PAGE, flags=re.DOTALL)
    known = {text for text, _ in SOURCED_NUMBERS} | {f"{result} us" for _, result in FORMULA.findall(PAGE)}
    prose = re.sub(r"`[^`]*`", "", SOURCED.sub("", prose))
    assert [figure for figure in MEASURED.findall(prose) if figure not in known] == []
    assert MEASURED.findall("it takes 3.5 us and 20 %") != []


def test_every_answer_rests_on_something() -> None:
    for section in PAGE.split("\n## ")[1:]:
        title = section.splitlines()[0]
        assert SOURCED.search(section) or "<!-- evidence:" in section, f"{title} has neither a source nor rows"
