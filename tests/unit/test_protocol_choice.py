"""The stored crossover of the one-sided protocols: made from rows, and found, or missed, by `onesided_auto`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from epcross.harness import cli
from epcross.harness.analysis.material import Run, open_runs
from epcross.harness.analysis.protocol_choice import Choice, choices, limit_of
from epcross.harness.backends import onesided
from epcross.harness.errors import InputError
from epcross.harness.planning.build import build
from epcross.harness.terms import Status
from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided.crossover import Crossovers, Setting

MEASURED = Path(__file__).parents[2] / "results" / "measured"
ONE_GPU = MEASURED / "20261129-215146-onesided_h200-e436"
TWO_GPUS = MEASURED / "20261129-214828-onesided_nvlink-c977"
BESIDE_OTHERS = MEASURED / "20261130-093955-baselines_nvlink-9f64"
SOAK = MEASURED / "20261130-025515-soak_nvlink-55af"
QUICKSTART = MEASURED / "20261129-193904-quickstart-32dc"
HALF_OF_EP_64 = MEASURED / "20261129-215146-onesided_h200_wide-ba1d"


def chosen(*paths: Path) -> tuple[Choice, ...]:
    return choices(open_runs(paths)).chosen


def changed(run: Run, *, run_id: str = "", created: str = "", **values) -> Run:
    """`run` with other values in every row, under another name."""
    directory = replace(run.directory, run_id=run_id or run.run_id, created=created or run.directory.created)
    rows = tuple(replace(row, run_id=directory.run_id, **values) for row in run.records)
    return replace(run, directory=directory, records=rows)


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
    (two,) = chosen(TWO_GPUS)
    assert two.setting == Setting(
        machine="NVIDIA H200, posix_fd, 1 rank a GPU", ep_size=2, hidden=7168, dispatch_format=RowFormat.BF16
    )
    assert {tokens for tokens, (sentinel, fence) in two.medians_us.items() if sentinel < fence} == {
        tokens for tokens in two.medians_us if tokens <= two.sentinel_up_to
    }
    assert two.sentinel_up_to == 2048
    assert not two.open_ended
    assert two.source.startswith("20261129-214828-onesided_nvlink-c977; kernels ")
    one = {choice.setting.ep_size: choice for choice in chosen(ONE_GPU)}
    assert {ep_size: choice.setting.machine for ep_size, choice in one.items()} == {
        2: "NVIDIA H200, local, 2 ranks a GPU",
        8: "NVIDIA H200, local, 8 ranks a GPU",
    }
    assert (one[2].sentinel_up_to, one[8].sentinel_up_to) == (32, 1)


def test_the_file_of_h200s_says_what_the_committed_rows_say():
    """All at once: of the two in which all ranks share a launch at EP 16 to 64, one has half of EP 64, and of two
    that measured one setting with other kernels the newer one counts."""
    stored = Crossovers.load(MEASURED.parent / "crossovers" / "h200.json").entries
    assert stored == {one.setting: (one.sentinel_up_to, one.source) for one in chosen(*MEASURED.iterdir())}
    assert [one.setting.ep_size for one in chosen(*MEASURED.iterdir())] == [2, 2, 2, 2, 8, 16, 32, 64]
    assert {(setting.ep_size, setting.machine.split(", ", 1)[1]) for setting in stored} == {
        *((ep_size, f"local, {ep_size} ranks a GPU") for ep_size in (2, 8, 16, 32, 64)),
        (2, "posix_fd, 1 rank a GPU"),
        (2, "posix_fd, 2 ranks a GPU"),
    }


def test_rows_that_do_not_decide_are_refused_with_the_next_step():
    (run,) = open_runs([TWO_GPUS])
    for wrong, why in (
        (changed(run, status=Status.ERROR), "none counts .936 error"),
        (changed(run, flags="throttled"), "none counts .936 flagged throttled"),
        (changed(run, regime="entry"), "none counts .there are none"),
        (changed(run, tokens_total=1), "none counts .936 with other numbers of tokens on some ranks"),
        (
            replace(run, records=tuple(row for row in run.records if row.backend == "onesided_fence")),
            "it has no rows of onesided_sentinel",
        ),
    ):
        words = rf"(?s)measure both, such as with sweep=onesided_nvlink.*{run.run_id}: left out: .*{why}"
        with pytest.raises(InputError, match=words):
            choices([wrong])
    mixed = replace(run, records=run.records + changed(run, routing="zipf").records)
    words = rf"{run.run_id}: left out of EP 2, hidden 7168, bf16 on .* differ in routing \(uniform, zipf\)"
    with pytest.raises(InputError, match=words):
        choices([mixed])
    environment = {**run.directory.environment, "gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA B200"}]}
    with pytest.raises(InputError, match=r"taken on GPUs .'NVIDIA B200', 'NVIDIA H200'., not on one kind"):
        choices([replace(run, directory=replace(run.directory, environment=environment))])


def test_of_many_runs_each_that_is_left_out_is_named_with_the_reason():
    runs = [QUICKSTART, SOAK, TWO_GPUS, HALF_OF_EP_64, BESIDE_OTHERS]
    found = choices(open_runs(runs))
    told = {one.run_id: (one.setting and one.setting.ep_size, one.reason) for one in found.left_out}
    used = {run_id for one in found.chosen for run_id in one.source.split(";")[0].split(", ")}
    assert used | told.keys() == {path.name for path in runs}
    assert told[SOAK.name] == (None, "a soak: its cases are drawn at random, so no curve goes through them")
    assert SOAK.name not in used
    assert told[QUICKSTART.name][1] == "it has no rows of onesided_fence or of onesided_sentinel"
    ep_size, reason = told[TWO_GPUS.name]
    assert ep_size == 2
    assert reason == (
        f"it differs from {BESIDE_OTHERS.name}, which is newer, in measure_hash (c999a7835938, there 1b6b67ee7bee), "
        "backend_version (2e30bf6fa500, there e361c7bf54ad)"
    )
    assert told[HALF_OF_EP_64.name] == (
        64,
        "no token count at which both protocols have such round trips in one call",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("machine", "f" * 16),
        ("measure_hash", "f" * 64),
        ("backend_version", "f" * 16),
        ("routing", "zipf"),
        ("scope", "scale_out"),
    ],
)
def test_runs_that_differ_are_never_mixed_and_the_newer_counts(name: str, value: str):
    (run,) = open_runs([TWO_GPUS])
    other = changed(run, run_id="later", created="2027-01-01T00:00:00.000000+00:00", **{name: value, "latency_us": 1.0})
    for order in ([run, other], [other, run]):
        found = choices(order)
        assert [one.source.split(";")[0] for one in found.chosen] == ["later"]
        (left,) = found.left_out
        assert left.run_id == run.run_id
        assert left.reason.startswith(f"it differs from later, which is newer, in {name} (")
        assert left.reason.endswith(f", there {value[:12]})")


def test_of_runs_of_the_same_time_the_later_name_counts_and_the_words_say_so():
    (run,) = open_runs([TWO_GPUS])
    other = changed(run, run_id="later", routing="zipf")
    for order in ([run, other], [other, run]):
        (left,) = choices(order).left_out
        assert left.run_id == run.run_id
        assert left.reason.startswith("it differs from later, of the same time and later by name, in routing (")


def test_runs_that_agree_are_taken_together_and_calls_are_not_mixed():
    (run,) = open_runs([TWO_GPUS])
    (together,) = choices([run, changed(run, run_id="again", allocation_id="other")]).chosen
    assert together.source.startswith(f"{run.run_id}, again; kernels ")
    assert together.repeats == (72, 72)
    apart = tuple(replace(row, allocation_id=row.backend) if row.tokens_per_rank > 64 else row for row in run.records)
    (found,) = choices([replace(run, records=apart)]).chosen
    assert max(found.medians_us) == 64


def test_the_command_writes_the_file_and_keeps_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "crossover.json"
    assert cli.run(["crossover", str(TWO_GPUS), "--save", str(path)]) == 0
    assert "Sentinel up to 2048 tokens" in capsys.readouterr().out
    assert cli.run(["crossover", str(ONE_GPU), "--save", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [line["sentinel_up_to_tokens"] for line in told["crossovers"]] == [32, 1]
    assert told["left_out"] == []
    entries = Crossovers.load(path).entries
    assert sorted(limit for limit, _ in entries.values()) == [1, 32, 2048]
    assert cli.run(["crossover", str(TWO_GPUS), str(SOAK)]) == 0
    out = capsys.readouterr().out
    assert "medians of n = 36 repeats, steady; 20261129-214828-onesided_nvlink-c977; kernels " in out
    assert f"{SOAK.name}: left out: a soak" in out
    assert cli.run(["crossover", str(TWO_GPUS), str(BESIDE_OTHERS), "--json"]) == 0
    (left,) = json.loads(capsys.readouterr().out)["left_out"]
    assert (left["run_id"], left["of"]["ep_size"]) == (TWO_GPUS.name, 2)
    assert cli.run(["crossover", str(TWO_GPUS), str(TWO_GPUS)]) == 2
    assert f"run {TWO_GPUS.name} is given 2 times" in capsys.readouterr().err
    assert cli.run(["crossover", str(TWO_GPUS), "--save", str(tmp_path / "none" / "file.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "it is no object with a list of entries under 'crossovers'"),
        ("[]", "it is no object with a list of entries under 'crossovers'"),
        ('{"crossovers": [{"machine": "m"}]}', "it is no object with a list of entries under 'crossovers'"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_somebodys_other_file_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert cli.run(["crossover", str(TWO_GPUS), "--save", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"--save {path}: this file holds no crossovers ({why}), so it is left as it is; name another file" in error
    assert "Error" not in error
    assert "protocol=" not in error
    assert path.read_text() == text


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
