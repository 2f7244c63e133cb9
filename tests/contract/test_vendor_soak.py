"""A soak of one process for each GPU, against an imitated library: what one rank sees is raised on all."""

import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed; make torch")

from tests._fake_device import FakeDevice
from tests._points import CONTEXT
from tests.contract.threads import Shared
from tests.fakes.flashinfer import install_flashinfer
from tests.fakes.world import FakeGroup, Meeting

from epcross.harness.backends.flashinfer_one_sided import FlashInferOneSided
from epcross.harness.measuring import unit_session
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.device_soak import DeviceSoak
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.measuring.soak_session import VISITS
from epcross.harness.point import Timing, Unit
from epcross.harness.terms import Domain
from epcross.harness.verification.cases import cases

TIMING = Timing(
    launches=1,
    seeds=1,
    chains=1,
    chain_ms=1.0,
    min_pairs=3,
    max_pairs=3,
    iterations=3,
    warmup_pairs=1,
    sets=3,
    wall_limit_s=30.0,
)


class CpuSoak(DeviceSoak):
    def _make_timer(self) -> CudaTimer:
        return CudaTimer(FakeDevice(time.perf_counter_ns), self.group, graph=self.backend.graph)


class LateWrongRow(FlashInferOneSided):
    """Rank 1 sees a flipped bit in its 15th dispatch that is looked at."""

    seen = 0

    def received_ranks(self, set_index):
        found = super().received_ranks(set_index)
        self.seen += 1
        if self.rank == 1 and self.seen == 15:
            found[0].rows[0, 0] ^= 1
        return found

    def prepare_ranks(self, point, shards, group):
        self.rank = group.rank
        super().prepare_ranks(point, shards, group)


def soak(kind):
    case = next(case for case in cases(2, kind.name, kind.contract_shape) if case.name == "plain")
    unit = Unit(point=replace(case.point, domain=Domain.NVLINK), launch=0)
    shared, meeting, results = Shared(2), Meeting(2), [None, None]
    stages = [[], []]

    def run(rank):
        backend = kind(kind.option_defaults())
        assert backend.unsupported(unit.point) is None
        group = FakeGroup(rank, shared, meeting)
        results[rank] = measure_unit(backend, unit, TIMING, group, CONTEXT, stages[rank].append, session_type=CpuSoak)  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[0] is not None
    assert {str(each[-1]) for each in stages} == {"close"}  # both ranks came to the end together
    return results[0].records[0]


def test_a_library_is_soaked_on_every_rank_and_a_late_error_of_one_is_named(monkeypatch):
    install_flashinfer(monkeypatch)
    monkeypatch.setattr(unit_session, "uuid_here", lambda: None)
    record = soak(FlashInferOneSided)
    assert (record.status, record.reason) == ("ok", None)
    assert record.verified_rounds == 1 + TIMING.sets + 1 + VISITS * TIMING.sets
    assert (record.nvlink_tx_bytes, record.nvlink_pairs) == (None, None)
    assert record.nvlink_note == "rank 0: torch has no GPU here"
    record = soak(LateWrongRow)
    assert (record.status, record.failed_rank) == ("incorrect", 1)
    looked_at_before = 1 + TIMING.sets + TIMING.sets + 1  # checks, and the staging of a timed series
    assert f"round {15 - 1 - looked_at_before} of the soak: rank 1: wrong bytes in a row" in (record.reason or "")
