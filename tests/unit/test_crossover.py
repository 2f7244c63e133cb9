import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_values import simulate

from epcross.harness.analysis.crossover import ends_of, find, judge, lead, spans
from epcross.harness.errors import InputError

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CROSSING = 20.0


def early(tokens: int) -> float:
    """Fast at few tokens."""
    return 5.0 + tokens * 0.5


def late(tokens: int) -> float:
    """Overtakes `early` at `CROSSING`: 5 + 20 / 2 = 10 + 20 / 4."""
    return 10.0 + tokens * 0.25


def pair(folder: Path, a=early, b=late, *, repeats=(5, 1, 3), spread=(0.0, 0.0, 0.0), tokens=TOKENS, **more):
    return simulate(folder, {"a": a, "b": b}, tokens=tokens, repeats=repeats, spread=spread, **more)


def judged(ratio: list[float], draws: list[list[float]] | None = None, margin: float = 0.03, **more):
    values = np.array(ratio)
    ratios = values[:, None] if draws is None else np.array(draws).T
    return judge([2**i for i in range(len(ratio))], values, ratios, ("a", "b"), margin, **more)


def test_leads_start_beyond_the_margin() -> None:
    assert lead(np.array([1.04, 1.03, 1.0, 1 / 1.03, 0.96]), 0.03).tolist() == [1, 0, 0, 0, -1]
    assert lead(np.array([1.001, 0.999]), 0).tolist() == [1, -1]


def test_one_change_is_a_crossing_between_its_points() -> None:
    found = judged([1.5, 1.25, 0.8, 0.5])
    assert (found["state"], found["reason"]) == ("crossed", "")
    assert (found["bracket_low"], found["bracket_high"]) == (2, 4)
    assert found["estimate"] == pytest.approx(2 * 2**0.5)  # halfway, on logarithmic scales
    assert (found["low"], found["high"]) == (found["estimate"],) * 2
    assert (found["faster_below"], found["faster_above"]) == ("a", "b")


def test_points_that_count_as_equal_lie_inside_the_bracket() -> None:
    found = judged([0.5, 0.98, 1.02, 1.5])
    assert found["state"] == "crossed"
    assert (found["bracket_low"], found["bracket_high"]) == (1, 8)
    assert 2 < found["estimate"] < 4
    assert (found["faster_below"], found["faster_above"]) == ("b", "a")


def test_several_changes_are_multiple() -> None:
    found = judged([1.5, 0.5, 1.5, 0.5])
    assert found["state"] == "multiple"
    assert (found["bracket_low"], found["bracket_high"]) == (1, 8)
    assert judged([1.5, 0.5, 1.5])["state"] == "multiple"


def test_no_change_is_none_in_range() -> None:
    found = judged([1.5, 1.2, 1.01])
    assert found["state"] == "none in range"
    assert np.isnan([found["estimate"], found["low"], found["high"], found["bracket_low"]]).all()
    assert (found["faster_below"], found["faster_above"]) == ("a", "equal")
    assert (found["leads_from"], found["leads_to"]) == (TOKENS[0], TOKENS[1])
    equal = judged([1.01, 0.99, 1.0])
    assert (equal["state"], equal["faster_below"], equal["faster_above"]) == ("none in range", "equal", "equal")


def test_the_margin_decides_what_is_a_change() -> None:
    assert judged([1.04, 0.98], margin=0.03)["state"] == "none in range"
    assert judged([1.04, 0.96], margin=0.03)["state"] == "crossed"
    assert judged([1.04, 0.96], margin=0.05)["faster_below"] == "equal"


