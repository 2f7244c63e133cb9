"""Of runs that answer a claim again with other code the newest counts, and what is left out is named."""

from pathlib import Path

import pandas as pd
import pytest
from claims_values import BOOK, book_of, measured, verdict_of

from epcross.harness.claims.verdict import Verdict

OPEN = {**BOOK.claim("P01").open, "regime": ("steady",), "routing": ("uniform",), "dispatch_format": ("bf16",)}
OLD, NEW = "20260101-000000-a-0001", "20260102-000000-b-0002"


def taken(folder: Path, factor: float, day: int, run_id: str, sources: str, *backends: str) -> pd.DataFrame:
    """Ours at 10 us, DeepEP `factor` times as slow, by the code `sources` of a day in January."""
    curves = {"onesided_fence": lambda _: 10.0, **{name: lambda _: 10.0 * factor for name in backends}}
    started_at = f"2026-01-0{day}T00:00:00+00:00"
    return measured(folder, curves, run_id=run_id, measure_hash=sources, started_at=started_at)


@pytest.mark.parametrize("turned", [False, True])
def test_the_newest_of_two_answers_counts(tmp_path: Path, turned: bool) -> None:
    runs = [
        taken(tmp_path, 5.0, 1, OLD, "aaaaaaaaaaaaaaaa", "deepep_v2"),
        taken(tmp_path, 2.0, 2, NEW, "bbbbbbbbbbbbbbbb", "deepep_v2"),
    ]
    found = verdict_of(book_of("P01", open=OPEN), *(reversed(runs) if turned else runs))
    assert found.verdict is Verdict.INSIDE  # 5 were beyond 1.2 to 3
    assert found.reason.endswith(
        f"Left out: {OLD}, 1 reading: it differs from {NEW}, which is newer, in measure_hash (aaaaaaaaaaaa, there "
        "bbbbbbbbbbbb)"
    )
    assert {(one.runs, one.headline) for one in found.readings} == {((OLD,), False), ((NEW,), True)}


def test_a_newer_run_that_cannot_answer_supersedes_none(tmp_path: Path) -> None:
    """It has ours alone, so no ratio."""
    runs = (
        taken(tmp_path, 2.0, 1, OLD, "aaaaaaaaaaaaaaaa", "deepep_v2"),
        taken(tmp_path, 2.0, 2, NEW, "bbbbbbbbbbbbbbbb"),
    )
    found = verdict_of(book_of("P01", open=OPEN), *runs)
    assert found.verdict is Verdict.INSIDE
    assert "Left out:" not in found.reason


def test_runs_of_the_same_code_are_read_together(tmp_path: Path) -> None:
    runs = [taken(tmp_path, 2.0, day, run_id, "aaaaaaaaaaaaaaaa", "deepep_v2") for day, run_id in ((1, OLD), (2, NEW))]
    (reading,) = verdict_of(book_of("P01", open=OPEN), *runs).readings
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
