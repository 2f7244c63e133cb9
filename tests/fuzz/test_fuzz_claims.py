"""Damaged claims, sources and tables: verdicts, or an error that says what is wrong."""

import random
from pathlib import Path

import pandas as pd
import pytest
import yaml
from _mutate import SECONDS, altered, damaged, fuzz

from epcross.harness.claims import published, sources
from epcross.harness.claims.book import SHIPPED_CLAIMS, read_book
from epcross.harness.claims.claims_table import as_json, claim_page, claims_table
from epcross.harness.claims.judge import judge
from epcross.harness.claims.values import COLUMNS
from epcross.harness.errors import ConfigError

YAML_WORDS = [
    b"&a ", b"*a", b"<<: *a", b"!!python/object/apply:os.getcwd []", b"!!binary x", b"? ", b": ", b"- ", b"{", b"}",
    b"[", b"]", b"|\n", b"off", b"2001-99-01", b"0x1f", b"~", b"---\n", b".nan", b"-.inf", b"lower:", b"upper: 1e999\n",
    b"where: {ep_size: {from: 9, to: 1}}\n", b"open: {}\n", b"quantity: share\n", b"kind: count\n", b"3: 4\n", b"=",
]  # fmt: skip
CSV_WORDS = [
    b",",
    b",,",
    b'"',
    b'""',
    b"\r",
    b"\n\n",
    b"nan",
    b"inf",
    b"1_000",
    b"0x10",
    b"latency_us",
    b"layer",
    b"\xe2\x80\x89",
]

SOURCE = (
    b"title: A paper\nhardware: H200\nbyte_convention: balanced_pairs\nrank_reduction: mean\nnot_stated: [routing]\n"
)
TABLE = (
    ",".join(COLUMNS) + "\nmine,dispatch,H200,8,16,7168,8,256,bf16,bf16,latency_us,12.5,,\n"
    "mine,dispatch,H200,8,16,7168,8,256,bf16,bf16,bandwidth_gbps,146.8,,stated beside it\n"
    "mine,layer,H200,8,128,7168,8,256,fp8,bf16,speedup,1.9,another,\n"
).encode()
PAGE = SHIPPED_CLAIMS.read_bytes()
SHORT = yaml.safe_dump(
    {name: part if name != "claims" else part[:3] + part[9:12] for name, part in yaml.safe_load(PAGE).items()}
).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "sources" / "mine"
    home.mkdir(parents=True)
    (home / "source.yaml").write_bytes(SOURCE)
    (home / "table.csv").write_bytes(TABLE)
    return tmp_path / "sources"


def none(values: pd.DataFrame) -> pd.DataFrame:
    return values.iloc[:0].assign(product="")


@pytest.mark.parametrize("name", ["source.yaml", "table.csv"])
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_damaged_source(folder: Path, name: str, seconds: float) -> None:
    path = folder / "mine" / name
    good = path.read_bytes()
    assert len(published.load([folder])) == 3

    def case(drawn: random.Random) -> None:
        path.write_bytes(damaged(good, drawn, YAML_WORDS if name == "source.yaml" else CSV_WORDS))
        values = published.load([folder])
        assert len(values) > 0
        assert (values[["latency_us", "stated_gbps", "stated_speedup"]].max(axis=1) > 0).all()

    assert fuzz(seconds, case, (ConfigError,)) > 5


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_damaged_page_of_claims(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "claims.yaml"
    places = [sources.SHIPPED]
    values = published.load(places, sources=["trtllm_blog18", "aiconfigurator_systems", "mlperf_h200_json"])

    def case(drawn: random.Random) -> None:
        if drawn.random() < 0.5:
            path.write_bytes(damaged(SHORT, drawn, YAML_WORDS))
        else:
            path.write_text(yaml.safe_dump(altered(yaml.safe_load(SHORT), drawn), allow_unicode=True))
        judgements = judge(read_book(places, shipped=path), none(values), values)
        as_json(judgements)
        claims_table(judgements, "")
        for one in judgements:
            claim_page(one)

    assert fuzz(seconds, case, (ConfigError,)) > 5


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\nb: &b [*a, *a]\n",
        "claims: " + "[" * 3000,
        "claims: " + "- " * 3000 + "x",
        "? [a, b]\n: c\n",
        "claims: !!set {a, b}",
        "claims: 0o9",
        "\x00",
        "%YAML 3.0\n---\nclaims: []",
        "claims: []\n---\nclaims: []",
        "",
    ],
)
def test_documents_that_ask_for_trouble(tmp_path: Path, text: str) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_book([sources.SHIPPED], shipped=tmp_path / "claims.yaml")
    assert len(str(caught.value)) < 3000


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_bytes(b"#" * 9_000_000)
    with pytest.raises(ConfigError, match="larger than 8 MB"):
        read_book([sources.SHIPPED], shipped=tmp_path / "claims.yaml")
    with pytest.raises(ConfigError, match="is no file"):
        read_book([sources.SHIPPED], shipped=tmp_path)
    (tmp_path / "claims.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no UTF-8 text: byte 0 is 0xff"):
        read_book([sources.SHIPPED], shipped=tmp_path / "claims.yaml")
