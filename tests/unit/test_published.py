"""Published values: each arrives as it was entered, agrees with the numbers beside it, and joins the tidy frame."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_values import point, record, write

from epcross.harness.analysis import frame
from epcross.harness.claims import published, sources
from epcross.harness.claims.values import COLUMNS, Metric, read_values
from epcross.harness.errors import ConfigError, InputError

HEADER = ",".join(COLUMNS)
GOOD = "mine,dispatch,H200,8,16,7168,8,256,bf16,bf16,latency_us,12.5,,"


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return published.load([sources.SHIPPED])


def source(folder: Path, *lines: str, name: str = "mine", header: str = HEADER) -> Path:
    """A folder of sources with one in it."""
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "source.yaml").write_text(
        "title: A paper\nhardware: H200\nbyte_convention: balanced_pairs\nrank_reduction: not stated\n"
    )
    (home / "table.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def cells(rows: pd.DataFrame, name: str, metric: Metric, *keys: str) -> pd.Series:
    own = rows[(rows["source"] == name) & (rows["metric"] == metric)]
    return own.set_index(list(keys))[{Metric.LATENCY: "latency_us"}.get(metric, f"stated_{metric.split('_')[-1]}")]


def test_every_value_is_there(rows: pd.DataFrame) -> None:
    counts = rows["source"].value_counts()
    assert len(rows) == 2061
    assert rows.attrs["sources"] == sources.sources([sources.SHIPPED])
    assert len(rows.attrs["sources"]) == 42
    assert rows.query("ep_size == 8").attrs["sources"] is rows.attrs["sources"]  # shared, not copied at every step
    some = {
        "aiconfigurator_trtllm_a2a": 698,
        "trtllm_blog18": 154,
        "deepep_hybrid_ep": 117,
        "article_on_2611_13188": 10,
    }
    assert counts[list(some)].to_dict() == some
    assert rows["metric"].value_counts().to_dict() == {"latency_us": 1619, "bandwidth_gbps": 411, "speedup": 31}
    assert rows["point_id"].is_unique
    numbers = rows[["latency_us", "stated_gbps", "stated_speedup"]]
    assert (numbers.notna().sum(axis=1) == 1).all()
    assert (numbers.min() > 0).all()


def test_bandwidths_of_the_trtllm_post_follow_from_its_latencies(rows: pd.DataFrame) -> None:
    """tokens x min(EP, 8) x bytes of a row / latency, in every cell of its four tables."""
    own = rows[rows["source"] == "trtllm_blog18"]
    keys = ["phase", "hardware", "ep_size", "tokens_per_rank", "dispatch_format"]
    latencies = own[own["recomputed_gbps"].notna()]
    both = latencies.merge(own[own["stated_gbps"].notna()], on=keys, suffixes=("", "_stated"), validate="one_to_one")
    assert len(both) == len(latencies) == 75
    assert ((both["recomputed_gbps"] / both["stated_gbps_stated"] - 1).abs() < 0.01).all()
    # by hand: 2048 tokens x 8 ranks x 14336 bytes in 311.8 us
    head = latencies.query(
        "tokens_per_rank == 2048 and ep_size == 8 and phase == 'dispatch' and hardware == 'GB200 NVL72'"
    )
    assert head["recomputed_gbps"].item() == pytest.approx(2048 * 8 * 14336 / 311.8e-6 / 1e9)


def test_the_post_quant_table_of_the_trtllm_post_agrees_with_itself_and_the_others(rows: pd.DataFrame) -> None:
    quant = rows[(rows["source"] == "trtllm_blog18") & rows["note"].str.startswith("post-quant")]
    times = quant.dropna(subset="latency_us").set_index("dispatch_format")["latency_us"]
    factors = quant.dropna(subset="stated_speedup").set_index("dispatch_format")["stated_speedup"]
    assert sorted(factors.index) == ["bf16", "mxfp8", "nvfp4"]
    for name, factor in factors.items():
        assert times["bf16"] / times[name] == pytest.approx(factor, rel=0.005)
    table = rows.query(
        "source == 'trtllm_blog18' and hardware == 'GB200 NVL72' and ep_size == 8 and tokens_per_rank == 2048"
        " and phase == 'dispatch' and metric == 'latency_us'"
    )
    assert table["latency_us"].item() == times["bf16"]


def test_low_latency_bandwidths_of_deepep_follow_from_its_latencies(rows: pd.DataFrame) -> None:
    """128 tokens x 8 selections: FP8 with an fp32 scale per 128 values and 16 bytes of header, BF16 back."""
    keys = ["backend", "phase", "ep_size"]
    times = cells(rows, "deepep_legacy_v1", Metric.LATENCY, *keys)
    rates = cells(rows, "deepep_legacy_v1", Metric.BANDWIDTH, *keys).loc[times.index]
    sent_bytes = {"dispatch": 7168 + 7168 // 128 * 4 + 16, "combine": 7168 * 2}
    expected = np.array([128 * 8 * sent_bytes[phase] / time_us / 1e3 for (_, phase, _), time_us in times.items()])
    assert len(times) == 12
    assert np.abs(rates / expected - 1).max() < 0.04


@pytest.mark.parametrize(
    ("name", "keys", "tolerance"),
    [
        ("deepep_pr173", ["phase", "ep_size"], 0.02),
        ("deepep_pr605_comment", ["phase"], 0.01),
        ("deepep_issue394", [], 0.01),
        ("tilescale_pr40", ["phase"], 0.01),
    ],
)
def test_latency_times_bandwidth_is_one_number_of_bytes(
    rows: pd.DataFrame, name: str, keys: list[str], tolerance: float
) -> None:
    own = rows[rows["source"] == name]
    line = own["note"].str.split(";").str[0].str.extract(r"^(before|after|rank \d|)")[0]  # what a pair of cells shares
    cell = ["phase", "ep_size", "backend", line.rename("line")]
    times, rates = (
        own.dropna(subset=column).groupby(cell, observed=True, dropna=False)[column].first()
        for column in ("latency_us", "stated_gbps")
    )
    moved_bytes = (times * rates).rename("bytes").reset_index()
    assert len(moved_bytes) >= 2
    assert moved_bytes["bytes"].notna().all()
    groups = moved_bytes.groupby(keys, observed=True) if keys else [((), moved_bytes)]
    for _, group in groups:
        assert len(group) > 1
        assert group["bytes"].max() / group["bytes"].min() < 1 + tolerance


def test_numbers_quoted_from_the_preprint_are_those_of_the_rows(rows: pd.DataFrame) -> None:
    quoted = published.quoted([sources.SHIPPED])
    assert quoted["source"].value_counts().to_dict() == {"article_on_2611_13188": 38, "abstract_2611_13188": 6}
    for name, unit, column in (
        ("article_on_2611_13188", "us", "latency_us"),
        ("abstract_2611_13188", "x", "stated_speedup"),
    ):
        said = quoted[(quoted["source"] == name) & (quoted["unit"] == unit) & (quoted["about"] == "NVLinkOneSided")]
        said = said[~said["quantity"].str.startswith("wire time")]  # follows from bytes: claim P11
        kept = rows.loc[rows["source"] == name, column]
        assert sorted(said["value"].astype(float)) == sorted(kept)


def test_nominal_bandwidths_are_told_from_measured_ones(rows: pd.DataFrame) -> None:
    links = rows[rows["phase"] == "link"].dropna(subset="stated_gbps")
    assert links["ep_size"].isna().all()
    assert set(links.loc[links["backend"] == "hw_nvlink5", "stated_gbps"]) == {900.0}


def test_rows_have_the_columns_of_measured_ones(tmp_path: Path, rows: pd.DataFrame) -> None:
    measured = frame.load(write(tmp_path / "run", [record(point("shm_fence", 8))]))
    assert set(measured.columns) <= set(rows.columns)
    assert set(rows.columns) - set(measured.columns) == set(published.ADDED)
    assert set(rows["domain"]) == {"published"}
    kept, note, left_out = frame.headline(rows)
    assert (len(kept), note, left_out) == (len(rows), "", {})
    both = published.beside(measured, rows)
    assert len(both) == len(rows) + 1
    assert both.groupby([*frame.SERIES], observed=True, dropna=False).size().sum() == len(both)
    assert both["domain"].cat.ordered
    assert both["phase"].cat.categories[0] == "stage"
    assert both.loc[0, "latency_us"] == 10.0
    with pytest.raises(InputError, match="cpu, published are not comparable"):
        frame.require_one_domain(both)


def test_the_added_columns_are_in_the_dictionary() -> None:
    page = (Path(__file__).parents[2] / "results" / "README.md").read_text().split("## Published values")[1]
    assert re.findall(r"^\| `(\w+)` \|", page.split("## Columns of a row")[0], re.MULTILINE) == list(published.ADDED)


def test_what_is_not_stated_is_missing_and_no_number(rows: pd.DataFrame) -> None:
    paper = rows[rows["source"] == "abstract_2611_13188"]
    for name in ("ep_size", "tokens_per_rank", "hidden", "latency_us"):
        assert paper[name].isna().all()
    assert set(paper["dispatch_format"]) == {frame.NOT_REPORTED}
    assert set(rows["regime"]) == {frame.NOT_REPORTED}


def test_only_one_source(rows: pd.DataFrame) -> None:
    own = published.load([sources.SHIPPED], sources=["trtllm_blog18"])
    assert set(own["source"]) == {"trtllm_blog18"}
    assert len(own) == 154
    with pytest.raises(InputError, match="did you mean 'trtllm_blog18'"):
        published.load([sources.SHIPPED], sources=["trtllm_blog"])


def test_every_source_says_what_it_leaves_open() -> None:
    for source_ in sources.sources([sources.SHIPPED]).values():
        assert source_.title
        assert source_.access, source_.name
        assert source_.url.startswith("https://") or source_.name == "article_on_2611_13188"
        assert (source_.byte_convention in ("not stated", "link")) or source_.byte_note, source_.name


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    found = published.load([source(tmp_path, GOOD, "mine,link,H200,,,,,,,,bandwidth_gbps,450,,nominal")])
    assert found["latency_us"].tolist()[0] == 12.5
    assert found["recomputed_gbps"].tolist()[0] == pytest.approx(16 * 8 * 14336 / 12.5e3)
    assert found["point_id"].tolist() == ["mine:table.csv:2", "mine:table.csv:3"]


def test_columns_that_no_row_needs_may_be_left_out(tmp_path: Path) -> None:
    path = source(tmp_path, "latency_us,7,mine", header="metric,value,system") / "mine" / "table.csv"
    ((value, line),) = read_values(path).items()
    assert (value.system, value.value, value.ep_size, line) == ("mine", 7.0, None, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD.replace("12.5", "nan"), "line 2: value is 'nan', but must be a positive number"),
        (GOOD.replace("12.5", "-1"), "value is '-1'"),
        (GOOD.replace("12.5", "1e999"), "value is '1e999'"),
        (GOOD.replace("12.5", "1_2.5"), "value is '1_2.5'"),
        (GOOD.replace("12.5", "\u0661\u0662"), "value is '\u0661\u0662'"),
        (GOOD.replace(",8,16,", ",8,1.5,"), "tokens_per_rank is '1.5', but must be a positive whole number or empty"),
        (GOOD.replace(",8,16,", ",0,16,"), "ep_size is '0'"),
        (GOOD.replace("latency_us", "latency_ms"), "metric is 'latency_ms'; did you mean 'latency_us'"),
        (GOOD.replace("dispatch", "dispath"), "phase is 'dispath'; did you mean 'dispatch'"),
        (GOOD.replace("bf16,bf16", "bf17,bf16"), "dispatch_dtype is 'bf17'"),
        (GOOD.removeprefix("mine"), "system is empty"),
        (GOOD + "\x1b[31m", "a cell has control characters"),
        (GOOD + "\u202e1.2", "a cell has control characters"),
        (GOOD + "one\u2028two", "a cell has control characters"),
        (GOOD + ",more", "line 2 has 15 cells; the header has 14"),
        ('mine,"', "cannot be read as CSV"),
        ("", "has no line besides its header"),
        (GOOD + "\n" + GOOD, "line 3: the same as line 2; a measurement stands once"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"table\.csv") as caught:
        published.load([source(tmp_path, line)])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("system,value", "lacks metric"),
        ("system,value,metric,speed", "has speed"),
        ("system,value,metric,value", "has value, value"),
        ("", "lacks system, metric, value"),
    ],
)
def test_a_header_that_cannot_be_used_is_named(tmp_path: Path, header: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        published.load([source(tmp_path, "a", header=header)])
    assert words in str(caught.value)


def test_all_wrong_lines_are_named_at_once_and_many_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        published.load([source(tmp_path, *[GOOD.replace("12.5", f"-{n}") for n in range(1, 31)])])
    assert "line 2:" in str(caught.value)
    assert "line 13:" in str(caught.value)
    assert len(caught.value.problems) == 12


def test_a_measurement_in_two_tables_of_a_source_is_refused(tmp_path: Path) -> None:
    folder = source(tmp_path, GOOD)
    (folder / "mine" / "again.csv").write_text(f"{HEADER}\n{GOOD}\n")
    with pytest.raises(ConfigError, match=r"table\.csv line 2: stands in again\.csv:2 already"):
        published.load([folder])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title: x\n", "hardware is missing"),
        ("title: [x]\nhardware: y\nrank_reduction: z\nbyte_convention: pair\n", "did you mean 'pairs'"),
        ("title: x\ntitle: y\n", "the key 'title' stands twice"),
        ("title: &a x\nurl: *a\n", "aliases"),
        ("title: !!python/object/apply:os.getcwd []\n", "is no YAML that can be used"),
        ("- a\n", "holds list, but must be a mapping"),
        ("", "is empty, but must be a mapping"),
        ('title: "\\e[31m"', "has control characters in a text"),
        ('title: "\\ud800"', "has control characters in a text"),
        ('title: "\\u202e"', "has control characters in a text"),
        ("title: 2026-13-99x: y: z", "is no YAML"),
        ("title: 2026-99-99", "is no YAML"),
        ("{" * 5000, "is no YAML"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(tmp_path: Path, text: str, words: str) -> None:
    folder = source(tmp_path, GOOD)
    (folder / "mine" / "source.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"source\.yaml") as caught:
        published.load([folder])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_the_same_source_in_two_folders_counts_once(tmp_path: Path) -> None:
    """As of an installed epcross that is used in a checkout."""
    folders = [source(tmp_path / "a", GOOD), source(tmp_path / "b", GOOD)]
    assert len(published.load(folders)) == 1
    (folders[1] / "mine" / "table.csv").write_text(f"{HEADER}\n{GOOD.replace('12.5', '12.6')}\n")
    with pytest.raises(ConfigError, match="source 'mine' exists twice"):
        published.load(folders)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(InputError, match="no folder /nowhere"):
        sources.reference_folders([Path("/nowhere")])
