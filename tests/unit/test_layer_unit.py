"""A whole unit of a layer, without a GPU: verified, timed, and told what is wrong with it."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

import numpy as np
import torch
from tests._points import CONTEXT
from tests._torch_layer import PlainExperts, TorchLayer, layer, layer_point
from tests.contract.threads import on_ranks
from tests.unit.test_gpu_unit import TIMING, CpuSession

from epcross.harness.backends import rank_weights
from epcross.harness.backends.experts_only import ExpertsOnly
from epcross.harness.measuring.layer_timing import LayerTimer
from epcross.harness.measuring.measure import measure_unit
from epcross.harness.point import Routing, Unit
from epcross.harness.record import UnitResult
from epcross.harness.storing.rows import check_record
from epcross.harness.terms import BackendKind, Regime, RoutingKind, RowFormat
from epcross.harness.verification import layer_ranks
from epcross.kernels.experts import oracle, weights
from epcross.kernels.experts.deepgemm import DeepGemm
from epcross.kernels.experts.formats import Arithmetic, WeightFormat
from epcross.kernels.experts.rows import addresses
from epcross.kernels.experts.torch_grouped import TorchGrouped

pytestmark = pytest.mark.usefixtures("one_thread")


FEW = replace(TIMING, seeds=1, chains=2, min_pairs=2, max_pairs=4, iterations=2, warmup_pairs=1)
FP8 = {"dispatch_format": RowFormat.FP8, "weight_format": WeightFormat.FP8}


class LayerSession(CpuSession):
    def _make_timer(self):
        timer = super()._make_timer()
        return LayerTimer(self.device, timer._group, graph=self.backend.graph)


def measure(backend, session=LayerSession, timing=FEW, **point) -> UnitResult:
    return measure_point(backend, layer_point(**point), session, timing)


def measure_point(backend, point, session=LayerSession, timing=FEW) -> UnitResult:
    unit = Unit(point=point, launch=0)
    (result,) = on_ranks(
        1, lambda group: measure_unit(backend, unit, timing, group, CONTEXT, lambda stage: None, session_type=session)
    )
    assert result is not None
    return result


@pytest.mark.parametrize("regime", list(Regime))
@pytest.mark.parametrize("formats", [{}, FP8], ids=["bf16", "fp8"])
def test_a_layer_is_verified_and_timed(regime, formats):
    result = measure(layer(), regime=regime, **formats)
    phases = {
        "steady": ["layer", "layer_comm"],
        "entry": ["layer"],
        "spans": ["combine", "dispatch", "layer", "layer_comm"],
    }
    assert sorted({record.phase for record in result.records}) == phases[regime]
    for record in result.records:
        assert check_record(record) == []
        if record.phase != "layer_comm":  # on a CPU that runs both at once the difference may be of either sign
            assert (record.status, record.reason) == ("ok", None)
        assert (record.kind, record.compute, record.compute_version) == ("layer", "plain_experts", "1")
        assert record.verified_rounds == 1 + FEW.sets + 1
        assert (record.error_ratio or 0) > 0
        assert 0 < (record.error_share or 0) <= 1
        assert record.boundary is not None
        assert ("quantise" in record.boundary.split()) == (bool(formats) and record.phase == "layer")


def test_rows_say_what_the_experts_had_to_do():
    record = measure(layer()).records[0]
    assert record.experts_hit == 2.0  # all 8 slots of 4 ranks, by 15 tokens of 3 selections each
    assert record.expert_weight_bytes == 2 * 3 * 128 * 128 * 2
    assert record.tokens_per_expert_mean == pytest.approx(15 * 3 / 8)
    assert (record.tokens_per_expert_min or 0) >= 1
    assert (record.tokens_per_expert_max or 0) > 15 * 3 / 8


@pytest.mark.parametrize("seeds", [1, 2])
def test_an_experts_weights_are_brought_to_float64_once_a_seed(seeds, monkeypatch):
    """Of 256 experts that takes as long as all else that is judged; rounds of a seed share it."""
    asked: list[int] = []
    usual = layer_ranks.check_expert

    def counted(point, slot, device):
        asked.append(slot)
        return usual(point, slot, device)

    monkeypatch.setattr(layer_ranks, "check_expert", counted)
    records = measure(layer(), timing=replace(FEW, seeds=seeds), tokens=(9, 9)).records
    assert {(r.status, r.verified_rounds) for r in records if r.phase == "layer"} == {("ok", seeds * (2 + FEW.sets))}
    ranks, slots = 2, 4
    assert len(asked) == seeds * ranks * len(set(asked))
    assert len(set(asked)) >= slots


def test_many_tokens_are_not_all_computed_at_once(monkeypatch):
    """Memory of the oracle has a bound."""
    at_once: list[int] = []
    usual = oracle.expected

    def seen(values, *given, **named):
        at_once.append(len(values))
        return usual(values, *given, **named)

    monkeypatch.setattr(oracle, "expected", seen)
    monkeypatch.setattr(layer_ranks, "_TOGETHER", 20)
    assert {r.status for r in measure(layer(), tokens=(9, 9)).records if r.phase == "layer"} == {"ok"}
    assert max(at_once) == 18


def test_torchs_grouped_product_is_a_layer_too():
    assert {record.status for record in measure(layer(TorchGrouped)).records if record.phase == "layer"} == {"ok"}


def test_without_staging_nothing_is_quantised_in_the_window():
    result = measure(layer(staging=False), **FP8)
    assert {r.status for r in result.records if r.phase == "layer"} == {"ok"}
    assert all("quantise" not in (record.boundary or "") for record in result.records)


def test_what_later_seeds_keep_lies_where_graphs_of_the_first_one_read():
    """Graphs are captured once and replayed for every seed, and hold addresses."""
    seen: dict[tuple[int, int], set[tuple[int, ...]]] = {}

    class Seen(TorchLayer):
        def in_place(self, set_index):
            for rank, rows in enumerate(self._kept[set_index]):
                seen.setdefault((set_index, rank), set()).add(tuple(addresses(rows)))
            super().in_place(set_index)

    made = Seen(TorchLayer.option_defaults())
    made.use_compute(PlainExperts)
    records = measure(made, timing=replace(FEW, seeds=3), **FP8).records
    assert {(r.status, r.reason) for r in records if r.phase == "layer"} == {("ok", None)}
    assert len(seen) == FEW.sets * 4
    assert {len(places) for places in seen.values()} == {1}


class DropsAnExpert(PlainExperts):
    """A rank leaves its first expert out."""

    def ids_of(self, rows):
        ids = super().ids_of(rows)
        return torch.where(ids == 2, -1, ids)


class SwapsWeights(PlainExperts):
    """Two experts of a rank stand in for each other in GEMM1."""

    def changed(self, copy):
        return replace(copy, gate_up=copy.gate_up.flip(0), gate_up_scales=copy.gate_up_scales.flip(0))


class StaleScale(PlainExperts):
    """One scale of one block is that of its neighbour."""

    def changed(self, copy):
        scales = copy.down_scales.clone()
        scales[0, 0, 0] = scales[1, 0, 0]
        return replace(copy, down_scales=scales)


class StaleRoutingWeight(PlainExperts):
    """Weights of a token are shifted by one."""

    def weights_of(self, rows):
        return super().weights_of(rows).roll(1, dims=1)


@pytest.mark.parametrize("broken", [DropsAnExpert, SwapsWeights, StaleScale, StaleRoutingWeight])
@pytest.mark.parametrize("size", [{}, {"tokens": (40, 33), "hidden": 256}], ids=["small", "larger"])
def test_a_broken_layer_is_incorrect(broken, size):
    records = measure(layer(broken), **FP8, **size).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "verify_before")}
    assert "tokens wrong" in (records[0].reason or "")
    assert all((r.error_share or 0) > 1 and (r.error_ratio or 0) > 1 for r in records)
    assert [problem for r in records for problem in check_record(r)] == []


def test_experts_that_are_idle_while_timed_are_incorrect():
    """Right while they are checked; in a timed series the outputs of before would stand, were they not poisoned."""

    class Idle(PlainExperts):
        timed = False

        def run(self, rows, weights_copy=0):
            if not Idle.timed:
                super().run(rows, weights_copy)

    class Session(LayerSession):
        def _time(self, seed, timed):
            assert self.timer is not None
            series = self.timer.series

            def idle(*given, **named):
                Idle.timed = True
                return series(*given, **named)

            self.timer.series = idle
            return super()._time(seed, timed)

    records = measure(layer(Idle), session=Session).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "time")}
    assert {(r.error_ratio, r.error_share) for r in records} == {(None, None)}  # of poison, which is no number
    assert "in a timed series" in (records[0].reason or "")


def test_a_layer_in_place_that_does_nothing_is_incorrect():
    """It would make all of the layer look like communication."""
    made = layer()

    class Session(LayerSession):
        def _time(self, seed, timed):
            self.ranks.stage_timed(timed)
            assert self.timer is not None
            series = self.timer.series

            def idle(*given, **named):
                made.in_place = lambda set_index: None
                return series(*given, **named)

            self.timer.series = idle
            return super()._time(seed, timed)

    records = measure(made, session=Session).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "time")}
    assert "in place in a timed series" in (records[0].reason or "")
    assert all(0 < (r.error_share or 0) <= 1 for r in records)  # its outputs are right


RULES = tuple(Arithmetic(intermediate=RowFormat.FP8, power_of_two_scales=powers) for powers in (False, True))


class ByEither(TorchLayer):
    """Of a library that does not say how it scales the intermediate."""

    def arithmetics(self, point):
        return RULES


class ByPowers(PlainExperts):
    def arithmetic(self, shape):
        return RULES[1]


class ByTurns(PlainExperts):
    """Another rule each time."""

    runs = 0

    def run(self, rows, weights_copy=0):
        super().run(rows, weights_copy)
        self.runs += 1

    def arithmetic(self, shape):
        return RULES[self.runs % 2]


@pytest.mark.parametrize(("compute", "status"), [(PlainExperts, "ok"), (ByPowers, "ok"), (ByTurns, "incorrect")])
def test_outputs_follow_one_rule_of_several_and_the_same_throughout(compute, status):
    made = ByEither(ByEither.option_defaults())
    made.use_compute(compute)
    records = measure(made, regime=Regime.ENTRY, **FP8).records
    assert {record.status for record in records} == {status}
    assert {(record.error_share or 0) <= 1 for record in records} == {status == "ok"}


@pytest.mark.parametrize("room", [1 << 40, 1], ids=["all kept", "each made"])
@pytest.mark.parametrize("compute", [PlainExperts, SwapsWeights])
def test_experts_that_do_not_fit_beside_a_layer_are_made_one_by_one(room, compute, monkeypatch):
    made, matrices = [], weights.matrix
    monkeypatch.setattr(rank_weights, "_memory_bytes", lambda device: room)
    monkeypatch.setattr(oracle, "matrix", lambda *given: made.append(given[3]) or matrices(*given))
    rank_weights.release_weights()
    device_weights = rank_weights.check_expert(layer_point(**FP8), 5, "cpu")
    assert made == ([] if room > 1 else [5, 5])
    assert [one.dtype for one in device_weights] == [torch.float64] * 2
    status = {record.status for record in measure(layer(compute), **FP8).records if record.phase == "layer"}
    assert status == ({"incorrect"} if compute is SwapsWeights else {"ok"})


def test_copies_of_weights_are_counted_by_what_the_sets_of_a_rank_read():
    point = layer_point()  # 8 slots of 4 ranks, 196608 bytes of bf16 each
    sets = [np.array([[0, 1, 2], [0, 1, 4]]), np.array([[0, 1, 2], [2, 1, -1]])]
    assert [rank_weights.of_rank(point, rank, sets) for rank in range(4)] == [2, 1, 1, 1]
    assert rank_weights.shared_out(point, sets) == 1
    assert rank_weights.shared_out(replace(point, tokens=(5, 3), ep_size=2), sets) == 1
    expert = 2 * 3 * 128 * 128
    copies = -(-2 * rank_weights.LARGEST_CACHE_BYTES // expert)  # one token less than none chooses one expert a rank
    assert rank_weights.bytes_of_copies(point) == 2 * copies * 2 * expert
    large = layer_point((64,) * 4, hidden=7168)
    assert rank_weights.bytes_of_copies(large) == 2 * 2 * 2 * 3 * 7168**2  # all are read: one copy, and its layout


class OnCpu(ExpertsOnly):
    def unavailable(self):
        return None


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("formats", [{}, FP8], ids=["bf16", "fp8"])
def test_an_expert_stage_by_itself(layout, formats):
    made = OnCpu({"rank": 2, "layout": layout})
    made.use_compute(PlainExperts)
    records = measure(made, kind=BackendKind.EXPERTS, **formats).records
    assert {(r.phase, r.status, r.reason, r.boundary) for r in records} == {("experts", "ok", None, "experts")}
    assert all((r.error_ratio or 0) > 0 for r in records)
    assert all(0 < (r.error_share or 0) <= 1 for r in records)


def test_a_slice_is_given_the_rows_that_come_to_it_alone():
    """Making those of all ranks is what a unit of 64 ranks took longest for."""
    given: list[tuple[int, int]] = []

    class Seen(OnCpu):
        def refill_ranks(self, set_index, batches):
            first = self.rank * self._point.experts_per_rank
            for batch in batches:
                here = ((batch.ids >= first) & (batch.ids < first + self._point.experts_per_rank)).any(axis=1)
                given.append((int(batch.rows[here].any(axis=1).sum()), int(batch.rows[~here].any(axis=1).sum())))
            super().refill_ranks(set_index, batches)

    made = Seen({"rank": 1, "layout": "rank_major"})
    made.use_compute(PlainExperts)
    assert {r.status for r in measure(made, kind=BackendKind.EXPERTS, tokens=(8, 8, 8, 8), top_k=1).records} == {"ok"}
    came, others = map(sum, zip(*given, strict=True))
    assert came > 0
    assert others == 0


def test_rows_of_an_expert_stage_count_the_slice_that_was_measured():
    """Where each rank's tokens stay with its own experts, the slice of a rank without tokens reads nothing."""
    local_only = Routing(kind=RoutingKind.LOCAL_ONLY)
    for rank, tokens in enumerate((5, 3, 0, 7)):
        made = OnCpu({"rank": rank, "layout": "rank_major"})
        made.use_compute(PlainExperts)
        unit = replace(layer_point(kind=BackendKind.EXPERTS, top_k=2), routing=local_only)
        record = measure_point(made, unit).records[0]
        assert (record.experts_hit, record.tokens_per_expert_mean) == (2.0 if tokens else 0.0, tokens)
        assert record.expert_weight_bytes == (2 * 3 * 128 * 128 * 2 if tokens else 0)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("formats", [{}, FP8], ids=["bf16", "fp8"])