def test_curves_that_disagree_are_ambiguous() -> None:
    crossed, not_crossed = [1.5, 0.7], [1.5, 1.2]
    found = judged(crossed, [crossed] * 90 + [not_crossed] * 10)
    assert found["state"] == "ambiguous"
    assert found["reason"] == "only 90.0% of the resampled curves are 'crossed'"
    assert found["high"] == np.inf  # a tenth of the curves cross beyond the range
    assert (found["faster_below"], found["faster_above"]) == ("", "")
    assert judged(crossed, [crossed] * 98 + [not_crossed] * 2)["state"] == "crossed"
    below = judged(crossed, [crossed] * 90 + [[0.8, 0.7]] * 10)
    assert below["low"] == 0


def test_what_must_not_be_called_is_ambiguous_and_still_estimated() -> None:
    found = judged([1.5, 0.5], objection="one launch says nothing about the variance between launches")
    assert found["state"] == "ambiguous"
    assert found["reason"].startswith("one launch")
    assert 1 < found["estimate"] < 2


def test_a_crossing_without_noise_is_found(tmp_path: Path) -> None:
    found = find(pair(tmp_path), "a", "b")
    assert len(found) == 1
    line = found.iloc[0]
    assert (line["a"], line["b"], line["state"]) == ("a", "b", "crossed")
    assert (line["bracket_low"], line["bracket_high"]) == (16, 32)
    assert line["estimate"] == pytest.approx(CROSSING, rel=0.02)  # straight between the points on a log-log scale
    assert (line["tokens_low"], line["tokens_high"], line["points"]) == (1, 256, 9)
    assert (line["launches"], line["seeds"], line["chains"], line["trials"]) == (5, 1, 3, 15)
    assert not line["cross_allocation"]
    mirrored = find(pair(tmp_path), "b", "a").iloc[0]
    assert mirrored["estimate"] == pytest.approx(line["estimate"])
    assert (mirrored["faster_below"], mirrored["faster_above"]) == ("a", "b")


def test_few_launches_widen_and_one_decides_nothing(tmp_path: Path) -> None:
    spread = (0.03, 0.0, 0.02)
    widths = []
    for launches in (2, 3, 5):
        rows = pair(tmp_path, repeats=(launches, 1, 6), spread=spread, experiments=20)
        found = find(rows, "a", "b", resamples=300)
        widths.append((found["high"] / found["low"].clip(lower=1)).clip(upper=256).median())
        assert (found["within_launch"] == (launches < 5)).all()
    assert widths[0] > widths[1] > widths[2] > 1
    one = find(pair(tmp_path, repeats=(1, 3, 6), spread=spread), "a", "b").iloc[0]
    assert (one["state"], one["interval"]) == ("ambiguous", "bootstrap")
    assert "one launch" in one["reason"]
    few = find(pair(tmp_path, repeats=(3, 1, 2), spread=spread), "a", "b").iloc[0]
    assert (few["state"], few["interval"]) == ("ambiguous", "range")


def test_groups_by_conditions_and_says_what_must_not_be_mixed(tmp_path: Path) -> None:
    rows = pair(tmp_path, experiments=3)
    assert find(rows, "a", "b")["model"].tolist() == ["m0000", "m0001", "m0002"]
    assert find(rows, "a", "b", by=["model", "ep_size"]).columns[:4].tolist() == ["model", "ep_size", "a", "b"]
    with pytest.raises(InputError, match="model: m0000, m0001, m0002 are mixed in one group; select one, or add"):
        find(rows, "a", "b", by=["ep_size"])
    with pytest.raises(InputError, match="no column modell"):
        find(rows, "a", "b", by=["modell"])
    with pytest.raises(InputError, match="`by` names no column"):
        find(rows, "a", "b", by=[])
    with pytest.raises(InputError, match=r"no row with backend c beside .* There are: a, b"):
        find(rows, "a", "c")
    with pytest.raises(InputError, match="machine does not tell subjects apart; use backend, options"):
        find(rows, {"machine": "x"}, "b")
    with pytest.raises(InputError, match=r"margin -0.1 must be a share"):
        find(rows, "a", "b", margin=-0.1)


