import csv
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import FIXED_US, TOKENS, make_run, model_us, points
from store_values import TIMING
from test_plots import drop_ok

from epcross.harness import cli
from epcross.harness.analysis import material
from epcross.harness.errors import ConfigError, StoreError
from epcross.harness.record import Record
from epcross.harness.report import content, page
from epcross.harness.report.again import command
from epcross.harness.report.document import Document
from epcross.harness.report.markdown import WIDTH, table, to_markdown
from epcross.harness.terms import Domain, Regime

STEADY = [Regime.STEADY]


def document_of(*runs: Path) -> Document:
    return content.document(material.load(list(runs)))


def csv_lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


class Page(HTMLParser):
    """What a page shows and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.fetched += [values[name] or "" for name in ("src", "href", "srcset", "data") if name in values]
        self.ids += [values["id"] or ""] if "id" in values else []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EP 2 with a failing point, EP 4 oversubscribed."""

    def change(row: Record) -> Record:
        if row.ep_size == 4:
            return replace(row, flags="oversubscribed within_launch")
        wrong = row.backend == "shm_two_sided" and row.tokens_per_rank == 64
        return replace(drop_ok(row), reason="rank 1 <did> not | answer") if wrong else row

    return make_run(tmp_path_factory.mktemp("runs"), points(ep_sizes=(2, 4)), change)


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert cli.run(["report", str(run), "--output", str(folder)]) == 0
    return folder


def test_the_page_needs_nothing_beside_it(written: Path):
    text = (written / "report.html").read_text()
    seen = Page(text)
    assert seen.tags.count("img") == len(list((written / "figures").glob("*.svg"))) == 9
    assert "script" not in seen.tags
    assert "link" not in seen.tags
    assert all(re.match("data:image/svg|#", target) for target in seen.fetched)
    assert {target[1:] for target in seen.fetched if target.startswith("#")} <= set(seen.ids)
    assert "url(" not in text
    assert len(seen.ids) == len(set(seen.ids))


def test_nothing_is_hidden(run: Path, written: Path):
    text = Page((written / "report.html").read_text()).text
    total, failed = 2 * 3 * 4 * 8 * (1 + 3), 8 * (1 + 3)  # sizes, backends, tokens, repeats; steady and three of entry
    assert f"{total} rows: {total - failed} ok, {failed} timeout" in text
    assert f"{total // 2} ok rows carry a flag that keeps them out of every headline" in text
    assert "rank 1 <did> not | answer" in text  # escaped in the source, whole for the reader
    (failure,) = csv_lines(written / "tables" / "failures.csv")
    assert (failure["backend"], failure["status"], failure["rows"]) == ("shm_two_sided", "timeout", str(failed))
    assert failure["reason"] == "rank 1 <did> not | answer"
    assert len(failure["points"].split()) == 2
    assert run.name in text


def test_every_format_holds_the_same_tables_and_figures(run: Path, written: Path):
    document = document_of(run)
    names = {table.name for table in document.tables}
    assert {path.stem for path in (written / "tables").iterdir()} == names
    assert names >= {"run", "statuses", "flags", "failures", "headline_ep2_steady", "headline_ep2_entry",
                     "flagged_ep4_steady", "flagged_ep4_entry", "crossovers", "fits", "floor"}  # fmt: skip
    assert len(document.tables) == len(names)
    figures = {f"{figure.name}.{kind}" for figure in document.figures for kind in ("svg", "pdf", "csv")}
    assert {path.name for path in (written / "figures").iterdir()} == figures
    text = (written / "report.md").read_text()
    assert all(f"**{table.title}**" in text for table in document.tables)
    assert all((written / target).is_file() for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text))
    assert (written / "figures" / "latency.pdf").read_bytes().startswith(b"%PDF")


def test_tables_hold_the_numbers(written: Path):
    lines = csv_lines(written / "tables" / "headline_ep2_steady.csv")
    assert len(lines) == 12
    for line in lines:
        if line["backend"] == "shm_two_sided" and line["tokens_per_rank"] == "64":
            assert (line["median_us"], line["statuses"], line["ok_rows"]) == ("", "timeout", "0")
            continue
        first = model_us(line["backend"], int(line["tokens_per_rank"]))
        assert float(line["median_us"]) == pytest.approx(first * 1.035)
        assert float(line["lowest_us"]) == pytest.approx(first)
        assert float(line["highest_us"]) == pytest.approx(first * 1.07)
        assert (line["launches"], line["seeds"], line["chains"], line["ok_rows"]) == ("2", "2", "2", "8")


