"""`epcross claims` and `epcross claims add`, as a reader types them."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from analysis_values import point, record, write
from claims_values import book_of, measured
from report_runs import make_run
from rich.console import Console
from test_claim_book import CLAIM

from epcross.harness.analysis import frame
from epcross.harness.claims import evaluate, published, sources
from epcross.harness.claims.book import read_book
from epcross.harness.claims.claims_table import as_json, claim_page, claims_table
from epcross.harness.claims.hardware import with_products
from epcross.harness.claims.judge import judge
from epcross.harness.claims.verdict import Verdict
from epcross.harness.cli import run as cli
from epcross.harness.errors import InputError
from epcross.harness.storing.sealed import read_sealed, seal

HEADER = "system,phase,ep_size,tokens_per_rank,metric,value"
TABLE = f"{HEADER}\nmine,round_trip,8,1,latency_us,12.5\nmine,round_trip,8,32,latency_us,13.5\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder: what they read and write is there."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def rendered(what: Any) -> list[str]:
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get().splitlines()


def add(*words: str) -> int:
    return cli(["claims", "add", *words])


def test_without_any_run_facts_are_checked_and_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["claims"]) == 3
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "facts that follow from published numbers: 4 inside" in out
    assert "no run: results/measured is not here" in out
    assert "Verdict: nothing measured here could be held against a claim" in out
    assert "P01" in out
    assert "no rows of flashinfer_one_sided" in out


def test_runs_of_the_folder_are_found_and_named(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(elsewhere / "results" / "measured" / "a", [record(point("shm_fence", 8))])
    assert cli(["claims"]) == 3
    assert "judged by 0 rows of domain nvlink in run-a" in capsys.readouterr().out
    assert cli(["claims", "results/measured/a"]) == 3
    write(elsewhere / "empty", [])
    assert cli(["claims", "empty"]) == 3
    assert "judged by no row: the runs that were given hold none" in capsys.readouterr().out
    assert cli(["claims", "results"]) == 2
    assert "results holds no run" in capsys.readouterr().err
    assert cli(["claims", "nowhere"]) == 2
    assert "nowhere holds no run" in capsys.readouterr().err


def test_a_run_on_nvlink_is_judged(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows as they are stored: an EP 8 round trip of DeepEP's low-latency kernels on H200, claim D01."""
    of = point("deepep_ll", 1, ep_size=8)
    rows = [
        record(
            of, 24.0 + launch / 10, launch=launch, seed=seed, repeat=2 * launch + seed,
            domain="nvlink", model="deepseek_v3", dispatch_format="fp8",
        )
        for launch in range(6)
        for seed in range(2)
    ]  # fmt: skip
    run = make_run(elsewhere / "runs", units=False)
    folder = write(elsewhere / "merged", [replace(row, run_id=run.name) for row in rows])
    (folder / "runs").mkdir()
    run.rename(folder / "runs" / run.name)
    (folder / "runs" / run.name / "plan.json").write_bytes(seal({}))  # that of the folder has other points
    _name_gpus(folder / "runs" / run.name, "NVIDIA H200")
    assert cli(["claims", "merged", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, list)
    (d01,) = [one for one in found if one["id"] == "D01"]
    assert (d01["verdict"], d01["way"]) == ("inside", "reproduces")
    assert d01["readings"][0]["product"] == "NVIDIA H200"
    assert d01["readings"][0]["findings"][0]["value"] == pytest.approx(24.25)
    assert cli(["claims", "merged", "--claim", "D01"]) == 0
    page = capsys.readouterr().out
    assert "24.2 [" in page
    assert "Verdict: inside" in page
    assert "measured by: epcross run sweep=round_trip_one_token" in page
    _name_gpus(folder / "runs" / run.name, "NVIDIA B200")
    assert cli(["claims", "merged", "--claim", "D01"]) == 3
    assert "measured on NVIDIA B200, not on H200" in " ".join(capsys.readouterr().out.split())


def _name_gpus(run: Path, name: str) -> None:
    path = run / "environment.json"
    path.write_bytes(seal({**read_sealed(path), "gpus": [{"name": name}, {"name": name}]}, indent=1))


def test_an_outside_claim_ends_with_1(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": lambda _: 10.0, "deepep_ll": lambda _: 10.5})
    judgements = judge(book_of("P01"), rows, published.load([sources.SHIPPED]))
    (found,) = [one for one in judgements if one.verdict is Verdict.OUTSIDE]
    lines = rendered(claims_table(judgements, "a note"))
    assert max(map(len, lines)) <= 100
    assert any("outside" in line for line in lines)
    assert lines[-1] == "Verdict: at least one claim is outside its bounds"
    page = rendered(claim_page(found))
    assert max(map(len, page)) <= 100
    document = as_json(judgements)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_infinite_ends_are_null_in_json_and_fit_the_table(tmp_path: Path) -> None:
    curves = {"layer_onesided": lambda t: 10.0 + t, "megamoe": lambda t: 30.0 + 3 * t}
    rows = measured(tmp_path, curves, phase="layer", tokens=(64, 128, 256))
    judgements = judge(book_of("P04"), rows, published.load([sources.SHIPPED]))
    (found,) = [one for one in as_json(judgements) if one["verdict"] == "inside"]
    assert found["readings"][0]["findings"][0] == {
        "at": "", "value": None, "low": 256.0, "high": None, "verdict": "inside", "reason": "",
    }  # fmt: skip
    assert any("inf [256..inf]" in line for line in rendered(claims_table(judgements, "")))


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["claims", "--claim", "P99"]) == 2
    assert "no claim 'P99'" in capsys.readouterr().err
    assert cli(["claims", "--keep", "hot"]) == 2
    assert cli(["claims", "--reference", "nowhere"]) == 2
    assert "no folder nowhere" in capsys.readouterr().err
    assert cli(["claims", "--help"]) == 0
    assert "claims add FILE" in capsys.readouterr().out
    assert cli(["claims", "add", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: epcross claims add [OPTIONS] FILE")
    assert "--rank" in out


def test_products_are_read_from_the_environment(elsewhere: Path) -> None:
    run = make_run(elsewhere)
    rows = with_products(frame.load(run), [run])
    assert set(rows["product"]) == {"no GPU"}
    _name_gpus(run, "NVIDIA H200")
    assert set(with_products(frame.load(run), [run])["product"]) == {"NVIDIA H200"}
    folder = write(elsewhere / "tables", [record(point("shm_fence", 8))])
    assert set(with_products(frame.load(folder), [folder])["product"]) == {"GPU not reported"}


def test_a_table_is_entered_and_used(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "table3.csv").write_text(TABLE)
    words = ["--source", "smith2026", "--title", "Smith et al.", "--hardware", "GB200 NVL72", "--bytes", "pairs"]
    assert add("table3.csv", *words, "--not-stated", "routing", "--not-stated", "top-k") == 0
    home = elsewhere / "results" / "reference" / "smith2026"
    assert f"2 values of smith2026: wrote source.yaml, table3.csv in {home}" in capsys.readouterr().out
    assert (home / "table3.csv").read_text() == TABLE
    assert yaml.safe_load((home / "source.yaml").read_text()) == {
        "title": "Smith et al.",
        "hardware": "GB200 NVL72",
        "byte_convention": "pairs",
        "not_stated": ["routing", "top-k"],
        "rank_reduction": "not stated",
    }
    rows = published.load(sources=["smith2026"])
    assert rows["latency_us"].tolist() == [12.5, 13.5]
    assert len(published.load()) == 2061 + 2
    assert cli(["claims"]) == 3


def test_claims_are_entered_and_judged(elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "ours.yaml").write_text(
        yaml.safe_dump({"claims": [{k: v for k, v in CLAIM.items() if k != "source"}]})
    )
    assert add("ours.yaml", "--source", "smith2026", "--title", "Smith et al.") == 0
    assert "1 claim of smith2026" in capsys.readouterr().out
    assert cli(["claims", "--claim", "X01"]) == 3
    assert "source smith2026: 2; bounds 1.8..2.2" in capsys.readouterr().out
    (elsewhere / "table.csv").write_text(TABLE)
    assert add("table.csv", "--source", "smith2026") == 0
    (elsewhere / "more.yaml").write_text(yaml.safe_dump({"claims": [CLAIM | {"id": "X02", "source": "smith2026"}]}))
    assert add("more.yaml", "--source", "smith2026") == 0
    home = elsewhere / "results" / "reference" / "smith2026"
    assert sorted(path.name for path in home.iterdir()) == ["more.yaml", "ours.yaml", "source.yaml", "table.csv"]
    rows = measured(tmp_path, {"onesided_fence": lambda _: 10.0, "deepep_ll": lambda _: 20.0})
    found = {one.claim.id: one.verdict for one in judge(read_book(), rows, published.load()) if one.way == "replicates"}
    assert found["X01"] is found["X02"] is Verdict.INSIDE


@pytest.mark.parametrize(
    ("name", "text", "words", "message"),
    [
        ("t.csv", TABLE, ["--source", "Smith 2026", "--title", "x"], "source name 'Smith 2026' must be lower-case"),
        ("t.csv", TABLE, ["--source", "../up", "--title", "x"], "source name '../up' must be lower-case"),
        ("t.csv", TABLE, ["--source", "smith"], "source 'smith' is new: give its --title"),
        ("t.csv", TABLE, ["--source", "trtllm_blog18"], "source 'trtllm_blog18' is in"),
        ("t.txt", TABLE, ["--source", "smith", "--title", "x"], "t.txt is neither a table (.csv) nor a list of claims"),
        ("source.yaml", "{}", ["--source", "smith", "--title", "x"], "is the name of another file of a source"),
        ("t.csv", TABLE.replace("12.5", "-3"), ["--source", "smith", "--title", "x"], "t.csv line 2: value is '-3'"),
        ("t.csv", TABLE.replace("8,1,", "8,x,"), ["--source", "smith", "--title", "x"], "tokens_per_rank is 'x'"),
        ("t.csv", "", ["--source", "smith", "--title", "x"], "t.csv: the header lacks system, metric, value"),
        ("t.csv", TABLE, ["--source", "smith", "--title", "x", "--bytes", "pair"], "did you mean 'pairs'"),
        ("t.yaml", "claims: []", ["--source", "smith", "--title", "x"], "t.yaml has no claims"),
        ("t.yaml", "claims: [", ["--source", "smith", "--title", "x"], "t.yaml is no YAML that can be used"),
        ("t.yaml", "claims: [{id: P01}]", ["--source", "smith", "--title", "x"], "claim P01: statement is missing"),
        (
            "t.yaml",
            yaml.safe_dump({"claims": [CLAIM]}),
            ["--source", "smith", "--title", "x"],
            "but the folder is of 'smith'",
        ),
        (
            "t.yaml",
            yaml.safe_dump({"claims": [CLAIM | {"source": "smith", "id": "P01"}]}),
            ["--source", "smith", "--title", "x"],
            "claim 'P01' stands twice",
        ),
    ],
)
def test_what_cannot_be_entered_leaves_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, words: list[str], message: str
) -> None:
    (elsewhere / name).write_text(text)
    assert add(name, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert "/tmp/tmp" not in error  # the folder it was tried in
    assert not (elsewhere / "results").exists()


@pytest.mark.parametrize("name", ["nowhere.csv", "nowhere.yaml", "nowhere"])
@pytest.mark.parametrize("words", [[], ["--title", "x"]])
def test_an_absent_file_is_said_before_what_a_new_source_needs(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    assert add(name, "--source", "smith", *words) == 2
    error = capsys.readouterr().err
    assert f"{name} does not exist; give the path of a table (.csv) or of a list of claims (.yaml)" in error
    assert "is new" not in error
    assert not (elsewhere / "results").exists()


def test_files_of_a_source_are_not_replaced(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "t.csv").write_text(TABLE)
    assert add("t.csv", "--source", "smith", "--title", "x") == 0
    assert add("t.csv", "--source", "smith") == 2
    assert "exists already; rename the file" in capsys.readouterr().err
    (elsewhere / "u.csv").write_text(TABLE)
    assert add("u.csv", "--source", "smith") == 2
    assert "a measurement stands once" in capsys.readouterr().err
    (elsewhere / "v.csv").write_text(TABLE.replace("12.5", "99").replace("13.5", "98"))
    assert add("v.csv", "--source", "smith", "--title", "y") == 2
    assert "is described already; edit its source.yaml instead of giving title" in capsys.readouterr().err
    assert add("v.csv", "--source", "smith") == 0
    assert add("missing.csv", "--source", "smith") == 2
    assert "missing.csv does not exist" in capsys.readouterr().err


def test_another_folder_of_sources(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "t.csv").write_text(TABLE)
    assert add("t.csv", "--source", "smith", "--title", "x", "--into", "papers") == 0
    assert (elsewhere / "papers" / "smith" / "t.csv").exists()
    assert cli(["claims", "--reference", "papers"]) == 3
    (elsewhere / "u.csv").write_text(TABLE.replace("12.5", "99").replace("13.5", "98"))
    assert add("u.csv", "--source", "smith", "--into", "papers") == 0
    assert add("u.csv", "--source", "deepep_readme_v2", "--into", "papers") == 2
    assert "source 'deepep_readme_v2' is in" in capsys.readouterr().err


def test_the_claim_of_the_page_can_be_entered(elsewhere: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "claims.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (elsewhere / "smith.yaml").write_text(block)
    assert add("smith.yaml", "--source", "smith2026", "--title", "Smith et al.") == 0
    rows = measured(tmp_path, {"onesided_fence": lambda _: 14.0}, tokens=(8,), ep_size=8)
    found = {one.claim.id: one for one in judge(read_book(), rows, published.load()) if one.way == "replicates"}
    assert found["S01"].verdict is Verdict.INSIDE
    assert "Left open and not measured" in found["S01"].reason
    assert "dispatch_format fp8" in found["S01"].reason


def test_a_run_is_looked_at_once_however_often_it_is_given(elsewhere: Path) -> None:
    folder = write(elsewhere / "runs" / "a", [record(point("shm_fence", 8))])
    assert evaluate.runs_in([Path("runs"), folder, Path("runs/a")]) == [Path("runs/a")]
    assert evaluate.runs_in([Path("nowhere")], optional=True) == []
    with pytest.raises(InputError, match="nowhere holds no run"):
        evaluate.runs_in([Path("nowhere")])


def test_sources_are_plain_values() -> None:
    document = {name: asdict(source) for name, source in sources.sources([sources.SHIPPED]).items()}
    assert pd.DataFrame(document.values())["title"].is_unique