def test_a_subject_can_be_one_of_several_options(tmp_path: Path) -> None:
    rows = pair(tmp_path)
    options = rows["options"].where(rows["backend"] == "b", '{"fast":1}')
    two = pd.concat([rows, rows[rows["backend"] == "a"].assign(options='{"fast":1}')], ignore_index=True)
    with pytest.raises(InputError, match=r'options: \{"fast":1\}, \{\} \(a\) are mixed'):
        find(two, "a", "b")
    assert find(two, {"backend": "a", "options": "{}"}, "b").iloc[0]["state"] == "crossed"
    assert find(rows.assign(options=options), "a", "b").iloc[0]["state"] == "crossed"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (
            1,
            2,
            "1 is no subject; give the name of a backend, such as 'shm_fence', or a mapping with values of backend, ",
        ),
        ("a", None, "None is no subject"),
        ("", "b", "'' is no subject"),
        ("a", {}, "{} is no subject"),
        ("a", "a", "both subjects are a, and nothing can be said of one beside itself; name two"),
        ("a", {"backend": "a"}, "both subjects are a, and nothing can be said of one beside itself; name two"),
    ],
)
def test_two_subjects_are_needed(tmp_path: Path, a, b, words: str) -> None:
    with pytest.raises(InputError) as caught:
        find(pair(tmp_path), a, b)
    assert words in str(caught.value)


def test_domains_are_not_set_against_each_other_unless_told(tmp_path: Path) -> None:
    rows = pair(tmp_path)
    apart = rows.assign(domain=rows["domain"].where(rows["backend"] == "a", "nvlink"))
    with pytest.raises(InputError, match="rows of the domains cpu, nvlink are not comparable"):
        find(apart, "a", "b")
    assert find(apart, "a", "b", by=["model"], mixed=True).iloc[0]["state"] == "crossed"
    # what is only loaded beside them does no harm
    beside = pd.concat([rows, rows.assign(backend="c", domain="published")], ignore_index=True)
    beside["domain"] = beside["domain"].astype(rows["domain"].dtype)
    assert len(find(beside, "a", "b")) == 1


def test_only_common_tokens_count_and_other_allocations_are_marked(tmp_path: Path) -> None:
    rows = pair(tmp_path)
    part = rows[(rows["backend"] == "a") | (rows["tokens_per_rank"] >= 64)]
    found = find(part, "a", "b").iloc[0]
    assert (found["state"], found["tokens_low"], found["faster_below"]) == ("none in range", 64, "b")
    none = find(rows[(rows["backend"] == "a") == (rows["tokens_per_rank"] < 64)], "a", "b")
    assert len(none) == 0
    other = rows.assign(allocation_id=rows["backend"])
    assert find(other, "a", "b").iloc[0]["cross_allocation"]


def test_flagged_rows_are_left_out_unless_kept(tmp_path: Path) -> None:
    rows = pair(tmp_path)
    flagged = rows.assign(is_late_start=rows["tokens_per_rank"] > 8)
    found = find(flagged, "a", "b")
    assert found.iloc[0]["tokens_high"] == 8
    assert found.attrs["note"] == "150 of 270 rows left out: 150 late_start"
    assert find(flagged, "a", "b", keep=["late_start"]).iloc[0]["state"] == "crossed"


@pytest.mark.parametrize("repeats", [(3, 1, 3), (5, 1, 3), (5, 3, 2)])
def test_intervals_hold_the_truth_as_often_as_they_say(tmp_path: Path, repeats: tuple[int, int, int]) -> None:
    """Stated: between 91 and 100 % of 95 % intervals hold the crossing, from 2 launches on."""
    rows = pair(tmp_path, repeats=repeats, spread=(0.05, 0.02, 0.03), experiments=150)
    found = find(rows, "a", "b", resamples=300)
    assert len(found) == 150
    crossing = found["low"].le(CROSSING) & found["high"].ge(CROSSING)
    assert 0.91 <= crossing.mean() <= 1
    if repeats[0] == 5:
        called = found[found["state"] == "crossed"]
        assert len(called) > 100  # it is no answer to never say anything
        assert (called["faster_below"] == "a").all()
        assert (called["faster_above"] == "b").all()
        assert (called["high"] / called["low"]).median() < 5


