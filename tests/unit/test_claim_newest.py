"""Of runs that answer a claim again with other code the newest counts, if it answers as much; the others are named."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from claims_values import BOOK, book_of, measured, verdict_of

from epcross.harness.claims.findings import Judgement
from epcross.harness.claims.judge import exit_code
from epcross.harness.claims.verdict import Verdict

OPEN = {**BOOK.claim("P01").open, "regime": ("steady",), "routing": ("uniform",), "dispatch_format": ("bf16",)}
OLD, NEW, MIDDLE = "20260101-000000-a-0001", "20260103-000000-b-0002", "20260102-000000-c-0003"

Factor = float | Callable[[int], float]


CODES = {OLD: "aaaaaaaaaaaaaaaa", NEW: "bbbbbbbbbbbbbbbb", MIDDLE: "cccccccccccccccc"}


def taken(folder: Path, factor: Factor, day: int, run_id: str, *backends: str, **options: Any) -> pd.DataFrame:
    """Ours at 10 us, each of the backends `factor` times as slow, by other code in each run, of a day in January."""
    at = factor if callable(factor) else lambda _: factor
    curves = {"onesided_fence": lambda _: 10.0, **{name: lambda tokens: 10.0 * at(tokens) for name in backends}}
    started_at = f"2026-01-0{day}T00:00:00+00:00"
    return measured(
        folder, curves, **{"run_id": run_id, "measure_hash": CODES[run_id], "started_at": started_at, **options}
    )


def slow_when_large(tokens: int) -> float:
    """Within 1.2 to 3 below 128 tokens, outside from there on."""
    return 2.0 if tokens < 128 else 1.05


def judged(*runs: pd.DataFrame) -> Judgement:
    """The same, whichever order the runs are named in."""
    found = [verdict_of(book_of("P01", open=OPEN), *order) for order in itertools.permutations(runs)]
    assert len({(one.verdict, exit_code([one]), _counting(one)) for one in found}) == 1
    return found[0]


def _counting(found: Judgement) -> tuple[str, ...]:
    return tuple(sorted(run for one in found.readings if one.headline for run in one.runs))


def test_the_newest_of_two_answers_counts(tmp_path: Path) -> None:
    found = judged(taken(tmp_path, 5.0, 1, OLD, "deepep_v2"), taken(tmp_path, 2.0, 3, NEW, "deepep_v2"))
    assert found.verdict is Verdict.INSIDE  # 5 were beyond 1.2 to 3
    assert found.reason.endswith(
        f"Left out: {OLD}, 1 reading: it differs from {NEW}, which is newer, in measure_hash (aaaaaaaaaaaa, there "
        "bbbbbbbbbbbb)"
    )
    assert {(one.runs, one.headline) for one in found.readings} == {((OLD,), False), ((NEW,), True)}


def test_of_equal_times_the_name_decides_and_the_words_say_so(tmp_path: Path) -> None:
    found = judged(taken(tmp_path, 5.0, 1, OLD, "deepep_v2"), taken(tmp_path, 2.0, 1, NEW, "deepep_v2"))
    assert found.verdict is Verdict.INSIDE
    assert f"Left out: {OLD}, 1 reading: it differs from {NEW}, of the same time and later by name, in" in found.reason


def test_a_newer_run_that_cannot_answer_supersedes_none(tmp_path: Path) -> None:
    """It has ours alone, so no ratio."""
    found = judged(taken(tmp_path, 2.0, 1, OLD, "deepep_v2"), taken(tmp_path, 2.0, 3, NEW))
    assert found.verdict is Verdict.INSIDE
    assert "Left out:" not in found.reason


def test_a_newer_run_of_a_few_batches_cannot_undo_what_was_found_at_others(tmp_path: Path) -> None:
    old = taken(tmp_path, slow_when_large, 1, OLD, "deepep_v2", repeats=(3, 2, 2))
    new = taken(tmp_path, 2.0, 3, NEW, "deepep_v2", tokens=(8,), repeats=(3, 2, 2))
    assert [judged(old).verdict, judged(new).verdict] == [Verdict.OUTSIDE, Verdict.INSIDE]
    found = judged(old, new)
    assert (found.verdict, exit_code([found])) == (Verdict.OUTSIDE, 1)
    assert _counting(found) == (OLD, NEW)
    assert "Left out:" not in found.reason
    assert "outside (at 128 tokens, 512 tokens) for machine" in found.reason
    assert "it depends" not in found.reason


def test_a_newer_run_of_one_launch_cannot_undo_what_was_found(tmp_path: Path) -> None:
    old = taken(tmp_path, 1.05, 1, OLD, "deepep_v2", repeats=(4, 2, 2))
    new = taken(tmp_path, 2.0, 3, NEW, "deepep_v2", repeats=(1, 3, 3))
    assert judged(new).verdict is Verdict.INCONCLUSIVE
    found = judged(old, new)
    assert (found.verdict, exit_code([found])) == (Verdict.OUTSIDE, 1)
    assert _counting(found) == (OLD, NEW)
    assert "one launch says nothing about the variance between launches" in found.reason


def test_a_newer_run_without_one_of_the_backends_supersedes_none(tmp_path: Path) -> None:
    """Over the slower of the two alone the claim would hold."""
    both = {"deepep_v2": 1.05, "deepep_ll": 2.0}
    parts = [taken(tmp_path / name, factor, 1, OLD, name) for name, factor in both.items()]
    parts[1] = parts[1][parts[1]["backend"] == "deepep_ll"]
    found = judged(pd.concat(parts, ignore_index=True), taken(tmp_path, 2.0, 3, NEW, "deepep_ll"))
    assert (found.verdict, exit_code([found])) == (Verdict.OUTSIDE, 1)


def test_a_newer_run_under_other_conditions_answers_another_question(tmp_path: Path) -> None:
    old = taken(tmp_path, 1.05, 1, OLD, "deepep_v2")
    found = judged(old, taken(tmp_path, 2.0, 3, NEW, "deepep_v2", capacity="4096"))
    assert (found.verdict, exit_code([found])) == (Verdict.OUTSIDE, 1)


def test_what_straddles_a_bound_supersedes_if_it_was_measured_as_often(tmp_path: Path) -> None:
    old = taken(tmp_path, 1.05, 1, OLD, "deepep_v2", repeats=(4, 2, 2))
    as_often = taken(tmp_path, 1.2, 3, NEW, "deepep_v2", repeats=(4, 2, 2))
    found = judged(old, as_often)
    assert (found.verdict, exit_code([found]), _counting(found)) == (Verdict.INCONCLUSIVE, 0, (NEW,))
    for fewer in ((3, 2, 2), (4, 2, 1)):
        found = judged(old, taken(tmp_path, 1.2, 3, NEW, "deepep_v2", repeats=fewer))
        assert (found.verdict, exit_code([found]), _counting(found)) == (Verdict.OUTSIDE, 1, (OLD, NEW))


def test_a_run_that_is_superseded_itself_supersedes_none(tmp_path: Path) -> None:
    """The newest was measured as often as the one before it, which is sure and so would supersede the oldest."""
    old = taken(tmp_path, 1.05, 1, OLD, "deepep_v2", repeats=(6, 2, 2))
    middle = taken(tmp_path, 2.0, 2, MIDDLE, "deepep_v2", repeats=(3, 2, 2))
    new = taken(tmp_path, 1.2, 3, NEW, "deepep_v2", repeats=(3, 2, 2))
    assert _counting(judged(old, middle)) == (MIDDLE,)
    found = judged(old, middle, new)
    assert (found.verdict, exit_code([found]), _counting(found)) == (Verdict.OUTSIDE, 1, (OLD, NEW))


def test_a_ratio_rests_on_what_both_sides_have(tmp_path: Path) -> None:
    """Of the older run ours has a batch more, of which nothing was said."""
    old = taken(tmp_path, 1.05, 1, OLD, "deepep_v2")
    old = old[(old["backend"] != "deepep_v2") | (old["tokens_per_rank"] < 512)]
    new = taken(tmp_path, 2.0, 3, NEW, "deepep_v2", tokens=(1, 8, 32, 128))
    assert _counting(judged(old, new)) == (NEW,)


def test_runs_of_the_same_code_are_read_together(tmp_path: Path) -> None:
    runs = [
        taken(tmp_path, 2.0, day, run_id, "deepep_v2", measure_hash="aaaaaaaaaaaaaaaa")
        for day, run_id in ((1, OLD), (3, NEW))
    ]
    (reading,) = judged(*runs).readings
    assert reading.runs == (OLD, NEW)
    assert reading.headline


def test_the_fastest_of_deepep_is_with_most_sms_too(tmp_path: Path) -> None:
    rows = measured(
        tmp_path, {"onesided_fence": lambda _: 10.0, "deepep_v2": lambda _: 25.0, "deepep_v2_max": lambda _: 15.0}
    )
    found = verdict_of(book_of("P01", open=OPEN), rows)
    (head,) = [one for one in found.readings if one.headline]
    assert (head.baseline, found.verdict) == ("fastest", Verdict.INSIDE)
    assert [round(finding.value, 1) for finding in head.findings] == [1.5] * 5
