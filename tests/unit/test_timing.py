import threading
from pathlib import Path

import pytest
from tests.contract.threads import ThreadGroup, on_ranks

from epcross.harness.errors import WaitExpired
from epcross.harness.measuring.stats import NoTiming, estimate
from epcross.harness.measuring.timing import EmptyPair, StartLine, entry_series, more_warmup, pairs_for, steady_series
from epcross.harness.terms import Phase, Regime


class Recorder:
    """Advances a clock by fixed steps and remembers the calls."""

    def __init__(self, clock: "Clock", steps_us: tuple[float, float, float]) -> None:
        self.clock, self.steps_us, self.calls = clock, steps_us, []

    def dispatch(self, set_index: int) -> None:
        self.calls.append(("dispatch", set_index))
        self.clock.now_ns += int(self.steps_us[0] * 1000)

    def experts(self, set_index: int) -> None:
        self.calls.append(("experts", set_index))
        self.clock.now_ns += int(self.steps_us[1] * 1000)

    def combine(self, set_index: int) -> None:
        self.calls.append(("combine", set_index))
        self.clock.now_ns += int(self.steps_us[2] * 1000)


class Clock:
    """Stands still unless told to go on; a step of 1 us on each look lets spinning end."""

    def __init__(self, tick_ns: int = 0) -> None:
        self.now_ns, self.tick_ns = 1_000_000, tick_ns

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns


class FixedLine:
    """A start line of one rank on an injected clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def next_start_ns(self) -> int:
        return self.clock.now_ns


def test_steady_is_the_chain_divided_by_its_pairs_with_the_fill_left_out():
    clock = Clock()
    pair = Recorder(clock, (1.0, 0.5, 2.0))
    series = steady_series(pair, pairs=6, sets=2, line=FixedLine(clock), clock=clock)
    assert series.values_us == {Phase.ROUND_TRIP: [pytest.approx(3.5)]}
    assert series.pairs == 6
    sets = [set_index for name, set_index in pair.calls if name == "dispatch"]
    assert sets == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [name for name, _ in pair.calls[:3]] == ["dispatch", "experts", "combine"]


def test_entry_counts_dispatch_and_round_trip_from_the_common_start():
    clock = Clock()
    series = entry_series(Recorder(clock, (1.0, 0.5, 2.0)), iterations=3, sets=2, line=FixedLine(clock), clock=clock)
    assert series.values_us[Phase.DISPATCH] == pytest.approx([1.0] * 3)
    assert series.values_us[Phase.COMBINE] == pytest.approx([2.0] * 3)
    assert series.values_us[Phase.ROUND_TRIP] == pytest.approx([3.5] * 3)
    assert len(series.starts_ns) == 3


def test_entry_shows_a_late_start_in_the_round_trip():
    clock = Clock()

    class LateLine(FixedLine):
        def next_start_ns(self) -> int:
            start = self.clock.now_ns
            self.clock.now_ns += 7_000  # this rank looks again 7 us after everybody else started
            return start

    series = entry_series(Recorder(clock, (1.0, 0.0, 1.0)), iterations=1, sets=1, line=LateLine(clock), clock=clock)
    assert series.values_us[Phase.ROUND_TRIP] == pytest.approx([9.0])


@pytest.mark.parametrize("regime", [Regime.STEADY, Regime.ENTRY])
def test_a_clock_that_stands_still_gives_no_timing(regime):
    clock = Clock()
    line = FixedLine(clock)
    if regime is Regime.STEADY:
        series = steady_series(EmptyPair(), pairs=4, sets=2, line=line, clock=clock)
    else:
        series = entry_series(EmptyPair(), iterations=4, sets=2, line=line, clock=clock)
    assert isinstance(estimate(regime, [series.values_us[Phase.ROUND_TRIP]]), NoTiming)


@pytest.mark.parametrize(
    ("pair_us", "pairs"),
    [(10.0, 2000), (1.0, 5000), (1e6, 10), (0.0, 5000), (13.0, 1538)],
)
def test_chain_length_follows_the_pair_within_bounds_and_uses_sets_equally(pair_us, pairs):
    got = pairs_for(20.0, pair_us, min_pairs=10, max_pairs=5000, sets=2)
    assert got == pairs
    assert got % 2 == 0


def test_one_pair_of_three_sets_is_at_least_each_set_once():
    assert pairs_for(0.0, 1.0, min_pairs=1, max_pairs=1, sets=3) == 3


def test_ranks_agree_on_every_start_and_leave_no_file():
    def rank(group: ThreadGroup) -> list[int]:
        line = StartLine(group, oversubscribed=True, limit_s=20)
        starts = [line.next_start_ns() for _ in range(20)]
        line.close()
        return starts

    first, second, third = on_ranks(3, rank)
    assert first is not None
    assert first == second == third
    assert first == sorted(set(first))
    assert not list(Path("/dev/shm").glob("epcross-*_start-*"))


def test_a_rank_that_never_lines_up_is_named_within_the_limit():
    done = threading.Event()

    def rank(group: ThreadGroup) -> str:
        line = StartLine(group, oversubscribed=True, limit_s=0.3)
        if group.rank == 1:
            done.wait(20)
            line.close()
            return ""
        with pytest.raises(WaitExpired, match=r"rank 0 waited 0\.3 s for rank 1") as caught:
            line.next_start_ns()
        done.set()
        line.close()
        return str(caught.value)

    assert "start number 1" in (on_ranks(2, rank)[0] or "")


@pytest.mark.parametrize(
    ("warmup_ms", "pair_us", "done", "more"),
    [
        (0.0, 3400.0, 20, 0),
        (100.0, 3400.0, 20, 10),  # 30 pairs are 102 ms
        (100.0, 130.0, 20, 750),  # 769.2
        (100.0, 10000.0, 20, 0),  # 20 were 200 ms
        (100.0, 0.0, 20, 0),  # no time was seen
    ],
)
def test_a_warmup_lasts_as_long_as_it_is_told_to(warmup_ms, pair_us, done, more):
    assert more_warmup(warmup_ms, pair_us, done) == more
