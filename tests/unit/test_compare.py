import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from analysis_values import point, record, simulate, write
from report_runs import make_run
from report_runs import points as report_points
from rich.console import Console

from epcross.harness.analysis.compare import COLUMNS, Verdict, call, compare, exit_code
from epcross.harness.analysis.compare_table import compare_table
from epcross.harness.analysis.frame import load
from epcross.harness.cli import run as cli
from epcross.harness.errors import InputError
from epcross.harness.record import Record
from epcross.harness.terms import Phase, Regime

TOKENS = [1, 32]


def runs(folder: Path, factor: float = 1.0, *, repeats=(5, 1, 3), spread=(0.0, 0.0, 0.0), **more):
    """Run A, and a run B that is slower by `factor`."""
    sides = {"run-a": (1.0, 1), "run-b": (factor, 2)}
    return [
        simulate(
            folder / name,
            {"x": lambda tokens, by=by: by * (5.0 + tokens)},
            tokens=TOKENS,
            repeats=repeats,
            spread=spread,
            run_id=name,
            rng_seed=seed,
            **more,
        )
        for name, (by, seed) in sides.items()
    ]


def trials(of, latency_us: float = 10.0, *, launches: int = 5, chains: int = 2, **columns: Any) -> list[Record]:
    return [
        record(of, latency_us, launch=launch, chain=chain, repeat=launch * chains + chain, **columns)
        for launch in range(launches)
        for chain in range(chains)
    ]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (1.00, 0.98, 1.02, "equal"),
        (1.03, 1.03, 1.03, "equal"),
        (1.05, 1.01, 1.10, "slower"),
        (1.05, 0.99, 1.10, "unclear"),
        (1.02, 1.01, 1.04, "unclear"),
        (0.90, 0.85, 0.95, "faster"),
        (0.90, 0.80, 1.01, "unclear"),
        (1.00, 0.50, 2.00, "unclear"),
    ],
)
def test_the_verdict_on_a_ratio(ratio: float, low: float, high: float, verdict: str) -> None:
    assert call(ratio, low, high, 0.03) == verdict
    mirrored = {"slower": "faster", "faster": "slower"}.get(verdict, verdict)
    assert call(1 / ratio, 1 / high, 1 / low, 0.03) == mirrored


@pytest.mark.parametrize(("factor", "verdict", "code"), [(1.0, "equal", 0), (1.2, "slower", 1), (0.8, "faster", 0)])
def test_a_change_without_noise_is_called(tmp_path: Path, factor: float, verdict: str, code: int) -> None:
    compared = compare(*runs(tmp_path, factor))
    assert tuple(compared.columns) == COLUMNS
    assert compared["verdict"].tolist() == [verdict, verdict]
    assert compared["ratio"].tolist() == pytest.approx([factor, factor])
    assert compared["low"].tolist() == pytest.approx([factor, factor])
    assert compared["a_us"].tolist() == pytest.approx([6, 37])
    assert compared["b_us"].tolist() == pytest.approx([6 * factor, 37 * factor])
    assert compared["launches"].tolist() == [5, 5]
    assert exit_code(compared) == code


def test_a_change_within_the_margin_is_equal(tmp_path: Path) -> None:
    assert set(compare(*runs(tmp_path, 1.04), margin=0.05)["verdict"]) == {"equal"}
    assert set(compare(*runs(tmp_path, 1.04), margin=0.03)["verdict"]) == {"slower"}
    with pytest.raises(InputError, match="margin -1 must be a share"):
        compare(*runs(tmp_path), margin=-1)


def test_one_launch_or_few_trials_call_nothing(tmp_path: Path) -> None:
    one = compare(*runs(tmp_path, 2.0, repeats=(1, 3, 5)))
    assert set(one["verdict"]) == {"unclear"}
    assert set(one["reason"]) == {"one launch says nothing about the variance between launches"}
    assert one["ratio"].tolist() == pytest.approx([2, 2])
    assert exit_code(one) == 0
    few = compare(*runs(tmp_path, 2.0, repeats=(3, 1, 2), spread=(0.1, 0, 0.1)))
    assert set(few["verdict"]) == {"unclear"}
    assert set(few["interval"]) == {"range"}
    noisy = runs(tmp_path, 2.0, repeats=(3, 1, 2), spread=(0.1, 0, 0.1))
    sides = [frame[frame["tokens_per_rank"] == 1] for frame in noisy]
    low = sides[1]["latency_us"].min() / sides[0]["latency_us"].max()
    assert few.set_index("tokens_per_rank").loc[1, "low"] == pytest.approx(low)