@pytest.mark.parametrize("repeats", [(2, 1, 4), (3, 1, 3), (5, 1, 3), (5, 3, 2)])
def test_a_pair_of_the_same_is_flagged_in_at_most_five_of_a_hundred(tmp_path: Path, repeats) -> None:
    rows = pair(tmp_path, early, early, repeats=repeats, spread=(0.08, 0.02, 0.03), experiments=200)
    found = find(rows, "a", "b", resamples=300)
    flagged = (found["state"] != "ambiguous") & ~(found["faster_below"].eq("equal") & found["faster_above"].eq("equal"))
    assert flagged.mean() <= 0.05


def test_a_clear_difference_is_called(tmp_path: Path) -> None:
    rows = pair(tmp_path, early, lambda t: 1.3 * early(t), spread=(0.03, 0.01, 0.01), experiments=50)
    found = find(rows, "a", "b", resamples=300)
    assert (found["state"] == "none in range").mean() > 0.9
    assert set(found["faster_below"]) <= {"a", ""}


@pytest.mark.timing
def test_two_hundred_pairs_take_seconds(tmp_path: Path) -> None:
    """Goal: 200 pairs x 12 token counts x 10 trials with 2,000 resamples in under 10 s; the slack is the machine's."""
    rows = pair(tmp_path, repeats=(5, 1, 2), spread=(0.05, 0, 0.05), tokens=[*TOKENS, 384, 512, 768], experiments=200)
    start_s = time.process_time()
    found = find(rows, "a", "b")
    elapsed_s = time.process_time() - start_s
    assert len(found) == 200
    assert (found["trials"] == 10).all()
    assert elapsed_s < 15


@pytest.mark.parametrize(
    ("there", "text", "parts"),
    [
        ([False] * 5, "", []),
        ([True] * 5, "1..16", [(1, 16)]),
        ([True, False, True, True, False], "1 4..8", [(1, 1), (4, 8)]),
        ([False, True, False, False, True], "2 16", [(2, 2), (16, 16)]),
    ],
)
def test_token_counts_are_joined_with_their_neighbours(
    there: list[bool], text: str, parts: list[tuple[int, int]]
) -> None:
    assert spans([1, 2, 4, 8, 16], there) == text
    assert ends_of(text) == parts


def test_where_the_change_is_unclear_sure_leads_are_told() -> None:
    """A tenth of the curves says that b is ahead at 8 tokens, and half of them that the two are equal at 4."""
    curve, other, third = [3.0, 2.0, 1.04, 1.0], [3.0, 2.0, 1.02, 1.0], [3.0, 2.0, 1.02, 0.9]
    found = judged(curve, [curve] * 5 + [other] * 4 + [third])
    assert (found["state"], found["faster_below"], found["faster_above"]) == ("ambiguous", "", "")
    assert found["reason"] == "only 90.0% of the resampled curves are 'none in range'"
    assert (found["a_leads"], found["b_leads"]) == ("1..2", "")
    turned = judged([1 / ratio for ratio in curve], [[1 / ratio for ratio in draw] for draw in [curve] * 9 + [third]])
    assert (turned["a_leads"], turned["b_leads"]) == ("", "1..2")


def test_nothing_is_sure_on_too_few_launches() -> None:
    found = judged([3.0, 2.0], objection="one launch")
    assert (found["state"], found["a_leads"], found["b_leads"]) == ("ambiguous", "", "")


def test_both_sides_of_a_crossing_are_told() -> None:
    found = judged([1.5, 1.25, 1.0, 0.5])
    assert (found["state"], found["a_leads"], found["b_leads"]) == ("crossed", "1..2", "8")
