"""The two regimes and spans on a queue whose time the test decides."""

import pytest
from tests._fake_device import FakeDevice
from tests.contract.threads import on_ranks
from timed_pairs import Clock, Pair, parts

from epcross.harness.measuring.cuda_steady import GRAPH_US, HOLD_US, MOST_PAIRS, WARM_PAIRS
from epcross.harness.measuring.cuda_timing import SPAN_PAIRS, CudaTimer
from epcross.harness.measuring.device import KernelSpan
from epcross.harness.measuring.spans import kernel_spans, phase_spans, range_name
from epcross.harness.terms import GraphSupport, Phase, Regime


def settled(**costs):
    """Once it is known what graphs it takes."""
    timer, device, pair = parts(**costs)
    timer.expect(5.0)
    timer.steady(pair, pairs=MOST_PAIRS + 1, sets=2)
    device.log.clear()
    pair.calls.clear()
    return timer, device, pair


def test_a_series_of_one_graph_runs_no_more_than_is_asked_for():
    """As a soak's, whose rounds are counted."""
    timer, _, pair = parts()
    timer.expect(5.0)
    assert timer.steady(pair, pairs=MOST_PAIRS, sets=2).graph_pairs == MOST_PAIRS
    assert len(pair.calls) == 2 * MOST_PAIRS  # fill and one replay


def test_steady_is_the_time_of_whole_replays_over_their_pairs_without_the_fill():
    timer, device, pair = settled(replay_us=18.0)
    series = timer.series(Regime.STEADY, pair, pairs=500, iterations=0, sets=2)
    assert (series.pairs, series.graph_pairs) == (600, MOST_PAIRS)
    assert series.values_us == {Phase.ROUND_TRIP: [pytest.approx(9 + 18 / MOST_PAIRS)]}
    assert device.log.count("replay") == 4
    assert pair.calls == [0, 1] * 400  # the fill's too


@pytest.mark.parametrize(
    ("extra", "size"),
    [(2.0, 20), (0.03, 20), (0.008, MOST_PAIRS)],
    ids=["twice as long", "a little", "no more than noise"],
)
def test_short_graphs_are_taken_where_long_ones_are_slower(extra, size):
    """A graph that is not enqueued whole while the one before it runs."""
    timer, device, pair = parts()
    device.long_graph_us = lambda lasts_ns: extra * lasts_ns / 1e3 * (lasts_ns > 0.1 * 9e3 * MOST_PAIRS)
    timer.expect(5.0)
    for _ in range(2):
        series = timer.series(Regime.STEADY, pair, pairs=500, iterations=0, sets=2)
        assert (series.graph_pairs, series.pairs) == (size, 500 if size == 20 else 600)
        assert (series.values_us[Phase.ROUND_TRIP][0] > 9) is (size != 20)
    assert device.captured == 2
    assert timer.chain(pair, pairs=100, sets=2) == 100


def test_what_holds_up_one_long_chain_makes_no_graphs_short():
    timer, device, pair = parts()
    hitches_us = iter([0.0, 5000.0])  # of the fill, and of the first replay that is timed
    device.long_graph_us = lambda lasts_ns: next(hitches_us, 0.0)
    timer.expect(5.0)
    assert timer.steady(pair, pairs=500, sets=2).graph_pairs == MOST_PAIRS


def test_all_ranks_take_short_graphs_if_one_needs_them():
    def rank(group):
        clock = Clock()
        device = FakeDevice(clock, advance=clock.advance)
        device.long_graph_us = lambda lasts_ns: group.rank * lasts_ns / 1e3 * (lasts_ns > 0.1 * 9e3 * MOST_PAIRS)
        timer = CudaTimer(device, group, graph=GraphSupport.YES)
        timer.expect(5.0)
        return timer.series(Regime.STEADY, Pair(clock), pairs=400, iterations=0, sets=2).graph_pairs

    assert on_ranks(2, rank) == [20, 20]


@pytest.mark.parametrize(
    ("pair_us", "size"),
    [(2.0, MOST_PAIRS), (28.0, 36), (366.0, 4), (9000.0, 2)],
    ids=["fast", "nccl", "many", "prefill"],
)
def test_a_graph_lasts_about_as_long_whatever_a_pair_takes(pair_us, size):
    timer, device, pair = parts()
    timer.series(Regime.STEADY, pair, pairs=WARM_PAIRS, iterations=0, sets=2)
    timer.expect(pair_us)
    timer.expect(GRAPH_US)  # a later seed replays the same graph
    series = timer.series(Regime.STEADY, pair, pairs=1, iterations=0, sets=2)
    assert series.pairs == 2  # no longer than asked for
    pair.calls.clear()
    device.log.clear()
    timer.series(Regime.STEADY, pair, pairs=size, iterations=0, sets=2)
    assert len(pair.calls) == 2 * size  # fill and one replay
    assert device.log.count("replay") == 2


def test_a_short_chain_is_one_graph_of_whole_turns_through_the_sets():
    timer, _, pair = parts()
    assert timer.series(Regime.STEADY, pair, pairs=7, iterations=0, sets=3).pairs == 9
    assert pair.calls == [0, 1, 2] * 6
    assert pair.calls[-1] == 2  # the set whose sums are checked afterwards


