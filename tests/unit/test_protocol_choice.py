"""The stored crossover of the one-sided protocols: made from rows, and found, or missed, by `onesided_auto`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from epcross.harness import cli
from epcross.harness.analysis import material
from epcross.harness.analysis.protocol_choice import choices, limit_of
from epcross.harness.backends import onesided
from epcross.harness.errors import InputError
from epcross.harness.planning.build import build
from epcross.harness.terms import Status
from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided.crossover import Crossovers, Setting

MEASURED = Path(__file__).parents[2] / "results" / "measured"
ONE_GPU = MEASURED / "20261129-215146-onesided_h200-e436"
TWO_GPUS = MEASURED / "20261129-214828-onesided_nvlink-c977"


@pytest.mark.parametrize(
    ("medians", "limit"),
    [
        ({1: (5.0, 6.0), 8: (6.0, 7.0), 64: (9.0, 8.0)}, 8),
        ({1: (5.0, 6.0), 8: (6.0, 7.0)}, 8),  # ahead throughout: no further than was measured
        ({1: (6.0, 5.0), 8: (7.0, 6.0)}, 0),
        ({1: (5.0, 5.0)}, 0),
        ({1: (5.0, 6.0), 2: (5.01, 5.0), 8: (6.0, 7.0), 64: (9.0, 8.0)}, 8),  # one count that wavers
        ({1: (5.0, 6.0), 2: (9.0, 5.0), 8: (6.0, 6.1), 64: (9.0, 8.0)}, 1),  # one that does not pay
    ],
)
def test_the_limit_costs_least_over_what_was_measured(medians, limit):
    assert limit_of(medians) == limit
    assert limit_of(dict(reversed(medians.items()))) == limit


def test_the_limits_of_committed_rows_are_where_their_medians_cross():
    (two,) = choices(material.load([TWO_GPUS]).runs)
    assert two.setting == Setting(
        machine="NVIDIA H200, posix_fd, 1 rank a GPU", ep_size=2, hidden=7168, dispatch_format=RowFormat.BF16
    )
    assert {tokens for tokens, (sentinel, fence) in two.medians_us.items() if sentinel < fence} == {
        tokens for tokens in two.medians_us if tokens <= two.sentinel_up_to
    }
    assert two.sentinel_up_to == 2048
    assert not two.open_ended
    assert two.source.startswith("20261129-214828-onesided_nvlink-c977; kernels ")
    one = {choice.setting.ep_size: choice for choice in choices(material.load([ONE_GPU]).runs)}
    assert {ep_size: choice.setting.machine for ep_size, choice in one.items()} == {
        2: "NVIDIA H200, local, 2 ranks a GPU",
        8: "NVIDIA H200, local, 8 ranks a GPU",
    }
    assert (one[2].sentinel_up_to, one[8].sentinel_up_to) == (32, 1)


def test_the_file_of_h200s_says_what_the_committed_rows_say():
    """Each run by itself: of the two in which all ranks share a launch at EP 16 to 64, one has half of EP 64. The
    newer of two that measured the same counts."""
    stored = Crossovers.load(MEASURED.parent / "crossovers" / "h200.json").entries
    runs = sorted(path for path in MEASURED.iterdir() if "-onesided_" in path.name or "-baselines_nvlink-" in path.name)
    found = [one for run in runs for one in choices(material.load([run]).runs)]
    assert stored == {one.setting: (one.sentinel_up_to, one.source) for one in found}
    assert {(setting.ep_size, setting.machine.split(", ")[1]) for setting in stored} == {
        *((ep_size, "local") for ep_size in (2, 8, 16, 32, 64)),
        (2, "posix_fd"),
    }


def test_rows_that_do_not_decide_are_refused_with_the_next_step():
    (run,) = material.load([TWO_GPUS]).runs

    def changed(**values):
        return replace(run, records=tuple(replace(row, **values) for row in run.records))

    for wrong in (
        changed(status=Status.ERROR),
        changed(flags="throttled"),
        changed(regime="entry"),
        replace(run, records=tuple(row for row in run.records if row.backend == "onesided_fence")),
    ):
        with pytest.raises(InputError, match="measure both, such as with sweep=onesided_nvlink"):
            choices([wrong])
    with pytest.raises(InputError, match=r"EP 2, hidden 7168, bf16 on NVIDIA H200.* differ in routing; give runs"):
        choices([run, changed(routing="zipf")])
    environment = {**run.directory.environment, "gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA B200"}]}
    with pytest.raises(InputError, match="taken on GPUs"):
        choices([replace(run, directory=replace(run.directory, environment=environment))])


def test_the_command_writes_the_file_and_keeps_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "crossover.json"
    assert cli.run(["crossover", str(TWO_GPUS), "--save", str(path)]) == 0
    assert "Sentinel up to 2048 tokens" in capsys.readouterr().out
    assert cli.run(["crossover", str(ONE_GPU), "--save", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [line["sentinel_up_to_tokens"] for line in told["crossovers"]] == [32, 1]
    entries = Crossovers.load(path).entries
    assert sorted(limit for limit, _ in entries.values()) == [1, 32, 2048]
    path.write_text("{}")  # somebody's other file is not written over
    assert cli.run(["crossover", str(TWO_GPUS), "--save", str(path)]) == 1
    assert "is no crossover file" in capsys.readouterr().err
    assert path.read_text() == "{}"
    assert cli.run(["crossover", str(TWO_GPUS), "--save", str(tmp_path / "none" / "file.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def reasons(monkeypatch: pytest.MonkeyPatch, *words: str) -> set[str]:
    monkeypatch.setattr(onesided, "unavailable", lambda: None)  # as on a machine with a GPU
    plan = build(["sweep=onesided_nvlink", "backend=onesided_auto", "tokens_per_rank=1", "regime=steady", *words])
    assert {item.status for item in plan.impossible} <= {Status.UNAVAILABLE}
    return {item.reason for item in plan.impossible}


def test_without_a_file_auto_is_unavailable_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (reason,) = reasons(monkeypatch)
    assert "`epcross crossover RUN --save FILE`" in reason
    assert "backend.options.crossover=FILE" in reason
    path = tmp_path / "crossover.json"
    (reason,) = reasons(monkeypatch, f"backend.options.crossover={path}")
    assert f"{path} is no crossover file: FileNotFoundError" in reason
    Crossovers({}).save(path)
    assert reasons(monkeypatch, f"backend.options.crossover={path}") == set()