def test_rows_by_expert_have_room_for_whole_tiles_of_masked_products(tokens, formats):
    point = layer_point((tokens,) * 4, kind=BackendKind.EXPERTS, **formats)
    made = OnCpu({"rank": 0, "layout": "expert_major"})
    made.use_compute(DeepGemm)
    assert made.unsupported(point) is None
    assert "combine_format=fp8" in (made.unsupported(replace(point, combine_format=RowFormat.FP8)) or "")


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_a_wrong_expert_stage_is_incorrect(layout):
    made = OnCpu({"rank": 1, "layout": layout})
    made.use_compute(SwapsWeights)
    records = measure(made, kind=BackendKind.EXPERTS, **FP8).records
    assert {r.status for r in records} == {"incorrect"}
    assert all((r.error_share or 0) > 1 for r in records)


def test_experts_missing_from_the_layer_alone_are_incorrect():
    """The layer in place runs; partials of before would give the right sums, were they not poisoned."""
    made = layer()

    class Session(LayerSession):
        def _time(self, seed, timed):
            assert self.timer is not None
            series = self.timer.series

            def idle(*given, **named):
                made.experts = lambda set_index: None  # type: ignore[method-assign]
                return series(*given, **named)

            self.timer.series = idle  # type: ignore[method-assign]
            return super()._time(seed, timed)

    records = measure(made, session=Session).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "time")}
    assert "wrong outputs in a timed series" in (records[0].reason or "")


