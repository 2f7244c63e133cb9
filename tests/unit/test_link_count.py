"""Counters of NVLink around a chain of pairs, set beside what a pair must send."""

import time
from dataclasses import replace

import pytest
from analysis_values import point, record
from tests._fake_device import FakeDevice
from tests.contract.threads import on_ranks
from tests.fakes.nvml import KIB, LINKS, Nvml

from epcross.harness.backends.onesided_bytes import own_bytes, sent_bytes
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.link_bytes import difference, moved, pair_row_bytes, ratio, wire_bytes
from epcross.harness.measuring.link_count import COUNTED_MS, GRANULARITY, LinkCount
from epcross.harness.measuring.link_counters import LinkBytes
from epcross.harness.measuring.link_reader import Links
from epcross.harness.measuring.timing import EmptyPair
from epcross.harness.terms import GraphSupport, RowFormat
from epcross.kernels.onesided.agreement import shape_of
from epcross.kernels.onesided.layout import Protocol, layout


class Counters:
    """As `LinkCounters`, without a process."""

    def __init__(self, nvml: Nvml) -> None:
        self._links = Links(nvml, "handle")

    def read(self) -> LinkBytes:
        return LinkBytes(**self._links.read())


class Failing(Counters):
    """Gives no counts at its second reading, and then again."""

    reads = 0

    def read(self) -> LinkBytes | str:  # type: ignore[override]
        self.reads += 1
        return "its reader died" if self.reads == 2 else super().read()


class Pair(EmptyPair):
    """Two ranks: each sends what the other receives."""

    def __init__(self, own: Nvml, size: int) -> None:
        self.own, self.size, self.calls = own, size, 0

    def dispatch(self, set_index: int) -> None:
        self.calls += 1
        self.own.sent += self.size
        self.own.received += self.size


def count(sizes, *, pair_us=1e6, seeds=1, counted=(Counters, Counters)):
    """Record fields, and pairs made by each rank, of ranks that send so many bytes in a pair."""
    pairs = {}

    def rank(group):
        nvml = Nvml()
        pair = pairs[group.rank] = Pair(nvml, sizes[group.rank])
        counters = counted[group.rank]
        links = LinkCount(counters(nvml) if counters else None, group)
        timer = CudaTimer(FakeDevice(time.perf_counter_ns), group, graph=GraphSupport.YES)
        for _ in range(seeds):
            links.count(timer, pair, pair_us=pair_us, wire_bytes=sum(sizes), sets=2)
        return links.fields()

    fields = on_ranks(len(sizes), rank, timeout_s=20)
    assert fields[0] is not None
    assert all(one == fields[0] for one in fields)
    return fields[0], pairs


@pytest.mark.parametrize("size", [28_800, 1_500_000, 500])
def test_bytes_of_a_pair_are_found_within_the_granularity_however_small(size):
    fields, pairs = count([size, size], seeds=2)
    assert fields["nvlink_pairs"] == pairs[0].calls == pairs[1].calls
    assert fields["nvlink_tx_bytes"] == pytest.approx(2 * size, rel=GRANULARITY)
    assert fields["nvlink_rx_bytes"] == pytest.approx(2 * size, rel=GRANULARITY)
    assert pairs[0].calls % 4 == 0  # two seeds, and two sets equally often
    assert pairs[0].calls * size >= LINKS * KIB / GRANULARITY


def test_what_must_cross_is_the_mean_of_all_seeds_to_the_byte():
    """Rows of 28672 bytes, both ways: 15.5 in a pair of the first seed, a mean over its sets, and 16 in the second."""
    seeds = [15.5 * 28672, 16.0 * 28672]

    def rank(group):
        nvml = Nvml()
        links, pair = LinkCount(Counters(nvml), group), Pair(nvml, 0)
        timer = CudaTimer(FakeDevice(time.perf_counter_ns), group, graph=GraphSupport.YES)
        for wire in seeds:
            pair.size = round(wire / 2)
            links.count(timer, pair, pair_us=1e6, wire_bytes=wire, sets=2)
        return links.fields()

    fields = on_ranks(2, rank, timeout_s=20)[0]
    assert fields is not None
    assert fields["nvlink_wire_bytes"] == 15.75 * 28672
    assert fields["nvlink_tx_bytes"] == pytest.approx(15.75 * 28672, rel=GRANULARITY)


