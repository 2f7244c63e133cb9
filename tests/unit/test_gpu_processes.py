"""A unit in the GPU domain over several processes that hold several ranks each: threads here, tensors on the CPU."""

import pickle
import time
from dataclasses import replace

import pytest
from tests._fake_device import FakeDevice
from tests._points import CONTEXT, small_point
from tests.contract.threads import on_ranks
from tests.unit.test_gpu_unit import TIMING

from epcross.harness.backends.base import Description
from epcross.harness.backends.gpu import DeviceReceived, GpuBackend
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.device import ClockOffset
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.measuring.unit_session import UnitSession
from epcross.harness.point import Unit
from epcross.harness.terms import Boundary, Domain, Phase, Regime

torch = pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

NAMES = ("rows", "scales", "ids", "weights")


class ThroughTheGroup(GpuBackend):
    """Everything goes to everybody through the group's all-gather."""

    name = "through_the_group"
    domains = frozenset({Domain.NVLINK})
    boundary = {phase: frozenset({Boundary.TRANSFER}) for phase in Phase}  # noqa: RUF012
    host_sync = True

    def unavailable(self):
        return None

    def unsupported(self, point):
        return None

    def workspace_bytes(self, point):
        return 0

    def prepare_ranks(self, point, shards, group):
        self.point, self.group, self.slot_rank = point, group, shards[0].slot_rank
        self.ranks = [shard.rank for shard in shards]
        self.batches = [[shard.batches[s] for shard in shards] for s in range(len(shards[0].batches))]
        self.staged, self.sums = {}, {}

    def refill_ranks(self, set_index, batches):
        self.batches[set_index] = list(batches)

    def dispatch(self, set_index):
        mine = dict(zip(self.ranks, self.batches[set_index], strict=True))
        self.all = {}
        for data in self.group.all_gather(pickle.dumps({r: [getattr(b, n) for n in NAMES] for r, b in mine.items()})):
            self.all.update(pickle.loads(data))

    def received_ranks(self, set_index):
        return [self._received(rank) for rank in self.ranks]

    def _received(self, rank):
        found = []
        for source in sorted(self.all):
            rows, scales, ids, weights = map(torch.from_numpy, self.all[source])
            here = torch.from_numpy((ids.numpy() >= 0) & (self.slot_rank[ids.numpy()] == rank))
            token = here.any(dim=1).nonzero()[:, 0]
            found.append(
                DeviceReceived(
                    source=torch.full((len(token),), source, dtype=torch.int32),
                    token=token.int(),
                    ids=torch.where(here, ids, -1)[token],
                    weights=torch.where(here, weights, torch.zeros_like(weights))[token],
                    rows=rows[token],
                    scales=scales[token],
                )
            )
        return DeviceReceived(**{n: torch.cat([getattr(f, n) for f in found]) for n in DeviceReceived.__slots__})

    def stage_ranks(self, set_index, partials):
        self.staged[set_index] = list(partials)

    def combine(self, set_index):
        answers = []
        for rank, partials in zip(self.ranks, self.staged[set_index], strict=True):
            landed = self._received(rank)
            answers.append((rank, landed.source.numpy(), landed.token.numpy(), partials.view(torch.int16).numpy()))
        everyone = [pickle.loads(data) for data in self.group.all_gather(pickle.dumps(answers))]
        self.sums = {r: torch.zeros((self.point.tokens[r], self.point.model.hidden)) for r in self.ranks}
        for _, source, token, bits in sorted((a for answers in everyone for a in answers), key=lambda a: a[0]):
            values = torch.from_numpy(bits).view(torch.bfloat16).float()
            for mine, total in self.sums.items():
                total[torch.from_numpy(token[source == mine]).long()] += values[torch.from_numpy(source == mine)]

    def combined_ranks(self, set_index):
        return [self.sums[rank].to(torch.bfloat16) for rank in self.ranks]

    def describe(self):
        return Description(version=f"1 on {self.group.rank}", transport="threads", workspace_bytes=self.group.rank)

    def close(self):
        return


class TwoClocks(UnitSession):
    """The second process's timer is 5 us ahead, as far as anybody knows to within 40 ns."""

    def _make_timer(self):
        ahead_ns = 5000 * self.group.rank
        offset = ClockOffset(offset_ns=ahead_ns, error_ns=40 * self.group.rank)
        device = FakeDevice(lambda: time.perf_counter_ns() + ahead_ns, offset=offset)
        return CudaTimer(device, self.group, graph=self.backend.graph)


def measure(kind, processes, regime):
    point = replace(small_point((5, 3, 0, 7)), regime=regime, domain=Domain.NVLINK)
    unit = Unit(point=point, launch=0)
    return on_ranks(
        processes,
        lambda group: measure_unit(kind({}), unit, TIMING, group, CONTEXT, lambda stage: None, session_type=TwoClocks),
    )


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("regime", [Regime.STEADY, Regime.ENTRY])
def test_ranks_are_shared_out_over_processes_in_order(processes, regime):
    result, *others = measure(ThroughTheGroup, processes, regime)
    assert others == [None] * (processes - 1)  # rank 0 has the rows
    assert result is not None
    for record in result.records:
        assert (record.status, record.reason, record.enqueued) == ("ok", None, "eager")
        assert record.workspace_bytes == processes - 1
        if regime is Regime.ENTRY:
            assert record.start_skew_error_us == (0.04 * (processes - 1) if processes < 4 else 0.12)
            assert record.start_skew_us is not None
    assert {len(samples.values_us) for samples in result.samples} == {processes}


def test_a_wrong_rank_of_the_second_process_is_named_by_its_rank():
    class Wrong(ThroughTheGroup):
        def combined_ranks(self, set_index):
            sums = super().combined_ranks(set_index)
            if self.group.rank == 1:
                sums[1][2, 5] += 1
            return sums

    result, _ = measure(Wrong, 2, Regime.STEADY)
    assert result is not None
    assert {(r.status, r.failed_rank, r.failed_stage) for r in result.records} == {("incorrect", 3, "verify_before")}
    assert "rank 3: a wrong combined sum (source 3, token 2, column 5)" in str(result.records[0].reason)