def test_inputs_that_are_not_quantised_anew_are_incorrect():
    """What was quantised last is right for one set, and wrong for the other."""
    made = layer()

    class Session(LayerSession):
        def _time(self, seed, timed):
            assert self.timer is not None
            series = self.timer.series

            def stale(*given, **named):
                for held in made.exchange.given_ranks(0):
                    held.rows.zero_()
                made.before = lambda set_index: None  # type: ignore[method-assign]
                return series(*given, **named)

            self.timer.series = stale  # type: ignore[method-assign]
            return super()._time(seed, timed)

    records = measure(made, session=Session, **FP8).records
    assert {(r.status, r.failed_stage) for r in records} == {("incorrect", "time")}


class SlightlyStale(PlainExperts):
    """One scale of GEMM2 is off, by less than a token shows."""

    def changed(self, copy):
        assert copy.down_scales is not None
        scales = copy.down_scales.clone()
        scales[1, 0, 0] *= 0.965
        return replace(copy, down_scales=scales)


def test_a_stale_scale_that_no_token_shows_is_incorrect():
    records = measure(layer(SlightlyStale), tokens=(160, 160, 160, 160), hidden=512, top_k=4, **FP8).records
    (reason,) = {r.reason for r in records}
    assert {r.status for r in records} == {"incorrect"}
    assert reason is not None
    assert "experts wrong by the sum over their tokens; the worst, slot" in reason
    assert "columns 0 to 127" in reason
    assert "of 8 experts are wrong" in reason
    assert all(1 < (r.error_share or 0) < 2 for r in records)