def test_a_graph_is_captured_once_for_all_chains():
    timer, device, pair = parts()
    timer.series(Regime.STEADY, pair, pairs=20, iterations=0, sets=2)
    timer.series(Regime.ENTRY, pair, pairs=0, iterations=4, sets=2)
    captured = device.captured
    for _ in range(2):
        timer.series(Regime.STEADY, pair, pairs=20, iterations=0, sets=2)
        timer.series(Regime.ENTRY, pair, pairs=0, iterations=4, sets=2)
    assert device.captured == captured == 3 + 2  # steady, entry, phases; and graphs of one that entry was compared in
    timer.close()
    timer.series(Regime.STEADY, pair, pairs=20, iterations=0, sets=2)
    assert device.captured == captured + 1


def test_where_the_host_is_slower_each_graph_is_timed_by_itself_from_a_common_start():
    timer, device, pair = parts(replay_us=18.0, enqueue_us=0.9 * 9 * MOST_PAIRS)
    timer.expect(5.0)
    series = timer.series(Regime.STEADY, pair, pairs=600, iterations=0, sets=2)
    assert series.held
    assert series.enqueue_us == pytest.approx(0.9 * 9)
    assert series.pairs == 600
    assert series.values_us == {Phase.ROUND_TRIP: [pytest.approx(9 + 18 / MOST_PAIRS)]}
    each = ["synchronize", "hold", "line_up", "replay", "synchronize"]
    assert device.log[-len(each) * 3 :] == each * 3
    held_us = [us for us in device.held_us if us > HOLD_US]
    assert held_us == [pytest.approx(HOLD_US + 2 * 0.9 * 9 * MOST_PAIRS)] * 3  # until all is enqueued


@pytest.mark.parametrize(("first", "later"), [(0.9, 0.5), (0.5, 0.9)])
def test_all_series_of_a_unit_are_timed_as_the_first_one(first, later):
    timer, device, pair = parts(enqueue_us=first * 9 * MOST_PAIRS)
    timer.expect(5.0)
    held = timer.steady(pair, pairs=400, sets=2).held
    device.enqueue_us = later * 9 * MOST_PAIRS
    assert [timer.steady(pair, pairs=400, sets=2, name=name).held for name in ("steady", "in place")] == [held, held]
    assert held is (first > 0.8)


def test_a_host_that_was_slow_before_the_series_that_count_holds_none_of_them():
    timer, device, pair = parts(enqueue_us=0.9 * 9 * WARM_PAIRS)
    assert timer.steady(pair, pairs=WARM_PAIRS, sets=2).held
    timer.expect(GRAPH_US / WARM_PAIRS)  # graphs as long as those before
    device.enqueue_us = 0.0
    series = timer.steady(pair, pairs=400, sets=2)
    assert (series.graph_pairs, series.held) == (WARM_PAIRS, False)


def test_the_instrument_of_graphs_by_themselves_is_an_empty_one_by_itself():
    timer, device, pair = parts(replay_us=18.0, stamp_us=0.5, enqueue_us=0.9 * 9 * MOST_PAIRS)
    timer.expect(5.0)
    timer.series(Regime.STEADY, pair, pairs=600, iterations=0, sets=2)
    device.log.clear()
    assert timer.instrument_us(Regime.STEADY, sets=2) == pytest.approx(round(18.5 / MOST_PAIRS, 4))
    assert device.log == ["synchronize", "hold", "line_up", "replay", "synchronize"] * 3


def test_a_host_that_is_ahead_changes_nothing():
    timer, device, pair = parts(enqueue_us=0.5 * 9 * MOST_PAIRS)
    timer.expect(5.0)
    series = timer.series(Regime.STEADY, pair, pairs=600, iterations=0, sets=2)
    assert (series.held, series.enqueue_us) == (False, pytest.approx(4.5))
    assert "line_up" not in device.log


def test_one_slow_host_holds_all_ranks():
    def rank(group):
        clock = Clock()
        device = FakeDevice(clock, advance=clock.advance, enqueue_us=(0.1, 0.9)[group.rank] * 9 * MOST_PAIRS)
        timer = CudaTimer(device, group, graph=GraphSupport.YES)
        timer.expect(5.0)
        return timer.series(Regime.STEADY, Pair(clock), pairs=400, iterations=0, sets=2).held

    assert on_ranks(2, rank) == [True, True]


def test_a_loop_is_neither_held_nor_said_to_have_been():
    timer, _, pair = parts(graph=GraphSupport.NO, enqueue_us=1e6)
    series = timer.series(Regime.STEADY, pair, pairs=40, iterations=0, sets=2)
    assert (series.held, series.enqueue_us) == (None, None)


