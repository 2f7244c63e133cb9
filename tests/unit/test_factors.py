"""Lists of points show what tells these apart: every factor that varies, and no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run, points

from epcross.harness.analysis import frame, material
from epcross.harness.analysis.compare import compare
from epcross.harness.analysis.factors import telling
from epcross.harness.record import Record
from epcross.harness.report import content
from epcross.harness.report.document import Document
from epcross.harness.terms import Regime, RowFormat

POINT: dict[str, Any] = {
    "backend": "a", "ep_size": 2, "tokens_per_rank": 8, "model": "m", "hidden": 64, "options": '{"x": 1}',
    "dispatch_format": "bf16", "weight_format": None, "tokens_min": 8, "routing": "uniform", "regime": "steady",
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ["", ""]),
        ({"dispatch_format": "fp8"}, ["bf16 out", "fp8 out"]),
        ({"weight_format": "fp4"}, ["", "fp4 weights"]),
        ({"model": "n", "hidden": 128}, ["model=m", "model=n"]),
        ({"hidden": 128}, ["hidden=64", "hidden=128"]),
        ({"options": '{"x": 2, "y": 3}'}, ["x=1", "x=2, y=3"]),
        ({"options": '{"x": 2}', "backend": "b"}, ["", ""]),  # of its own, and the backend is told
        ({"tokens_min": 3, "tokens_per_rank": 4}, ["", ""]),
        ({"tokens_min": 3}, ["tokens_min=8", "tokens_min=3"]),
        ({"routing": "zipf", "dispatch_format": "fp8"}, ["routing=uniform, bf16 out", "routing=zipf, fp8 out"]),
    ],
)
def test_what_varies_is_told_and_nothing_else(other: dict[str, Any], words: list[str]) -> None:
    assert telling([POINT, {**POINT, **other}]) == words


def test_more_factors_come_first() -> None:
    two = [POINT, {**POINT, "regime": "entry", "dispatch_format": "fp8"}]
    assert telling(two, ("regime",)) == ["regime=steady, bf16 out", "regime=entry, fp8 out"]
    assert telling([]) == []


def both_formats(folder: Path, backends: tuple[str, ...] = ("shm_fence", "shm_sentinel")) -> Path:
    """A run of bf16 and of fp8 in steady state, whose pairs were counted on links."""
    plain = points(backends, (Regime.STEADY,), tokens=(1, 4))

    def counted(row: Record) -> Record:
        return replace(row, nvlink_tx_bytes=100, nvlink_rx_bytes=100, nvlink_pairs=1, nvlink_wire_bytes=100.0)

    return make_run(folder, [replace(p, dispatch_format=own) for own in RowFormat for p in plain], counted)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return both_formats(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def document(run: Path) -> Document:
    return content.document(material.load([run]))


def test_compare_tells_formats_apart(run: Path) -> None:
    rows = frame.load(run)
    compared = compare(rows, rows)
    seen = compared[compared["phase"] == "round_trip"]
    assert set(seen["factors"]) == {f"{each} out" for each in RowFormat}
    assert not seen.duplicated(["backend", "regime", "ep_size", "tokens_per_rank", "factors"]).any()
    alone = rows[rows["dispatch_format"] == "bf16"]
    assert set(compare(alone, alone)["factors"]) == {""}


def test_every_line_of_the_links_differs_from_the_others(document: Document) -> None:
    (table,) = [table for table in document.tables if table.name == "links"]
    assert list(table.head[:5]) == ["backend", "varied", "EP", "tokens", "launch"]
    assert len({tuple(row[:5]) for row in table.rows}) == len(table.rows) == 2 * 2 * 2 * len(RowFormat)
    assert {row[1] for row in table.rows} == {f"{each} out" for each in RowFormat}


def test_tables_and_files_of_a_report_tell_formats_apart(document: Document) -> None:
    titles = [table.title for table in document.tables if table.name.startswith("headline")]
    assert sorted(titles) == sorted(f"EP 2, {each} out, steady: round trip in us" for each in RowFormat)
    for name in ("headline", "crossovers", "fits"):
        files = [table.data for table in document.tables if table.name.startswith(name)]
        assert len({line["setting"] for data in files for line in data}) == len(files) == len(RowFormat)
        assert all("out, bf16 back" in str(line["setting"]) for data in files for line in data)
    wheres = {row[0] for table in document.tables if table.name.startswith("crossovers") for row in table.rows}
    assert wheres == {f"EP 2, {each} out, steady" for each in RowFormat}
    for figure in document.figures:
        assert all(line["setting"] for line in figure.data)


def test_one_setting_needs_no_words(tmp_path: Path) -> None:
    one = content.document(material.load([make_run(tmp_path, points(regimes=(Regime.STEADY,), tokens=(1, 4)))]))
    assert {table.title for table in one.tables if table.name.startswith("headline")} == {
        "EP 2, steady: round trip in us"
    }
