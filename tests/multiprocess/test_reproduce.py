"""A rehearsal on this host, from statement to verdict, and the doctor of this host."""

import json
import re

import pytest

from _spawn import PYTHONPATH
from epcross.harness.cli import run as cli

pytestmark = pytest.mark.beside


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)  # of ranks
    monkeypatch.chdir(tmp_path)


def test_a_rehearsal_ends_with_a_table_of_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["reproduce", "P07", "--rehearse"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Ready", out, re.MULTILINE)
    assert re.search(r"^round_trip_over_ep: \d+ points, 0 of them impossible here; about ", out, re.MULTILINE)
    assert re.search(r"^round_trip_over_ep: \d+ ok; results/rehearsals/", out, re.MULTILINE) or "ok; /" in out
    assert "16.6 to 17.8" in out
    assert "A rehearsal walks the path" in out
    assert cli(["reproduce", "P07", "--rehearse", "--collect", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [run["missing_rows"] for run in document["runs"]] == [0]
    assert {row["published"] for row in document["verdicts"]} == {"16.6 to 17.8 us"}


def test_the_doctor_of_this_host_knows_what_a_sweep_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["doctor", "sweep=smoke", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [rank["seat"]["rank"] for rank in seen["ranks"]] == [0, 1]
    assert seen["ranks"][0]["backends"]["shm_fence"] is None
    assert seen["ranks"][0]["cache_writable"]
    assert cli(["doctor", "--nodes", "2"]) == 2
    assert "--nodes is for a cluster; add cluster=NAME" in capsys.readouterr().err
