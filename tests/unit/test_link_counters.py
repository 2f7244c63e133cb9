"""Counters of NVLink: read from an imitated NVML, set beside what a pair must send."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from analysis_values import point, record
from tests._fake_device import FakeDevice
from tests.contract.threads import on_ranks

from epcross.harness.backends.onesided_bytes import own_bytes, sent_bytes
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.link_bytes import difference, pair_row_bytes, ratio, wire_bytes
from epcross.harness.measuring.link_counters import COUNTED_MS, GRANULARITY, KIB, LinkBytes, LinkCount, LinkCounters
from epcross.harness.measuring.timing import EmptyPair
from epcross.harness.terms import GraphSupport, RowFormat
from epcross.kernels.onesided.agreement import shape_of
from epcross.kernels.onesided.layout import Protocol, layout

LINKS = 18


class Nvml:
    """A GPU with `LINKS` links, whose counters drop what is less than a KiB, as they do."""

    NVML_FI_DEV_NVLINK_LINK_COUNT = 91
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_SUCCESS = 0

    class NVMLError(Exception):
        pass

    def __init__(self, links: int = LINKS, down: frozenset[int] = frozenset()) -> None:
        self.links, self.down, self.sent, self.received, self.reads = links, down, 777 * KIB, 5_000_000 * KIB, 0

    def nvmlDeviceGetFieldValues(self, handle, asked):
        self.reads += 1
        assert handle == "handle"
        if [field for field, _ in asked] == [self.NVML_FI_DEV_NVLINK_LINK_COUNT]:
            return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.links, ullVal=0xDEAD_0000_0000))]
        assert max(link for _, link in asked) < self.links, "NVML writes where it must not"
        totals = {138: self.sent, 139: self.received}
        return [
            SimpleNamespace(
                nvmlReturn=3 if link in self.down else 0,
                value=SimpleNamespace(ullVal=0xDEAD if link in self.down else totals[field] // self.links // KIB),
            )
            for field, link in asked
        ]


class Pair(EmptyPair):
    """Two ranks: each sends what the other receives."""

    def __init__(self, own: Nvml, size: int) -> None:
        self.own, self.size, self.calls = own, size, 0

    def dispatch(self, set_index: int) -> None:
        self.calls += 1
        self.own.sent += self.size
        self.own.received += self.size


def test_links_that_are_there_are_summed():
    nvml = Nvml()
    assert LinkCounters(nvml, "handle").read() == LinkBytes(
        tx_bytes=777 // LINKS * LINKS * KIB, rx_bytes=5_000_000 // LINKS * LINKS * KIB, links=LINKS
    )


def test_links_that_are_down_are_left_out():
    read = LinkCounters(Nvml(down=frozenset({0, 17})), "handle").read()
    assert read == LinkBytes(tx_bytes=777 // LINKS * 16 * KIB, rx_bytes=5_000_000 // LINKS * 16 * KIB, links=16)


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (Nvml(links=0), "counts no link"),
        (Nvml(down=frozenset(range(LINKS))), "counts no link"),
        (SimpleNamespace(NVMLError=Nvml.NVMLError), "too old"),
    ],
)
def test_nvml_without_counters_is_a_reason(nvml, words):
    read = LinkCounters(nvml, "handle").read()
    assert isinstance(read, str)
    assert words in read


def test_nvml_that_refuses_is_a_reason():
    nvml = Nvml()

    def refuse(handle, asked):
        raise Nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceGetFieldValues = refuse  # type: ignore[method-assign]
    assert LinkCounters(nvml, "handle").read() == "NVML gives no counters of links: Not Supported"


def count(sizes, *, pair_us=1e6, seeds=1, counted=(True, True)):
    """Record fields, and pairs made by each rank, of ranks that send so many bytes in a pair."""
    pairs = {}

    def rank(group):
        nvml = Nvml()
        pair = pairs[group.rank] = Pair(nvml, sizes[group.rank])
        links = LinkCount(LinkCounters(nvml, "handle") if counted[group.rank] else None, group)
        timer = CudaTimer(FakeDevice(time.perf_counter_ns), group, graph=GraphSupport.YES)
        for _ in range(seeds):
            links.count(timer, pair, pair_us=pair_us, sent_bytes=max(sizes), sets=2)
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


def test_a_quick_pair_is_counted_for_a_while():
    fields, _ = count([10_000_000, 10_000_000], pair_us=100.0)
    assert fields["nvlink_pairs"] >= COUNTED_MS * 1e3 / 100.0


def test_a_rank_without_counters_makes_none_for_all_and_says_who():
    fields, pairs = count([100, 100], counted=(True, False))
    assert fields == {"nvlink_note": "rank 1: there is no NVML here (nvidia-ml-py)"}
    assert pairs[0].calls == 0
    assert count([0, 0])[0] == {"nvlink_note": "nothing is sent to another rank"}


def row(**changes):
    """8 of 16 (token, rank) pairs go to the other rank; 128 bytes a row."""
    known = {"padded_bytes": 128, "combine_row_bytes": 128, "selections_remote_sum": 32, "metadata_bytes": 16}
    return replace(record(point("x", 4)), **{**known, **changes})


def test_what_agrees_needs_no_words():
    wire = 8 * 256
    assert wire_bytes(row()) == wire
    assert ratio(row()) is None
    assert difference(row()) is None
    near = row(nvlink_tx_bytes=int(wire * 1.029), nvlink_rx_bytes=int(wire * 0.971))
    assert difference(near) is None
    assert ratio(near) == pytest.approx(1.029, abs=1e-3)


@pytest.mark.parametrize(
    ("sent", "received", "words"),
    [
        (8 * 272, 8 * 272, "rows with ids and weights"),
        (32 * 256, 32 * 256, "a row for each selection, not for each rank"),
        (8 * 256 * 2, 8 * 256, "other traffic was counted"),
        (8 * 256, 8 * 256 * 2, "other traffic was counted"),
        (12345, 12345, "more than rows"),
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
        pairs_remote_sum=1, padded_bytes=wire, combine_row_bytes=0, nvlink_tx_bytes=seen, nvlink_rx_bytes=seen
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