def test_a_quick_pair_is_counted_for_a_while():
    fields, _ = count([10_000_000, 10_000_000], pair_us=100.0)
    assert fields["nvlink_pairs"] >= COUNTED_MS * 1e3 / 100.0


def test_a_rank_without_counters_makes_none_for_all_and_says_who():
    fields, pairs = count([100, 100], counted=(Counters, None))
    assert fields == {"nvlink_note": "rank 1: torch has no GPU here"}
    assert pairs[0].calls == 0


def test_counts_that_are_lost_once_are_lost_for_all_seeds():
    """Those of one seed would be set beside the rows of all."""
    fields, pairs = count([100, 100], seeds=3, counted=(Counters, Failing))
    assert fields == {"nvlink_note": "rank 1: its reader died"}
    assert 0 < pairs[0].calls == pairs[1].calls < 3 * LINKS * KIB / GRANULARITY / 100


def test_where_nothing_is_sent_nothing_is_counted():
    assert count([0, 0])[0] == {"nvlink_note": "nothing is sent to another rank"}


def row(**changes):
    """8 of 16 (token, rank) pairs go to the other rank; 128 bytes a row."""
    known = {"padded_bytes": 128, "combine_row_bytes": 128, "selections_remote_sum": 32, "metadata_bytes": 16}
    return replace(record(point("x", 4)), **{**known, "nvlink_wire_bytes": 8 * 256.0, **changes})


def test_what_agrees_needs_no_words():
    wire = 8 * 256
    assert wire_bytes(row()) == wire
    assert ratio(row()) is None
    assert difference(row()) is None
    near = row(nvlink_tx_bytes=int(wire * 1.029), nvlink_rx_bytes=int(wire * 0.971))
    assert difference(near) is None
    assert ratio(near) == pytest.approx(1.029, abs=1e-3)


def test_bytes_are_set_beside_what_had_to_cross_and_not_beside_a_rounded_mean():
    """7.75 pairs, stored as 8: what was counted is 1.003 times that, and looked like 0.97."""
    counted = round(7.75 * 256 * 1.003)
    seen = row(nvlink_tx_bytes=counted, nvlink_rx_bytes=counted, nvlink_wire_bytes=7.75 * 256)
    assert ratio(seen) == pytest.approx(1.003, abs=3e-4)
    assert difference(seen) is None


@pytest.mark.parametrize(("pairs", "share"), [(8, None), (50, None), (51, 1.5), (2039, 1.5)])
def test_older_rows_are_judged_where_rounding_cannot_matter(pairs, share):
    size = pairs * 384  # half as much again as rows of 256 bytes
    old = row(pairs_remote_sum=pairs, nvlink_wire_bytes=None, nvlink_tx_bytes=size, nvlink_rx_bytes=size)
    assert ratio(old) == share
    assert (difference(old) is None) == (moved(old) is None) == (share is None)


@pytest.mark.parametrize(
    ("times", "selections", "words"),
    [
        (1.02, 400, "about a row for each selection, not for each rank"),
        (1.042, 400, "1.04 times a row for each selection, not for each rank"),
        (0.95, 400, "0.95 times a row for each selection, not for each rank"),
        (1.11, 400, "more than rows, such as small stores, or other traffic"),
        (1.042, 32, "about a row for each selection, not for each rank"),  # itself rounded, so off by up to 1.6 %
    ],
)
def test_what_is_near_a_known_count_says_how_many_times_that_it_is(times, selections, words):
    sent = round(times * selections * 256)
    seen = row(
        selections_remote_sum=selections,
        nvlink_wire_bytes=selections / 4 * 256.0,
        tokens_total=10,
        max_tokens_per_rank=10,
        nvlink_tx_bytes=sent,
        nvlink_rx_bytes=sent,
    )
    assert str(difference(seen)).endswith(f": {words}")