def test_without_graph_support_pairs_are_called_in_a_loop_and_said_to_be():
    timer, device, pair = parts(graph=GraphSupport.NO)
    series = timer.series(Regime.STEADY, pair, pairs=10, iterations=0, sets=2)
    assert series.values_us == {Phase.ROUND_TRIP: [pytest.approx(9)]}
    assert (device.captured, timer.enqueued(Regime.STEADY)) == (0, "eager")
    assert parts()[0].enqueued(Regime.ENTRY) == "graph"
    assert parts()[0].enqueued(Regime.SPANS) == "eager"
    device.log.clear()
    timer.series(Regime.ENTRY, pair, pairs=0, iterations=1, sets=1)
    assert device.log[1:4] == ["flush", "hold", "line_up"]  # enqueued behind a kernel, so that Python is not timed


def test_the_instrument_of_steady_is_a_replay_shared_out():
    timer, _, pair = parts(replay_us=10.0)
    timer.expect(5.0)
    timer.series(Regime.STEADY, pair, pairs=400, iterations=0, sets=2)
    assert timer.instrument_us(Regime.STEADY, sets=2) == pytest.approx(2 * 10 / 400)
    timer, _, pair = parts(replay_us=10.0)
    timer.expect(GRAPH_US / 15)
    assert timer.series(Regime.STEADY, pair, pairs=1600, iterations=0, sets=4).pairs == 1600  # in graphs of 16, not 15
    assert timer.instrument_us(Regime.STEADY, sets=4) == pytest.approx(10 / 16)


def test_ranks_enter_a_series_together():
    """A rank that still captures must not leave its peers in a bounded wait of the GPU."""
    order: list[str] = []

    def work(group):
        clock = Clock()
        device = FakeDevice(clock, advance=clock.advance)
        replay = device.capture

        def capture(enqueue):
            order.append(f"capture {group.rank}")
            return replay(enqueue)

        device.capture = capture  # type: ignore[method-assign]
        pair = Pair(clock)
        timer = CudaTimer(device, group, graph=GraphSupport.YES)
        original = pair.dispatch
        pair.dispatch = lambda s: (order.append(f"dispatch {group.rank}"), original(s))[1]  # type: ignore[method-assign]
        return timer.series(Regime.STEADY, pair, pairs=2, iterations=0, sets=2)

    assert None not in on_ranks(2, work)
    captures = [n for n, what in enumerate(order) if what.startswith("capture")]
    dispatches = [n for n, what in enumerate(order) if what.startswith("dispatch")]
    assert max(captures) < min(dispatches)


def test_spans_of_each_phase():
    timer, device, pair = parts()
    series = timer.series(Regime.SPANS, pair, pairs=1000, iterations=0, sets=2)
    assert series.pairs == SPAN_PAIRS
    assert series.values_us[Phase.DISPATCH] == pytest.approx([3.0] * SPAN_PAIRS)
    assert series.values_us[Phase.COMBINE] == pytest.approx([5.0] * SPAN_PAIRS)
    assert device.log.count("hold") == 2  # the first profile is thrown away
    assert pair.calls == [0, 1] * (3 * SPAN_PAIRS // 2)
    assert timer.instrument_us(Regime.SPANS, sets=2) == 0.0


def span(phase, pair, begin, end):
    return KernelSpan(name="k", range=range_name(phase, pair), begin_us=begin, end_us=end)


def test_kernels_that_overlap_count_once():
    seen = [span(Phase.DISPATCH, 0, 10, 14), span(Phase.DISPATCH, 0, 12, 19), span(Phase.COMBINE, 0, 15, 30)]
    assert phase_spans(seen, Phase.DISPATCH, 1) == [9]
    assert phase_spans(seen, Phase.COMBINE, 1) == [15]


def test_a_pair_whose_kernels_were_lost_spoils_the_series():
    assert phase_spans([span(Phase.DISPATCH, 1, 0, 1)], Phase.DISPATCH, 2) == []


def test_a_trace_is_read_by_launch_not_by_name():
    events = [
        {"cat": "user_annotation", "name": "epcross dispatch 0", "ts": 100.0, "dur": 20.0},
        {"cat": "user_annotation", "name": "epcross combine 0", "ts": 130.0, "dur": 20.0},
        {"cat": "user_annotation", "name": "somebody else's", "ts": 90.0, "dur": 200.0},
        {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 110.0, "dur": 2.0, "args": {"correlation": 7}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 140.0, "dur": 2.0, "args": {"correlation": 8}},
        {"cat": "cuda_runtime", "name": "cudaMemsetAsync", "ts": 125.0, "dur": 2.0, "args": {"correlation": 9}},
        {"cat": "kernel", "name": "fence_combine", "ts": 900.0, "dur": 5.0, "args": {"correlation": 8}},
        {"cat": "kernel", "name": "fence_dispatch", "ts": 890.0, "dur": 4.5, "args": {"correlation": 7}},
        {"cat": "gpu_memset", "name": "Memset", "ts": 899.0, "dur": 1.0, "args": {"correlation": 9}},  # between ranges
        {"cat": "kernel", "name": "of an unknown call", "ts": 899.0, "dur": 1.0, "args": {"correlation": 99}},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernel_spans(events) == [
        KernelSpan(name="fence_combine", range="epcross combine 0", begin_us=900.0, end_us=905.0),
        KernelSpan(name="fence_dispatch", range="epcross dispatch 0", begin_us=890.0, end_us=894.5),
    ]
