"""Verdicts: decided by where an interval lies, never by how it is written, and never bolder for knowing less."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.harness.claims.verdict import HOLDS, JUDGED, Better, Bounds, Verdict, call, every, whichever

numbers = st.floats(-1e6, 1e6, allow_nan=False)
judged = st.lists(st.sampled_from(JUDGED), min_size=1, max_size=8)
anything = st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=8)


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    lower, upper = sorted((draw(numbers), draw(numbers)))
    side = draw(st.sampled_from(["both", "lower", "upper"]))
    return Bounds(
        lower=None if side == "upper" else lower,
        upper=None if side == "lower" else upper,
        better=draw(st.sampled_from(list(Better))),
    )


@st.composite
def intervals(draw: st.DrawFn) -> tuple[float, float]:
    low, high = sorted((draw(numbers), draw(numbers)))
    return draw(st.sampled_from([(low, high), (low, low), (-math.inf, high), (low, math.inf)]))


def holds_at(claim: Bounds, value: float) -> bool:
    """The definition, for a number that is known exactly."""
    return (claim.lower is None or value >= claim.lower) and (claim.upper is None or value <= claim.upper)


def mirrored(claim: Bounds) -> Bounds:
    turned = {Better.HIGHER: Better.LOWER, Better.LOWER: Better.HIGHER, Better.NEITHER: Better.NEITHER}
    return Bounds(
        lower=None if claim.upper is None else -claim.upper,
        upper=None if claim.lower is None else -claim.lower,
        better=turned[claim.better],
    )


@given(bounds(), numbers)
def test_a_number_that_is_known_exactly_is_never_inconclusive(claim: Bounds, value: float) -> None:
    verdict = call(claim, value, value)
    assert (verdict is Verdict.INSIDE) == holds_at(claim, value)
    assert verdict in (Verdict.INSIDE, Verdict.OUTSIDE, Verdict.EXCEEDED)


@given(bounds(), intervals(), st.floats(0, 1))
def test_a_verdict_stands_for_every_number_of_the_interval(
    claim: Bounds, interval: tuple[float, float], share: float
) -> None:
    low, high = interval
    verdict = call(claim, low, high)
    inner = max(low, min(high, max(low, -2e6) + share * (min(high, 2e6) - max(low, -2e6))))
    if verdict is not Verdict.INCONCLUSIVE:
        assert call(claim, inner, inner) is verdict
    else:
        ends = [call(claim, max(low, -1e300), max(low, -1e300)), call(claim, min(high, 1e300), min(high, 1e300))]
        middle = [call(claim, end, end) for end in (claim.lower, claim.upper) if end is not None and low <= end <= high]
        assert len({*ends, *middle}) > 1  # it really straddles


@given(bounds(), intervals(), intervals())
def test_a_narrower_interval_only_decides_what_was_open(
    claim: Bounds, wide: tuple[float, float], other: tuple[float, float]
) -> None:
    low, high = max(wide[0], other[0]), min(wide[1], other[1])
    if low <= high and (before := call(claim, *wide)) is not Verdict.INCONCLUSIVE:
        assert call(claim, low, high) is before


@given(bounds(), intervals())
def test_the_mirror_image_has_the_same_verdict(claim: Bounds, interval: tuple[float, float]) -> None:
    assert call(mirrored(claim), -interval[1], -interval[0]) is call(claim, *interval)


@given(bounds(), intervals())
def test_exceeded_is_on_the_better_side_and_only_there(claim: Bounds, interval: tuple[float, float]) -> None:
    verdict = call(claim, *interval)
    neutral = Bounds(lower=claim.lower, upper=claim.upper)
    if verdict is Verdict.EXCEEDED:
        assert call(neutral, *interval) is Verdict.OUTSIDE
        above = claim.upper is not None and interval[0] > claim.upper
        assert claim.better is (Better.HIGHER if above else Better.LOWER)
    else:
        assert call(neutral, *interval) is verdict


@given(bounds())
def test_what_is_no_interval_is_refused(claim: Bounds) -> None:
    for low, high in ((2.0, 1.0), (math.nan, 1.0), (1.0, math.nan)):
        with pytest.raises(ValueError, match="no interval"):
            call(claim, low, high)


@given(judged, st.randoms())
def test_every_one_of_them_is_as_good_as_the_worst(verdicts: list[Verdict], order) -> None:
    found = every(verdicts)
    shuffled = verdicts[:]
    order.shuffle(shuffled)
    assert every(shuffled) is every([*verdicts, *verdicts]) is found
    assert (found is Verdict.OUTSIDE) == (Verdict.OUTSIDE in verdicts)
    assert (found in HOLDS) == all(verdict in HOLDS for verdict in verdicts)
    assert (found is Verdict.INSIDE) == (set(verdicts) == {Verdict.INSIDE})


@given(anything, st.randoms())
def test_whichever_of_them_it_is_must_agree(verdicts: list[Verdict], order) -> None:
    found = whichever(verdicts)
    shuffled = verdicts[:]
    order.shuffle(shuffled)
    assert whichever(shuffled) is whichever([*verdicts, *verdicts]) is found
    counted = {verdict for verdict in verdicts if verdict in JUDGED}
    assert (found in JUDGED) == bool(counted)
    if found in HOLDS:
        assert counted <= set(HOLDS)
    if found is Verdict.OUTSIDE:
        assert counted == {Verdict.OUTSIDE}
    if not counted:
        assert (found is Verdict.NOT_COMPARABLE) == (Verdict.NOT_COMPARABLE in verdicts)


def test_nothing_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="a verdict is needed"):
        whichever([])
    with pytest.raises(ValueError, match="that rest on numbers"):
        every([])
    with pytest.raises(ValueError, match="not measured"):
        every([Verdict.INSIDE, Verdict.NOT_MEASURED])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 3.0, Verdict.INSIDE),
        (3.01, 4.0, Verdict.EXCEEDED),
        (0.8, 1.19, Verdict.OUTSIDE),
        (1.1, 1.3, Verdict.INCONCLUSIVE),
        (2.9, 3.1, Verdict.INCONCLUSIVE),
        (0.5, math.inf, Verdict.INCONCLUSIVE),
    ],
)
def test_the_quoted_range(low: float, high: float, verdict: Verdict) -> None:
    assert call(Bounds(lower=1.2, upper=3.0, better=Better.HIGHER), low, high) is verdict


def test_up_to_must_be_reached() -> None:
    claim = Bounds(lower=2.16, upper=2.64, better=Better.HIGHER)
    assert call(claim, 1.9, 2.1) is Verdict.OUTSIDE
    assert call(claim, 2.3, 2.5) is Verdict.INSIDE


def test_bounds_read_well() -> None:
    texts = [str(Bounds(lower=low, upper=high)) for low, high in ((1.2, 3.0), (None, 0.0), (10.0, None), (0.0, 0.0))]
    assert texts == ["1.2..3", "<= 0", ">= 10", "0"]