def test_what_is_near_the_rows_is_not_called_a_multiple_of_something_else():
    sent = round(8 * 256 * 1.05)  # rows with ids and weights are 1.06 times the rows
    seen = row(nvlink_tx_bytes=sent, nvlink_rx_bytes=sent, metadata_bytes=30)
    assert str(difference(seen)).endswith(": more than rows, such as small stores, or other traffic")


@pytest.mark.parametrize(
    ("sent", "received", "words"),
    [
        (8 * 272, 8 * 272, "rows with ids and weights"),
        (32 * 256, 32 * 256, "a row for each selection, not for each rank"),
        (8 * 256 * 2, 8 * 256, "other traffic was counted"),
        (8 * 256, 8 * 256 * 2, "other traffic was counted"),
        (12345, 12345, "more than rows"),
        (8 * 128, 8 * 128, "less than must cross"),
        (0, 0, "less than must cross"),
    ],
)
def test_what_differs_says_by_how_much_and_what_it_is(sent, received, words):
    told = difference(row(nvlink_tx_bytes=sent, nvlink_rx_bytes=received))
    assert told is not None
    assert words in told
    assert f"{sent / (8 * 256):.3f} times wire_bytes (2048)" in told


def test_a_padded_exchange_is_recognised():
    uneven = row(tokens_total=20, pairs_remote_sum=8, max_tokens_per_rank=64)
    for sent, words in ((20 * 256, "every row to every rank"), (2 * 64 * 256, "full capacity to every rank")):
        assert words in str(difference(replace(uneven, nvlink_tx_bytes=sent, nvlink_rx_bytes=sent)))


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("tokens", [1, 8, 128, 4096])
def test_what_our_protocols_send_besides_rows_is_named_and_below_the_margin(protocol, row_format, tokens):
    """Two ranks, hidden 7168, top 8, a row from each token to each rank: so counters and `wire_bytes` must agree."""
    base = point("x", tokens)
    at_point = replace(base, dispatch_format=row_format, model=replace(base.model, hidden=7168, top_k=8))
    shape = shape_of(ep_size=2, max_tokens_per_rank=tokens, top_k=8, hidden=7168, dispatch_format=row_format)
    at = layout(protocol, shape)
    size = pair_row_bytes(at_point)
    assert size == {RowFormat.BF16: 14336, RowFormat.FP8: 7168 + 4 * 56}[row_format] + 14336
    wire = tokens * size  # one rank's, to the other
    metadata = tokens * 8 * 8  # column metadata_bytes: an id and a weight for each selection
    beside = sent_bytes(at, tokens=tokens, rows=2 * tokens) / 2  # half of it is for the rank itself
    assert beside > 0
    seen = int(wire + metadata + beside)
    counted = row(
        padded_bytes=wire,
        combine_row_bytes=0,
        nvlink_wire_bytes=float(wire),
        nvlink_tx_bytes=seen,
        nvlink_rx_bytes=seen,
    )
    assert difference(counted) is None
    own = own_bytes(at, tokens=tokens, received=tokens, returned=tokens)
    notes = 2 * 4 * tokens  # whether a token went to each of two ranks
    if protocol is Protocol.FENCE:
        assert own == notes
    else:  # every word that came is armed again: far above the margin, so it is local
        tail = {RowFormat.BF16: 64, RowFormat.FP8: 64}[row_format]  # ids and weights fill vectors
        assert own == notes + wire + tokens * tail
    assert {region.name.split("_")[0] for region in at.armed} <= {"records", "escapes", "returns"}  # of its own
