"""A soak in the GPU domain, without a GPU: what goes wrong late is found, with its round and rank."""

import re
import time
from dataclasses import replace

import pytest
from tests._fake_device import FakeDevice
from tests._points import CONTEXT, small_point
from tests._torch_one_launch import torch_one_launch
from tests.contract.threads import on_ranks

from epcross.harness.backends.base import Reduction
from epcross.harness.measuring import device_soak
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.device_soak import GRAPH_VISITS, DeviceSoak
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.measuring.soak_session import VISITS
from epcross.harness.point import Routing, Timing, Unit
from epcross.harness.record import Record
from epcross.harness.terms import Domain, RowFormat, Sharing

torch = pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

TIMING = Timing(
    launches=1,
    seeds=1,
    chains=1,
    chain_ms=1.0,
    min_pairs=3,
    max_pairs=3,  # as many however fast it is, so that rounds can be counted
    iterations=3,
    warmup_pairs=1,
    sets=3,
    wall_limit_s=30.0,
)
BEFORE = 1 + TIMING.sets + 1  # rounds that every unit verifies
EACH, QUEUED = VISITS * TIMING.sets, GRAPH_VISITS * TIMING.sets


class CpuSoak(DeviceSoak):
    """On a queue that runs at once."""

    devices: list[FakeDevice]

    def _make_timer(self) -> CudaTimer:
        self.devices.append(FakeDevice(time.perf_counter_ns))
        return CudaTimer(self.devices[-1], self.group, graph=self.backend.graph)


def soak(backend, *, soak_ms: float = 1.0, tokens=(5, 3, 0, 7), **point) -> tuple[Record, FakeDevice]:
    shared = replace(small_point(tokens, **point), domain=Domain.SHARED_GPU, sharing=Sharing.ONE_LAUNCH)
    unit, timing = Unit(point=shared, launch=0), replace(TIMING, chain_ms=soak_ms)
    kind = type("Soak", (CpuSoak,), {"devices": []})
    (result,) = on_ranks(
        1, lambda group: measure_unit(backend, unit, timing, group, CONTEXT, lambda stage: None, session_type=kind)
    )
    assert result is not None
    return result.records[0], kind.devices[0]


@pytest.mark.parametrize(
    "point",
    [
        *({"hidden": 160, "dispatch_format": row_format} for row_format in RowFormat),
        {"routing": Routing(masked_fraction=0.5), "hidden": 4, "top_k": 2},
    ],
)
def test_every_round_of_a_burst_is_verified_and_most_come_from_one_graph(point):
    record, device = soak(torch_one_launch()({}), **point)
    assert (record.status, record.reason) == ("ok", None)
    assert record.verified_rounds == BEFORE + EACH + QUEUED  # one burst, since the time was over
    steady = 2  # graphs of the chain and of its warm-up
    assert device.captured <= steady + 1 + 1  # and of the soak, and of the empty pair


def test_a_soak_goes_on_until_its_time_is_over_and_replays_more_from_one_burst_to_the_next(monkeypatch):
    monkeypatch.setattr(device_soak, "QUEUED_S", 0.1)
    begin = time.monotonic()
    record, device = soak(torch_one_launch()({}), soak_ms=700, tokens=(2, 1))
    assert record.status == "ok"
    assert 0.7 < time.monotonic() - begin < 3
    rounds = (record.verified_rounds or 0) - BEFORE
    assert rounds > 2 * (EACH + QUEUED)
    assert rounds % EACH == 0
    assert device.captured <= 4  # once for all bursts


def spoilt(*, dispatch=None, combine=None, after: int, **members):
    """The stand-in, with something done to it after its `after`th dispatch of the soak or combine of it."""
    base = torch_one_launch()

    def run_dispatch(self, set_index):
        base.dispatch(self, set_index)
        self.calls = getattr(self, "calls", 0) + 1
        if dispatch and self.calls > after:
            dispatch(self, set_index)

    def run_combine(self, set_index):
        if combine and self.calls > after:
            combine(self, set_index, base)
        else:
            base.combine(self, set_index)

    return type("Spoilt", (base,), {"dispatch": run_dispatch, "combine": run_combine, **members})({})


@pytest.fixture(scope="module")
def unit_calls() -> int:
    """Rounds of a unit before its soak."""
    counted = spoilt(after=10**9)
    soak(counted)
    return counted.calls - EACH - QUEUED


def flip_rank_2(self, set_index):
    source, token = self.present[2].nonzero(as_tuple=True)
    if len(source):
        self.landed[2, source[0], token[0], 5] ^= 1
        self.spoilt = getattr(self, "spoilt", (int(source[0]), int(token[0])))  # the first


def lose_rank_3(self, set_index):
    self.present[3] = False


def swap_weights(self, set_index):
    self.weights = self.weights.roll(1, dims=-1)


@pytest.mark.parametrize("round_number", [EACH + 1, EACH + QUEUED - 2])
@pytest.mark.parametrize(("dispatch", "rank"), [(flip_rank_2, 2), (lose_rank_3, 3), (swap_weights, 0)])
def test_a_wrong_row_of_a_replayed_round_is_named_with_round_and_rank(unit_calls, round_number, dispatch, rank):
    record, _ = soak(spoilt(dispatch=dispatch, after=unit_calls + round_number))
    assert (record.status, record.failed_rank, record.failed_stage) == ("incorrect", rank, "verify_after")
    assert f"burst 0, round {round_number} of the soak: rank {rank}: a row, its scales, ids" in (record.reason or "")
    assert record.verified_rounds == BEFORE + EACH


