"""Pairs from a common start on a queue whose time the test decides."""

import pytest
from tests._fake_device import FakeDevice
from tests.contract.threads import Shared, ThreadGroup, on_ranks
from timed_pairs import Clock, Pair, parts

from epcross.harness.measuring.cuda_entry import (
    ENTRY_ITERATIONS,
    LEAST_HOLD_US,
    LONGEST_US,
    MOST_HOLD_US,
    SETTLE_ROUNDS,
    SHORT_ITERATIONS,
)
from epcross.harness.measuring.cuda_steady import HOLD_US
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.device import ClockOffset
from epcross.harness.terms import GraphSupport, Phase, Regime


class Slowing(Pair):
    """Each pair of a graph takes longer than the one before it; the first takes its 9 us."""

    def __init__(self, device: FakeDevice, clock: Clock, step_us: float) -> None:
        super().__init__(clock)
        self.device, self.step_us = device, step_us

    def dispatch(self, set_index: int) -> None:
        super().dispatch(set_index)
        self.clock.advance(self.step_us * (self.device.starts - 1))


def slowing(step_us, *, group=None, **costs):
    clock = Clock()
    device = FakeDevice(clock, advance=clock.advance, **costs)
    timer = CudaTimer(device, group or ThreadGroup(0, Shared(1)), graph=GraphSupport.YES)
    return timer, device, Slowing(device, clock, step_us)


def series(timer, pair, iterations=60, sets=2):
    return timer.series(Regime.ENTRY, pair, pairs=0, iterations=iterations, sets=sets)


