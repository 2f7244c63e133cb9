"""From names of statements to sweeps, and from judgements to ratios."""

import json
from pathlib import Path

import pytest

from epcross.harness.claims.book import read_book
from epcross.harness.claims.sources import reference_folders
from epcross.harness.cli import run as cli
from epcross.harness.doctor import examination
from epcross.harness.doctor.facts import Facts
from epcross.harness.doctor.findings import Finding, Severity
from epcross.harness.errors import ConfigError
from epcross.harness.planning.library import Library
from epcross.harness.reproduction.path import Request
from epcross.harness.reproduction.statements import REHEARSAL, tasks_for
from epcross.harness.reproduction.verdicts import published_range, ratio_text, ratio_to
from epcross.harness.running.seat import seat_here

BOOK = read_book(reference_folders(()))


def test_without_a_name_it_is_every_statement_with_a_sweep() -> None:
    tasks = tasks_for(())
    assert {task.sweep for task in tasks} <= set(Library().names("sweep"))
    assert {claim.id for task in tasks for claim in task.claims} == {
        claim.id for claim in BOOK.claims if claim.sweep not in ("", "soak")
    }


def test_claims_of_one_sweep_are_one_task() -> None:
    (task,) = tasks_for(("P04", "P05"))
    assert (task.sweep, [claim.id for claim in task.claims]) == ("megamoe_crossover", ["P04", "P05"])
    (whole,) = tasks_for(("deepep_speedup", "P01"))
    assert [claim.id for claim in whole.claims] == ["P01", "P02"]


def test_names_that_are_no_statements_are_all_told() -> None:
    with pytest.raises(ConfigError) as told:
        tasks_for(("P99", "P14", "deepep_sped"))
    first, second, third = told.value.problems
    assert first.startswith("unknown statement 'P99'; did you mean")
    assert second == "P14 is not measured by a sweep of latencies; see it with: epcross run sweep=soak"
    assert "did you mean 'deepep_speedup'?" in third


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("P01", (1.2, 3.0)),
        ("P03", (2.4, 2.4)),
        ("P06", (17.4, 47.9)),
        ("P08", (0.493, 0.493)),
        ("B04", (3.06, 3.06)),
        ("D01", (24.5, 24.5)),
        ("P02", None),  # in words
        ("B01", None),  # two quotients: which one a reading is of, the words do not say
        ("B06", None),
    ],
)
def test_the_published_number_is_read_from_the_words(name: str, published: tuple[float, float] | None) -> None:
    assert published_range(BOOK.claim(name)) == published


def test_a_ratio_is_one_inside_a_published_range() -> None:
    assert ratio_to((2.0, 4.0), [1.0, 3.0, 8.0]) == (0.5, 2.0)
    assert ratio_to((2.0, 4.0), [3.0]) == (1.0, 1.0)
    assert ratio_to((10.0, 10.0), [12.0]) == (1.2, 1.2)
    assert ratio_to(None, [1.0]) is None
    assert ratio_to((1.0, 1.0), []) is None
    assert [ratio_text(ratio) for ratio in (None, (1.0, 1.0), (0.5, 2.0))] == ["-", "1.00", "0.50 to 2.00"]


def test_what_the_user_says_comes_before_what_a_rehearsal_would() -> None:
    words = Request(names=(), overrides=("cluster=ci", "ep_size=4"), rehearse=True).words("deepep_speedup")
    assert words[:2] == ["sweep=deepep_speedup", "launcher=slurm"]
    assert words[-2:] == ["cluster=ci", "ep_size=4"]
    assert "ep_size=2" in REHEARSAL
    assert "ep_size=2" not in words
    assert "launcher=slurm" not in Request(names=(), overrides=("cluster=local",)).words("smoke")


def test_every_statement_s_sweep_can_be_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["reproduce", "--rehearse", "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines if ": " in line} == {task.sweep for task in tasks_for(())}
    assert all(" 0 of them impossible" in line for line in lines)


def test_collecting_before_measuring_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(["reproduce", "P07", "--collect"]) == 2
    assert (
        "results/runs has no run of round_trip_over_ep; measure first: epcross reproduce P07" in capsys.readouterr().err
    )
    assert cli(["reproduce", "P07", "sweep=smoke"]) == 2
    assert "a statement brings its sweep; leave out sweep=" in capsys.readouterr().err


def test_a_plan_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "P07", "round_trip_one_token", "--plan", "cluster=gb200_nvl72", "cluster.partition=batch"]
    assert cli([*words, "--json"]) == 0
    out, told = capsys.readouterr()
    document = json.loads(out)
    assert document["sweeps"].keys() == {"round_trip_over_ep", "round_trip_one_token"}
    over_ep = document["sweeps"]["round_trip_over_ep"]
    assert over_ep["jobs"].keys() == {f"nvlink_ep{size}" for size in (8, 16, 32, 64)}
    assert over_ep["gpu_hours"] == pytest.approx(sum(job["gpu_hours"] for job in over_ep["jobs"].values()))
    assert document["gpu_hours"] == pytest.approx(sum(one["gpu_hours"] for one in document["sweeps"].values()))
    assert f"In all {document['gpu_hours']:.3g} GPU-hours." in told
    for job in over_ep["jobs"].values():
        assert 0 < job["gpu_hours"] < 64 * 240 / 60


def test_a_machine_that_is_not_fit_is_a_document_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = Finding(severity=Severity.STOPS, subject="kernel cache", text="cannot be written", next_step="")
    monkeypatch.setattr(examination, "examine_request", lambda *_: ([Facts(seat=seat_here(0, 1))], [stops]))
    assert cli(["reproduce", "--rehearse", "P01", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ready"] is False
    assert [one["subject"] for one in document["findings"]] == ["kernel cache"]
