"""A unit on one rank, seed after seed: prepare, verify, time, verify again; and what is known of it afterwards.

The only place where a backend, the workload, the checks and the clock meet. Collective: all ranks run it in step.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from epcross.harness.backends import answers
from epcross.harness.backends.base import Backend, Description, Group, Int32
from epcross.harness.backends.layer import LayerBackend, hidden_point
from epcross.harness.measuring.gpu_state import uuid_here
from epcross.harness.measuring.gpu_watch import GpuWatch, open_watch
from epcross.harness.measuring.link_bytes import pair_row_bytes
from epcross.harness.measuring.timer import HostTimer, Timer
from epcross.harness.measuring.timing import more_warmup, of_all_ranks, pairs_for
from epcross.harness.measuring.unit_rows import Chain, description_from_json, description_to_json
from epcross.harness.point import Point, Timing
from epcross.harness.terms import Domain, Flag, Phase, Regime, Stage
from epcross.harness.verification.local_ranks import LocalRanks, local_ranks
from epcross.harness.verification.verify import Mismatch
from epcross.harness.workload import traffic
from epcross.harness.workload.batches import GroupBatch, group_batch, ids_hash
from epcross.harness.workload.placement import Slots, lay_out
from epcross.harness.workload.tape import Payload

if TYPE_CHECKING:
    from epcross.harness.measuring.link_count import LinkCount

EXACT_SET = 1_000
"""Set numbers from here on are used in checks only, so that a check never repeats a timed set's ids."""

FRESH_SET = 2_000


class Incorrect(Exception):
    """An output was wrong on some rank; every rank raises it together with the same sentence."""

    def __init__(self, stage: Stage, rank: int, sentence: str) -> None:
        super().__init__(sentence)
        self.stage, self.rank, self.sentence = stage, rank, sentence