def test_crossovers_and_costs_are_those_of_the_model(written: Path):
    lines = {(line["a"], line["b"], line["regime"]): line for line in csv_lines(written / "tables" / "crossovers.csv")}
    crossing = lines["SHM Fence", "SHM Sentinel", "steady"]
    assert (float(crossing["bracket_low"]), float(crossing["bracket_high"])) == (4, 16)
    assert float(crossing["estimate"]) == pytest.approx(6, rel=0.15)  # 10 + t = 4 + 2 t; log-log between 4 and 16
    fits = {(line["series"], line["regime"]): line for line in csv_lines(written / "tables" / "fits.csv")}
    assert len(fits) == 6
    for (backend, _), line in fits.items():
        assert float(line["fixed_us"]) == pytest.approx(1.035 * FIXED_US[backend], rel=0.01)


def test_markdown_fits_a_terminal(written: Path):
    lines = (written / "report.md").read_text().splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 50
    assert all(line.endswith("|") for line in tables)
    assert any("rank 1 <did> not \\| answer" in line for line in lines)


def test_a_wide_table_folds_its_widest_column_and_loses_nothing():
    words = [f"word{number}" for number in range(60)]
    text = table(["a", "long"], [["x", " ".join(words)], ["y", "short"]], numbers=False)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert re.findall(r"word\d+", text) == words
    assert text.splitlines()[1].replace("-", "").split() == ["|", "|", "|"]
    narrow = table(["tokens", "us"], [["1", "2.5"], ["512", "10"]], numbers=True)
    assert narrow == "| tokens |  us |\n| ------ | --: |\n| 1      | 2.5 |\n| 512    |  10 |"


def test_many_series_still_fit(tmp_path: Path):
    wide = [
        replace(point, options=(("slots", number),))
        for number in range(7)
        for point in points(["shm_fence"], STEADY, tokens=(1, 4))
    ]
    document = document_of(make_run(tmp_path, wide))
    heads = [table.head for table in document.tables if table.name.startswith("headline")]
    assert [len(head) for head in heads] == [4, 4, 2]
    assert max(map(len, to_markdown(document).splitlines())) <= WIDTH


def test_it_says_what_was_run_and_how_to_run_it_again(run: Path, written: Path):
    loaded = material.load([run])
    assert command(loaded.runs[0].plan) == "epcross run sweep=smoke routing=uniform"  # where it was stored is left out
    text = Page((written / "report.html").read_text()).text
    assert "epcross run sweep=smoke routing=uniform" in text
    facts = {line["what"]: line["value"] for line in csv_lines(written / "tables" / "run.csv")}
    assert facts["processor"] == "A CPU, unknown"
    assert facts["commit"] == "unknown: not run from a checkout"
    assert (facts["measuring code"], facts["machine hash"]) == ("cafe", "beef")


def test_a_run_without_ok_rows_has_a_page_that_says_so(tmp_path: Path):
    document = document_of(make_run(tmp_path, points(tokens=(1,)), drop_ok))
    text = to_markdown(document)
    assert document.figures == []
    assert "no row is ok, so there are no numbers and no figures" in text
    assert "No round trip is ok and without flags, so there is no headline number." in text
    assert "rank 1 did not answer" in text


def test_a_run_without_rows_has_a_page_that_says_so(tmp_path: Path):
    text = to_markdown(document_of(make_run(tmp_path, units=False, floor=False)))
    assert "0 rows: none is stored" in text
    assert "planned rows are missing" in text
    assert "No floor was measured" in text


def test_damaged_and_missing_units_are_named(tmp_path: Path):
    run = make_run(tmp_path, points(["shm_fence"], STEADY))
    cut, gone = sorted((run / "units").glob("*.json"))[:2]
    cut.write_bytes(cut.read_bytes()[:-20])
    gone.unlink()
    text = to_markdown(document_of(run))
    assert cut.name in text
    assert "8 planned rows are missing" in text
    assert "epcross run --resume" in text


