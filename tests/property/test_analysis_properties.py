"""Properties of the analysis: what must hold for any numbers."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from epcross.harness.analysis.compare import Verdict, call
from epcross.harness.analysis.crossover import judge, lead
from epcross.harness.analysis.fit import fit_lines
from epcross.harness.analysis.resample import nan_median, widened

LATENCY = st.floats(0.5, 1e6)
RATIO = st.floats(0.05, 20)
MARGIN = st.floats(0, 0.5)


def curves(ratio: list[float], margin: float, names: tuple[str, str] = ("a", "b")):
    values = np.array(ratio)
    return judge([2**i for i in range(len(ratio))], values, values[:, None], names, margin)


def on_an_edge(values: list[float], margin: float) -> bool:
    """Where rounding decides: 1 / x need not be on the same side."""
    limits = (1 + margin, 1 / (1 + margin), 1)
    return any(math.isclose(value, limit, rel_tol=1e-9) for value in values for limit in limits)


@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=3, max_side=7), elements=st.one_of(LATENCY, st.just(math.nan)))
)
def test_nan_median_is_numpys(values: np.ndarray) -> None:
    there = ~np.isnan(values).all(axis=-1)
    assert np.array_equal(nan_median(values)[there], np.nanmedian(values[there], axis=-1))
    assert np.isnan(nan_median(values)[~there]).all()


@given(st.lists(RATIO, min_size=1, max_size=8), MARGIN)
def test_changing_sides_changes_the_names_and_nothing_else(ratio: list[float], margin: float) -> None:
    one, other = curves(ratio, margin), curves([1 / value for value in ratio], margin, ("b", "a"))
    edge = any(
        math.isclose(value, limit, rel_tol=1e-9) for value in ratio for limit in (1 + margin, 1 / (1 + margin), 1)
    )
    if edge:
        return
    for name in ("state", "faster_below", "faster_above"):
        assert one[name] == other[name]
    for name in ("bracket_low", "bracket_high", "estimate", "low", "high"):
        assert one[name] == other[name] or math.isclose(one[name], other[name], rel_tol=1e-6) or math.isnan(one[name])


@given(st.lists(RATIO, min_size=1, max_size=8), MARGIN)
def test_a_crossing_lies_in_its_bracket_and_leads_differ_around_it(ratio: list[float], margin: float) -> None:
    found = curves(ratio, margin)
    leads = [value for value in lead(np.array(ratio), margin) if value]
    changes = sum(x != y for x, y in pairwise(leads))
    assert found["state"] == ("none in range" if changes == 0 else "crossed" if changes == 1 else "multiple")
    if changes:
        assert found["bracket_low"] <= found["estimate"] <= found["bracket_high"]
    if changes == 1:
        assert {found["faster_below"], found["faster_above"]} == {"a", "b"}


@given(st.tuples(RATIO, RATIO, RATIO).map(sorted), MARGIN)
def test_a_verdict_is_mirrored_by_exchanging_the_runs(values: list[float], margin: float) -> None:
    low, ratio, high = values
    if on_an_edge(values, margin):
        return
    mirror = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    one = call(ratio, low, high, margin)
    assert call(1 / ratio, 1 / high, 1 / low, margin) == mirror.get(one, one)


@given(st.floats(0, 1e3), st.floats(0.1, 1e3), st.floats(0.1, 100))
@settings(max_examples=50)
def test_a_line_is_found_in_any_unit(fixed_us: float, gbps: float, factor: float) -> None:
    moved = np.array([1e3, 1e5, 1e6, 1e8])
    latency_us = fixed_us + moved / gbps / 1e3
    found_us, found_gbps = fit_lines(moved, np.stack([latency_us, factor * latency_us]))
    assert np.allclose(found_us, [fixed_us, factor * fixed_us], rtol=1e-4, atol=1e-6 * latency_us[0])
    # the share of the bytes may be too small to be told from rounding
    if moved[-1] / gbps / 1e3 > 1e-3 * fixed_us:
        assert np.allclose(found_gbps, [gbps, gbps / factor], rtol=1e-4)


@given(arrays(np.float64, (2, 5), elements=LATENCY), st.integers(2, 50))
def test_widening_moves_away_from_the_estimate_and_never_across_it(draws: np.ndarray, launches: int) -> None:
    centre = np.median(draws, axis=1)
    wide = widened(centre, draws, launches)
    assert (wide > 0).all()
    moved = np.sign(draws - centre[:, None])
    assert (moved * wide >= moved * draws * (1 - moved * 1e-9)).all()