def test_the_place_of_a_wrong_row_is_that_of_its_source_and_token(unit_calls):
    backend = spoilt(dispatch=flip_rank_2, after=unit_calls + EACH)
    record, _ = soak(backend)
    place = re.search(r"\(source (\d+), token (\d+)\); 1 of 28 places", record.reason or "")
    assert place
    assert (int(place[1]), int(place[2])) == backend.spoilt


def test_a_wrong_row_of_a_round_by_itself_is_said_in_full(unit_calls):
    record, _ = soak(spoilt(dispatch=flip_rank_2, after=unit_calls + 7))
    assert (record.status, record.failed_rank) == ("incorrect", 2)
    assert "round 7 of the soak: rank 2: wrong bytes in a row" in (record.reason or "")
    assert record.verified_rounds == BEFORE


def keep_old_sums(self, set_index, base):
    """A combine that leaves rank 1's sums as they were."""
    before = self.sums[set_index, 1].clone()
    base.combine(self, set_index)
    self.sums[set_index, 1] = before


def add_everything(self, set_index, base):
    """A combine that also adds partials which nobody sent."""
    kept, self.present = self.present, torch.ones_like(self.present)
    base.combine(self, set_index)
    self.present = kept


@pytest.mark.parametrize("round_number", [4, EACH + 3])
def test_sums_that_a_combine_did_not_write_are_seen(unit_calls, round_number):
    record, _ = soak(spoilt(combine=keep_old_sums, after=unit_calls + round_number))
    assert (record.status, record.failed_rank) == ("incorrect", 1)
    found = re.search(r"round (\d+) of the soak: rank 1: a wrong combined sum", record.reason or "")
    assert found
    assert int(found[1]) == round_number


def test_a_partial_that_nobody_sent_is_nan(unit_calls):
    record, _ = soak(spoilt(combine=add_everything, after=unit_calls + EACH), top_k=1)
    assert record.status == "incorrect"
    assert f"round {EACH} of the soak: rank 0: a wrong combined sum (source 0, token" in (record.reason or "")


def test_a_backend_that_shows_other_rows_than_it_returns_is_wrong():
    base = torch_one_launch()

    def landed(self):
        return [replace(one, rows=one.rows ^ 1) for one in base._landed_in_place(self)]

    record, _ = soak(type("Other", (base,), {"_landed_in_place": landed})({}))
    assert record.status == "incorrect"
    assert "rows in place are not those received" in (record.reason or "")


@pytest.mark.parametrize(
    "members",
    [
        {"in_place": lambda self: None},
        {"reduction": Reduction(order="unordered", exact=False)},
        {"stable_order": False},
    ],
)
def test_who_cannot_be_checked_in_a_graph_is_soaked_round_by_round(members, unit_calls):
    record, _ = soak(type("Plain", (torch_one_launch(),), members)({}))
    assert (record.status, record.verified_rounds) == ("ok", BEFORE + EACH)
    record, _ = soak(spoilt(dispatch=flip_rank_2, after=unit_calls + 7, **members))
    assert "round 7 of the soak: rank 2: wrong bytes in a row" in (record.reason or "")


def test_rows_in_another_order_each_time_are_no_error():
    base = torch_one_launch()

    class Shuffled(base):  # type: ignore[misc, valid-type]
        stable_order = False

        def received_ranks(self, set_index):
            found = super().received_ranks(set_index)
            self.order = [torch.randperm(len(here.source)) for here in found]
            return [
                type(here)(**{name: getattr(here, name)[order] for name in here.__slots__})
                for here, order in zip(found, self.order, strict=True)
            ]

        def stage_ranks(self, set_index, partials):
            back = [here[order.argsort()] for here, order in zip(partials, self.order, strict=True)]
            super().stage_ranks(set_index, back)

    record, _ = soak(Shuffled({}))
    assert (record.status, record.verified_rounds) == ("ok", BEFORE + EACH)


@pytest.mark.parametrize("kind", ["OneSidedFence", "OneSidedSentinel"])
def test_the_one_sided_adapter_is_soaked_in_a_graph_and_a_wrong_row_is_seen(kind, monkeypatch):
    from tests._fake_exchange import FakeExchange, stand_in

    from epcross.harness.backends import onesided

    made = stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    backend = getattr(onesided, kind)
    for tokens, row_format in (((5, 3, 0, 7), RowFormat.FP8), ((4,), RowFormat.BF16)):
        record, _ = soak(backend(backend.option_defaults()), tokens=tokens, hidden=128, dispatch_format=row_format)
        assert (record.status, record.reason) == ("ok", None)
        assert record.verified_rounds == BEFORE + EACH + QUEUED

    last = made[-1].epoch
    right = FakeExchange.dispatch

    def dispatch(self, *given, **named):
        dispatched = right(self, *given, **named)
        if self.epoch > last - 3:
            self.rows[self.epoch % 2, 0, 0, 0, 0] ^= 1
        return dispatched

    monkeypatch.setattr(FakeExchange, "dispatch", dispatch)
    record, _ = soak(backend(backend.option_defaults()), tokens=(4,), hidden=128)
    assert (record.status, record.failed_rank) == ("incorrect", 0)
    found = re.search(r"round (\d+) of the soak: rank 0: a row.* \(source 0, token 0\)", record.reason or "")
    assert found
    assert EACH + QUEUED - 5 < int(found[1]) < EACH + QUEUED