def test_worst_comes_first(tmp_path: Path) -> None:
    latencies = {1: (10, 10), 2: (10, 30), 4: (10, 5), 8: (10, 20)}
    sides = [
        load(write(tmp_path / name, [r for t, pair in latencies.items() for r in trials(point("x", t), pair[side])]))
        for side, name in enumerate("ab")
    ]
    compared = compare(*sides)
    assert compared["tokens_per_rank"].tolist() == [2, 8, 1, 4]
    assert compared["verdict"].tolist() == ["slower", "slower", "equal", "faster"]


def test_what_makes_a_point_incomparable_is_named(tmp_path: Path) -> None:
    of = point("x", 4)
    base = load(write(tmp_path / "a", trials(of)))

    def against(**columns: Any) -> pd.Series:
        return compare(base, load(write(tmp_path / "b", trials(of, 10.0, **columns)))).iloc[0]

    machine = against(machine="other")
    assert (machine["verdict"], machine["reason"]) == ("not comparable", "machine: beef / other")
    assert exit_code(machine.to_frame().T) == 3
    several = against(boundary="copy_out transfer", tuned=True, ids_hash="1")
    assert several["reason"] == (
        "boundary: transfer / copy_out transfer; tuned: False / True; ids_hash: not reported / 1"
    )
    noted = against(measure_hash="f" * 64, backend_version="2")
    assert (noted["verdict"], noted["reason"]) == ("equal", "")
    assert noted["note"] == "measure_hash: cafe / ffffffffffff; backend_version: 1 / 2"


def test_factors_that_differ_are_named(tmp_path: Path) -> None:
    a = load(write(tmp_path / "a", trials(point("x", 4))))
    b = a.assign(point_id="other", placement="strided", domain="nvlink", options='{"n":2}')
    compared = compare(a, b)
    assert len(compared) == 1
    assert compared.iloc[0]["verdict"] == "not comparable"
    assert compared.iloc[0]["reason"] == 'options: {} / {"n":2}; domain: cpu / nvlink; placement: contiguous / strided'
    assert exit_code(compared) == 3


def test_points_of_one_run_only_are_listed(tmp_path: Path) -> None:
    a = load(write(tmp_path / "a", trials(point("x", 4)) + trials(point("x", 8))))
    b = load(write(tmp_path / "b", trials(point("x", 4)) + trials(point("y", 8))))
    found = compare(a, b)[["backend", "tokens_per_rank", "verdict"]].values.tolist()
    assert found == [["x", 8, "only in A"], ["y", 8, "only in B"], ["x", 4, "equal"]]


def test_failed_and_flagged_rows_are_said(tmp_path: Path) -> None:
    of = point("x", 4)
    failed: dict[str, Any] = {"status": "error", "reason": "rank 1 died"}
    a = load(write(tmp_path / "a", trials(of)))
    b = load(write(tmp_path / "b", trials(of, flags="throttled")[:4] + trials(of, **failed)[4:]))
    line = compare(a, b).iloc[0]
    assert line["verdict"] == "not comparable"
    assert line["reason"] == "B has no row to rest on: 6 error, 4 flagged throttled"
    assert compare(a, b).attrs["note"] == "B: 10 of 10 rows left out: 6 error, 4 throttled"
    assert "are used too, with what their flags say against them, by --keep throttled" in text_of(compare(a, b), a, b)
    assert "--keep" not in text_of(compare(a, a), a, a)
    assert compare(a, load(write(tmp_path / "c", trials(of, flags="throttled"))), keep=["throttled"]).iloc[0][
        "verdict"
    ] == ("equal")


def test_only_the_whole_pair_decides(tmp_path: Path) -> None:
    of = point("x", 4, regime=Regime.ENTRY)
    a = load(write(tmp_path / "a", trials(of) + trials(of, phase=Phase.DISPATCH)))
    b = load(write(tmp_path / "b", trials(of) + trials(of, 20.0, phase=Phase.DISPATCH)))
    compared = compare(a, b)
    assert compared[["phase", "headline", "verdict"]].values.tolist() == [
        ["dispatch", False, "slower"],
        ["round_trip", True, "equal"],
    ]
    assert exit_code(compared) == 0
    assert exit_code(compared[~compared["headline"]]) == 3


def test_two_versions_in_one_side_are_no_side(tmp_path: Path) -> None:
    of = point("x", 4)
    a = load(write(tmp_path / "a", trials(of)))
    b = load(write(tmp_path / "b", trials(of) + trials(of, run_id="run-z", backend_version="2")))
    line = compare(a, b).iloc[0]
    assert line["verdict"] == "not comparable"
    assert line["reason"] == "B holds the point under several backend_version: give one run"