def test_two_runs_on_one_page(tmp_path: Path):
    runs = [make_run(tmp_path, points(tokens=(1, 4, 16))) for _ in range(2)]
    document = document_of(*runs)
    names = {table.name for table in document.tables}
    assert names >= {"run_a", "run_b", "headline_ep2_steady_runA", "headline_ep2_steady_runB"}
    text = to_markdown(document)
    assert all(run.name in text for run in runs)
    assert max(map(len, text.splitlines())) <= WIDTH


def to_nvlink(row: Record) -> Record:
    return replace(row, domain="nvlink")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: [path / "nowhere"], StoreError, "is not a run directory"),
        (lambda path: [make_run(path, units=False)] * 2, ConfigError, "is given 2 times"),
        (
            lambda path: [make_run(path, units=False),
                          make_run(path, [replace(p, domain=Domain.NVLINK) for p in points()], units=False)],
            ConfigError, "rows of different domains do not go on one page",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(
    tmp_path: Path, make: Callable[[Path], list[Path]], error: type[Exception], words: str,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    paths = make(tmp_path)
    with pytest.raises(error, match=words):
        material.load(paths)
    assert cli.run(["report", *map(str, paths)]) != 0
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_older_report_is_replaced_and_other_folders_are_left_alone(tmp_path: Path):
    document = document_of(make_run(tmp_path / "runs", points(["shm_fence"], STEADY, tokens=(1,)), floor=False))
    folder = tmp_path / "report"
    page.write(document, folder)
    (folder / "figures" / "old.svg").write_text("")
    first = (folder / "report.html").read_bytes()
    assert page.write(document, folder).read_bytes() == first  # the same rows give the same page
    assert not (folder / "figures" / "old.svg").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="is not empty and holds no report"):
        page.write(document, other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="--output"):
        page.write(document, file)


def test_bytes_on_the_links_stand_beside_what_had_to_cross_them(tmp_path: Path):
    """Two ranks, 2 remote pairs a token; rows of 64 bf16 values, 128 bytes each way."""

    def counted(row: Record) -> Record:
        wire = 2 * row.tokens_per_rank * (row.padded_bytes + row.combine_row_bytes)
        sides = {"nvlink_tx_bytes": wire, "nvlink_rx_bytes": wire}
        known = {**sides, "nvlink_pairs": 1000, "nvlink_wire_bytes": float(wire)}
        match row.tokens_per_rank:
            case 4:
                known = {**known, "nvlink_tx_bytes": 2 * wire, "nvlink_note": "about every row to every rank"}
            case 64:
                known = {"nvlink_note": "rank 1: NVML counts no link of this GPU"}
        return replace(row, **known)

    run = make_run(tmp_path, points(["shm_fence"], STEADY), counted)
    page_text = to_markdown(document_of(run))
    words = " ".join(page_text.split())
    assert "## Bytes on the links" in page_text
    units = len(TOKENS) * TIMING.launches
    agree, said = 2 * TIMING.launches, 3 * TIMING.launches
    assert f"within 3% in {agree} of {said} counted units; in {units - said} more nothing was counted" in words
    assert "about every row to every rank" in words
    assert re.search(r"\| +2\.000 ", words)
    assert "Bytes on the links" not in to_markdown(document_of(make_run(tmp_path / "other")))


def test_older_counts_that_rounding_leaves_open_are_not_judged(tmp_path: Path):
    """2 remote pairs a token, as a mean that was rounded: up to 1.5 % off at 16 tokens, and 0.4 % at 64."""

    def counted(row: Record) -> Record:
        wire = 2 * row.tokens_per_rank * (row.padded_bytes + row.combine_row_bytes)
        return replace(row, nvlink_tx_bytes=wire, nvlink_rx_bytes=wire, nvlink_pairs=1000)

    words = " ".join(to_markdown(document_of(make_run(tmp_path, points(["shm_fence"], STEADY), counted))).split())
    judged, rest = TIMING.launches, 3 * TIMING.launches
    assert f"within 3% in {judged} of {judged} counted units; {rest} more cannot be told" in words
    assert words.count("| 1.000 |") == judged
