from dataclasses import fields
from pathlib import Path

import pytest

from epcross.harness.record import COLUMNS, Record
from epcross.harness.storing.parquet import SAMPLES_SCHEMA
from epcross.harness.storing.record_docs import column_table, with_column_table

PAGE = Path(__file__).parents[2] / "results" / "README.md"


def test_the_dictionary_is_that_of_the_code():
    page = PAGE.read_text()
    assert page == with_column_table(page), (
        "make it anew with `python -m epcross.harness.storing.record_docs results/README.md`"
    )


def test_every_column_has_its_line():
    lines = column_table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == list(COLUMNS)
    for line, column in zip(lines, fields(Record), strict=True):
        assert line.endswith(f"| {column.metadata['doc']} |")
    assert "| `repeat` | integer | Number of this (launch, seed, chain). |" in lines
    assert any(line.startswith("| `latency_us` | number, or null | ") for line in lines)


def test_the_columns_of_a_sample_are_those_of_the_code():
    section = PAGE.read_text().split("## Columns of a sample")[1]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == SAMPLES_SCHEMA.names


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="needs the marks"):
        with_column_table("# Results")