@pytest.mark.parametrize("repeats", [(2, 1, 4), (3, 1, 3), (5, 1, 3), (5, 3, 2)])
def test_runs_of_the_same_are_flagged_in_at_most_five_of_a_hundred(tmp_path: Path, repeats) -> None:
    compared = compare(*runs(tmp_path, repeats=repeats, spread=(0.08, 0.02, 0.03), experiments=80), resamples=300)
    assert len(compared) == 160
    assert compared["verdict"].isin(["slower", "faster"]).mean() <= 0.05
    holds = (compared["low"] <= 1) & (compared["high"] >= 1)
    assert 0.93 <= holds.mean() <= 1


def test_a_regression_is_seen_and_small_noise_is_equal(tmp_path: Path) -> None:
    quiet = (0.005, 0.002, 0.005)
    slower = compare(*runs(tmp_path, 1.1, spread=quiet, experiments=20), resamples=300)
    assert (slower["verdict"] == "slower").mean() > 0.95
    same = compare(*runs(tmp_path, spread=quiet, experiments=20), resamples=300)
    assert (same["verdict"] == "equal").mean() > 0.9


def text_of(compared: pd.DataFrame, *frames: pd.DataFrame) -> str:
    console = Console(width=200, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(compare_table(compared, *frames))
    return capture.get()


def test_the_table_fits_and_says_what_it_rests_on(tmp_path: Path) -> None:
    frames = runs(tmp_path, 1.2, repeats=(3, 1, 3), spread=(0.01, 0, 0.01))
    frames[1] = frames[1].assign(backend_version="2", run_id="20260131-120000-a_rather_long_name_of_a_sweep-1a2b")
    frames[0] = frames[0].assign(backend="a_backend_with_a_very_long_name", latency_us=123456.7)
    frames[1] = frames[1].assign(backend="a_backend_with_a_very_long_name", latency_us=frames[1]["latency_us"] / 1e5)
    text = text_of(compare(*frames), *frames)
    assert max(map(len, text.splitlines())) <= 100
    text = " ".join(text.split())
    assert "at least 3 launches x 1 seeds x 3 chains" in text
    assert "within_launch: fewer than 5 launches" in text
    assert "at all points backend_version: 1 / 2" in text
    assert "round trips and layers at a margin of 3 %: 2 faster" in text


def test_an_empty_comparison_says_so(tmp_path: Path) -> None:
    frames = [frame.iloc[:0] for frame in runs(tmp_path)]
    compared = compare(*frames)
    assert len(compared) == 0
    assert exit_code(compared) == 3
    assert "Nothing could be compared." in text_of(compared, *frames)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = point("x", 4)
    same, slow = trials(of), trials(of, 12.0, run_id="run-b")
    a, b = (str(write(tmp_path / name, rows)) for name, rows in (("a", same), ("b", slow)))
    assert cli(["compare", a, a]) == 0
    assert "Verdict: no round trip or layer is slower" in capsys.readouterr().out
    assert cli(["compare", a, b]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "1.20" in out
    assert "Verdict: slower" in out
    assert cli(["compare", a, b, "--margin", "0.25"]) == 0
    assert "at a margin of 25 %" in capsys.readouterr().out
    other = str(write(tmp_path / "c", trials(point("z", 1))))
    assert cli(["compare", a, other]) == 3
    assert "no round trip or layer could be compared" in capsys.readouterr().out
    assert cli(["compare", a, str(tmp_path / "absent")]) == 2  # not 1, which is slower
    assert "does not exist" in capsys.readouterr().err
    assert cli(["compare", a, b, "--margin", "-1"]) == 2
    capsys.readouterr()


def test_the_command_says_which_damaged_units_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, report_points(["shm_fence"], [Regime.STEADY], tokens=(1,)))
    whole = write(tmp_path / "whole", trials(point("x", 4)))
    unit = min((run / "units").iterdir())
    unit.write_bytes(unit.read_bytes()[:100])
    assert cli(["compare", str(run), str(whole)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"epcross: {run}: 1 damaged units are left out: {unit.name}")


def test_the_command_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = point("x", 4)
    a = write(tmp_path / "a", trials(of) + trials(point("x", 8)))
    b = write(tmp_path / "b", trials(of, 12.0, run_id="run-b"))
    assert cli(["compare", str(a), str(b), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["runs_a"], document["runs_b"]) == (["run-a"], ["run-b"])
    assert (document["margin"], document["exit_code"]) == (0.03, 1)
    assert document["verdicts"] == {"slower": 1, "only in A": 1}
    slower, only = document["points"]
    assert (slower["verdict"], slower["ratio"], slower["launches"]) == (Verdict.SLOWER, pytest.approx(1.2), 5)
    assert (only["ratio"], only["launches"], only["within_launch"], only["interval"]) == (None,) * 4
    assert not np.isnan(slower["low"])