@pytest.mark.parametrize("sets", [1, 2, 3])
def test_a_pair_that_slows_down_within_a_graph_is_timed_in_graphs_of_one(sets):
    timer, _, pair = slowing(2.0, stamp_us=0.5)
    seen = series(timer, pair, sets=sets)
    assert seen.graph_pairs == 1
    assert seen.values_us[Phase.ROUND_TRIP] == pytest.approx([9.5] * 60)
    assert seen.values_us[Phase.DISPATCH] == pytest.approx([3.5] * 60)
    assert seen.values_us[Phase.COMBINE] == pytest.approx([5.5] * 60)
    assert pair.calls[-240:] == list(range(sets)) * (240 // sets)  # two series and their fills, each set equally often
    assert len(set(seen.starts_ns)) == 60
    assert timer.instrument_us(Regime.ENTRY, sets=sets) == pytest.approx(0.5)


@pytest.mark.parametrize("step_us", [0.0, 0.008])
def test_a_pair_that_does_not_is_timed_in_long_ones(step_us):
    timer, _, pair = slowing(step_us)
    seen = series(timer, pair)
    assert seen.graph_pairs == ENTRY_ITERATIONS
    of_a_graph = [9 + step_us * i for i in range(ENTRY_ITERATIONS)]
    assert seen.values_us[Phase.ROUND_TRIP] == pytest.approx(of_a_graph * 3)


def test_what_holds_up_the_first_long_graph_makes_no_graphs_short():
    timer, _, pair = slowing(0.0)
    fast = pair.dispatch
    pair.dispatch = lambda s: (fast(s), pair.clock.advance(50 * (SHORT_ITERATIONS < len(pair.calls) <= 28)))  # type: ignore[method-assign]
    assert series(timer, pair).graph_pairs == ENTRY_ITERATIONS


def test_all_ranks_take_graphs_of_one_if_one_needs_them():
    def rank(group):
        timer, _, pair = slowing(2.0 * group.rank, group=group)
        return series(timer, pair).graph_pairs

    assert on_ranks(2, rank) == [1, 1]


@pytest.mark.parametrize(("step_us", "kept"), [(2.0, 2 * 2), (0.0, 2)], ids=["short", "long"])
def test_the_length_is_chosen_once_and_only_graphs_of_it_are_kept(step_us, kept):
    timer, device, pair = slowing(step_us)
    length = series(timer, pair).graph_pairs
    assert len(device.graphs) == kept  # whole and phases; of one pair, for each of two sets
    captured, pair.step_us = device.captured, 2.0 - step_us  # a later seed is timed as the first, whatever it does
    pair.calls.clear()
    assert series(timer, pair).graph_pairs == length
    assert device.captured == captured
    assert len(pair.calls) == 2 * 2 * 60  # nothing is compared again
    timer.close()
    assert len(device.graphs) == 0


@pytest.mark.parametrize(("times", "compared"), [(1.01, SHORT_ITERATIONS), (0.9, SETTLE_ROUNDS * (8 + 20))])
def test_pairs_that_take_long_are_not_compared(times, compared):
    timer, _, pair = slowing(0.0)
    slow = pair.dispatch
    pair.dispatch = lambda s: (slow(s), pair.clock.advance(times * LONGEST_US - 9))  # type: ignore[method-assign]
    assert series(timer, pair).graph_pairs == ENTRY_ITERATIONS
    assert len(pair.calls) == compared + 2 * 2 * 60


def test_the_gpu_is_held_before_each_graph_for_longer_than_enqueuing_one_takes():
    timer, device, pair = slowing(2.0, enqueue_us=15.0)
    device.log.clear()
    series(timer, pair, iterations=4)
    assert device.log[-4 * 4 :] == ["hold", "replay", "flush", "line_up"] * 4
    known = [LEAST_HOLD_US + 30.0]
    compared = [HOLD_US, *known * 7, HOLD_US, *known * 9]  # the first of a kind: not yet known
    phases, whole = [HOLD_US, *known * 7], known * 8
    assert device.held_us == [*compared, *phases, *whole]


def held_us(enqueue_us, graphs):
    """How long the GPU is held before each of so many graphs of a kind, if enqueuing one takes what `enqueue_us` gives
    for its index and the hold before it."""
    timer, device, pair = slowing(0.0)
    begun = iter(range(graphs))
    device.host_us = lambda enqueue: (enqueue(), enqueue_us(next(begun), device.held_us[-1]))[1]  # type: ignore[method-assign]
    timer._entry._replayed("entry", 2, graphs, 1, timer._entry._of_pair(pair), length=1)
    return device.held_us


def known_us(enqueue_us):
    return LEAST_HOLD_US + 2 * enqueue_us


def test_a_host_that_is_late_once_holds_up_no_later_graph():
    assert held_us(lambda i, _: 30e6 if i == 2 else 15.0, 6) == [HOLD_US, *[known_us(15)] * 5]


def test_a_host_that_is_late_before_anything_is_known_holds_up_the_next_graph_for_no_longer_than_a_limit():
    assert held_us(lambda i, _: 15.0 if i else 30e6, 4) == [HOLD_US, MOST_HOLD_US, *[known_us(15)] * 2]


def test_a_host_that_waits_for_the_gpu_holds_it_up_no_longer_each_time():
    assert held_us(lambda _, hold_us: hold_us + 180.0, 9) == [HOLD_US, *[known_us(HOLD_US + 180)] * 8]


def test_a_first_graph_that_takes_longer_to_enqueue_is_allowed_for_until_the_next_one():
    assert held_us(lambda i, _: 100.0 if i else 2000.0, 4) == [HOLD_US, known_us(2000), *[known_us(100)] * 2]


def test_what_short_graphs_take_to_enqueue_says_nothing_of_long_ones():
    timer, device, pair = slowing(0.0)
    device.host_us = lambda enqueue: (enqueue(), 50.0 * device.starts)[1]  # type: ignore[method-assign]
    device.held_us.clear()
    series(timer, pair, iterations=44)  # two graphs of 20 and one of 4
    compared = [HOLD_US, *[known_us(50)] * 7, HOLD_US, *[known_us(50)] * 8, known_us(1000)]
    phases = [HOLD_US, known_us(1000), HOLD_US, *[known_us(1000)] * 2, known_us(200)]
    whole = [known_us(1000)] * 2 + [HOLD_US] + [known_us(1000)] * 2 + [known_us(200)]
    assert device.held_us == [*compared, *phases, *whole]


def test_long_graphs_that_are_slow_only_until_they_are_held_for_long_enough_are_kept():
    timer, device, pair = slowing(2.0, enqueue_us=700.0)
    needed_us, slow = 700.0, pair.dispatch

    def dispatch(set_index: int) -> None:
        pair.step_us = 2.0 * (device.held_us[-1] < needed_us)
        slow(set_index)

    pair.dispatch = dispatch  # type: ignore[method-assign]
    seen = series(timer, pair)
    assert seen.graph_pairs == ENTRY_ITERATIONS
    assert seen.values_us[Phase.ROUND_TRIP] == pytest.approx([9.0] * 60)


def test_a_loop_is_compared_with_nothing():
    timer, device, pair = parts(graph=GraphSupport.NO)
    seen = series(timer, pair, iterations=6)
    assert seen.graph_pairs is None
    assert len(pair.calls) == device.log.count("hold") == 2 * 2 * 6  # held in each iteration, before its common start


def test_entry_is_cut_into_graphs_that_stamp_slots_of_their_own():
    timer, device, pair = parts()
    iterations = 2 * ENTRY_ITERATIONS + 4
    series = timer.series(Regime.ENTRY, pair, pairs=0, iterations=iterations, sets=2)
    assert series.values_us[Phase.ROUND_TRIP] == [pytest.approx(9)] * iterations
    assert series.graph_pairs == ENTRY_ITERATIONS
    assert len(device.graphs) == 2 * 2  # phases and whole: one of 20, replayed twice, and one of 4


def test_entry_times_the_pair_alone_and_the_phases_in_a_series_of_their_own():
    timer, device, pair = parts(stamp_us=0.5)
    series = timer.series(Regime.ENTRY, pair, pairs=0, iterations=6, sets=2)
    # a stamp is taken when its kernel ends, half a microsecond after what it ends
    assert series.values_us[Phase.ROUND_TRIP] == pytest.approx([9.5] * 6)
    assert series.values_us[Phase.DISPATCH] == pytest.approx([3.5] * 6)
    assert series.values_us[Phase.COMBINE] == pytest.approx([5.5] * 6)
    assert len(series.starts_ns) == series.pairs == series.graph_pairs == 6
    compared = SETTLE_ROUNDS * (SHORT_ITERATIONS + 6)
    assert device.log.count("flush") == device.log.count("line_up") == compared + 2 * 2 * 6  # both series, fill and all
    assert timer.instrument_us(Regime.ENTRY, sets=2) == pytest.approx(0.5)


def test_starts_are_given_on_the_first_ranks_clock_with_what_is_not_known_of_it():
    clock = Clock()
    device = FakeDevice(clock, advance=clock.advance, offset=ClockOffset(offset_ns=250, error_ns=40))
    timer = CudaTimer(device, ThreadGroup(0, Shared(1)), graph=GraphSupport.YES)
    series = timer.series(Regime.ENTRY, Pair(clock), pairs=0, iterations=2, sets=2)
    assert series.starts_ns == [device.slots[0] - 250, device.slots[2] - 250]
    assert series.clock_error_us == 0.04
    device.drift_ns = -30  # a clock that runs slow is less well known at the end
    assert timer.series(Regime.ENTRY, Pair(clock), pairs=0, iterations=2, sets=2).clock_error_us == 0.07