class UnitSession:
    """The state of one unit on one rank."""

    def __init__(
        self,
        backend: Backend,
        point: Point,
        timing: Timing,
        group: Group,
        report_stage: Callable[[Stage], None],
        *,
        oversubscribed: bool,
    ) -> None:
        self.backend, self.point, self.timing, self.group = backend, point, timing, group
        self.inputs = hidden_point(point) if isinstance(backend, LayerBackend) else point  # whose rows ranks are given
        self.report_stage = report_stage
        self.oversubscribed = oversubscribed
        self.slots: Slots = lay_out(point.placement, point.model.num_experts, point.ep_size)
        self.ranks: LocalRanks = local_ranks(backend, point, group, self.slots)
        self.timer: Timer | None = None
        self.watch = GpuWatch()  # of this process's GPU, before and after each seed's series
        self.links: LinkCount | None = None
        self.flags: frozenset[Flag] = frozenset()  # that the measurement itself earned
        self.ids: list[tuple[Int32, ...]] = []
        self.counts: list[traffic.Traffic] = []
        self.verified_rounds = 0  # that every rank found right

    def run(self) -> list[Chain]:
        """Every seed and chain of the unit."""
        chains: list[Chain] = []
        for seed in range(self.timing.seeds):
            timed = [self._batch(seed, s, Payload.RANDOM) for s in range(self.timing.sets)]
            exact, fresh = self._batch(seed, EXACT_SET, Payload.EXACT), self._batch(seed, FRESH_SET, Payload.RANDOM)
            if seed == 0:
                self._prepare(timed)
            self.ranks.expect([exact, *timed, fresh])
            self.ids += [batch.ids for batch in timed]
            self.counts += [traffic.count(batch.ids, self.slots.slot_rank, self.point.ep_size) for batch in timed]
            self.report_stage(Stage.VERIFY_BEFORE)
            self._check_round(Stage.VERIFY_BEFORE, 0, exact)
            # last set first: a chain ends on the last set, so sums that it never wrote would be those of set 0
            for s, batch in reversed(list(enumerate(timed))):
                self._check_round(Stage.VERIFY_BEFORE, s, batch)
            self.report_stage(Stage.TIME)
            self.watch.read()
            chains += self._time(seed, timed)
            self.watch.read()
            self.report_stage(Stage.VERIFY_AFTER)
            self._check_round(Stage.VERIFY_AFTER, 0, fresh)
        return chains

    def _batch(self, seed: int, set_index: int, payload: Payload) -> GroupBatch:
        return group_batch(self.inputs, seed=seed, set_index=set_index, payload=payload)

    def _prepare(self, timed: list[GroupBatch]) -> None:
        self.report_stage(Stage.PREPARE)
        self.ranks.prepare(timed)
        self.timer = self._make_timer()
        self.watch = GpuWatch() if self.point.domain is Domain.CPU else open_watch()
        if self.point.domain is Domain.NVLINK and self.point.regime is Regime.STEADY:
            self.links = self._make_links()
        # compiling and tuning take unequal times; nobody may start a bounded wait before all are ready
        self.group.barrier()

    def _make_timer(self) -> Timer:
        if self.point.domain is Domain.CPU:
            return HostTimer(self.group, oversubscribed=self.oversubscribed, limit_s=self.timing.wall_limit_s)
        from epcross.harness.measuring.cuda_device import open_device
        from epcross.harness.measuring.cuda_timing import CudaTimer
        from epcross.harness.measuring.layer_timing import LayerTimer

        timer = LayerTimer if isinstance(self.backend, LayerBackend) else CudaTimer
        return timer(open_device(self.group, self.timing.wall_limit_s), self.group, graph=self.backend.graph)

    def _make_links(self) -> "LinkCount":
        from epcross.harness.measuring.link_count import LinkCount
        from epcross.harness.measuring.link_counters import counters_of

        uuid = uuid_here()
        return LinkCount(counters_of(uuid) if uuid else None, self.group)

    def _count_links(self, pair_us: float) -> None:
        """What the pairs of this seed send over the links; after all that is timed."""
        if self.links is None:
            return
        from epcross.harness.measuring.cuda_timing import CudaTimer

        assert isinstance(self.timer, CudaTimer)
        counts = self.counts[-self.timing.sets :]
        wire_bytes = sum(c.pairs_remote_sum for c in counts) * pair_row_bytes(self.point) / len(counts)
        self.links.count(self.timer, self.backend, pair_us=pair_us, wire_bytes=wire_bytes, sets=self.timing.sets)
        self.backend.drain_timing()

    def link_fields(self) -> dict[str, Any]:
        """What NVML counted on the links of all ranks."""
        return self.links.fields() if self.links else {}

    def _check_round(self, stage: Stage, set_index: int, batch: GroupBatch) -> None:
        """One pair with new inputs in poisoned buffers, checked on every rank; raises `Incorrect` on all together."""
        backend, group = self.backend, self.group
        group.barrier()  # no peer may still be writing when inputs and buffers change
        self.ranks.refill(set_index, batch)
        backend.poison()
        group.barrier()  # no row may arrive at a rank that has yet to poison
        backend.dispatch(set_index)
        self._agree(stage, self.ranks.check_received(set_index, batch))
        backend.combine(set_index)
        self._agree(stage, self.ranks.check_combined(set_index, batch))
        self.verified_rounds += 1

    def _agree(self, stage: Stage, wrong: Mismatch | None) -> None:
        words = b"" if wrong is None else json.dumps([wrong.rank, str(wrong)]).encode()
        for verdict in self.group.all_gather(words):
            if verdict:
                raise Incorrect(stage, *json.loads(verdict))

    def _time(self, seed: int, timed: list[GroupBatch]) -> list[Chain]:
        assert self.timer is not None
        timing, backend, timer = self.timing, self.backend, self.timer
        warm = timer.steady(backend, pairs=max(timing.warmup_pairs, 1), sets=timing.sets)
        slowest_us = max(of_all_ranks(self.group, warm.values_us[Phase.ROUND_TRIP][0]))
        if more := more_warmup(timing.warmup_ms, slowest_us, timing.warmup_pairs):
            timer.steady(backend, pairs=more, sets=timing.sets)
        if self.point.regime is Regime.STEADY:  # elsewhere chains only warm up: their graphs are good enough
            timer.expect(slowest_us)
        pairs = pairs_for(
            timing.chain_ms, slowest_us, min_pairs=timing.min_pairs, max_pairs=timing.max_pairs, sets=timing.sets
        )
        # each set equally often, so that a series too ends on the last set
        iterations = -(-timing.iterations // timing.sets) * timing.sets
        last_set = timing.sets - 1
        self.ranks.stage_timed(timed)
        chains = []
        for chain in range(timing.chains):
            backend.drain_timing()
            self.group.barrier()  # no peer may still be writing
            backend.poison()
            self.group.barrier()
            series = timer.series(self.point.regime, backend, pairs=pairs, iterations=iterations, sets=timing.sets)
            backend.drain_timing()
            chains.append(Chain(seed=seed, chain=chain, series=series))
            # what was timed is what is checked: the last timed pair must have left this set's true sums
            self._agree(Stage.TIME, self.ranks.check_timed(last_set, timed[last_set]))
        self._count_links(slowest_us)
        return chains

    def gpu_fields(self) -> dict[str, Any]:
        """What the GPUs of all ranks were at, and whether others were on them; none on the CPU. Collective."""
        fields, flags = self.watch.fields(self.group)
        self.flags |= flags
        return fields

    def timer_fields(self) -> dict[str, Any]:
        """How pairs were issued, and what an empty pair costs through the path just used."""
        assert self.timer is not None
        instrument_us = self.timer.instrument_us(self.point.regime, sets=self.timing.sets)
        return {"instrumentation_us": instrument_us, "enqueued": self.timer.enqueued(self.point.regime)}

    def descriptions(self) -> list[Description]:
        """What ran on every rank."""
        data = description_to_json(answers.described(self.backend))
        return [description_from_json(item) for item in self.group.all_gather(data)]

    def traffic_fields(self) -> dict[str, Any]:
        """The realised routing of all sets and seeds, for the row."""
        return {**asdict(traffic.mean_over_sets(self.counts)), "ids_hash": ids_hash(self.ids)}

    def layer_fields(self) -> dict[str, Any]:
        """What is known of a layer's experts; nothing of an exchange. Collective."""
        if not isinstance(self.backend, LayerBackend):
            return {}
        from epcross.harness.backends.experts_only import ExpertsOnly
        from epcross.harness.measuring.expert_fields import expert_fields

        rank = self.backend.rank if isinstance(self.backend, ExpertsOnly) else None
        told = self.backend.compute_description()
        return {
            **expert_fields(self.point, self.ids, rank=rank),
            "compute_version": answers.compute_version(self.backend, told),
        }

    def error_fields(self) -> dict[str, Any]:
        """The largest errors of a layer that any rank saw, whether or not it is right; nothing of an exchange. None for
        what is no finite number, which rows cannot hold. Collective."""
        if not isinstance(self.backend, LayerBackend):
            return {}
        from epcross.harness.verification.layer_ranks import LayerRanks

        assert isinstance(self.ranks, LayerRanks)
        seen = {"error_ratio": self.ranks.worst_ratio, "error_share": self.ranks.worst_share}
        worst = {name: max(of_all_ranks(self.group, value)) for name, value in seen.items()}
        return {name: value if math.isfinite(value) else None for name, value in worst.items()}

    def close(self) -> None:
        """Release what the session itself mapped."""
        if self.timer is not None:
            self.timer.close()
            self.timer = None
