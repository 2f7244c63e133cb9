"""The gloo baseline, in real processes, against a numpy computation of the same exchange, bit for bit."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from _store_ranks import run_on_store

from epcross.harness.backends.base import Batch, Description, Received, Shard
from epcross.harness.backends.gloo import Gloo
from epcross.harness.point import Model, Placement, Point
from epcross.harness.running.group import StoreGroup
from epcross.harness.terms import Domain, PlacementKind, Regime, RowFormat
from epcross.kernels.formats import row_size

if reason := Gloo({}).unavailable():
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.beside

TIMEOUT_S = 90
BF16 = np.dtype(ml_dtypes.bfloat16)
SETS = 2
TOP_K = 3
HIDDEN = 72  # 144 bytes a row; fp8 rows and scale rows then need padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One exchange: tokens of each rank, how rows travel, and the share of selections dropped."""

    tokens: tuple[int, ...]
    row_format: RowFormat = RowFormat.BF16
    masked: float = 0.2

    @property
    def point(self) -> Point:
        ranks = len(self.tokens)
        return Point(
            backend="gloo",
            model=Model(name="small", num_experts=4 * ranks, top_k=TOP_K, hidden=HIDDEN, intermediate=8),
            ep_size=ranks,
            tokens_per_rank=max(self.tokens),
            tokens=self.tokens,
            max_tokens_per_rank=max(self.tokens),
            placement=Placement(kind=PlacementKind.CONTIGUOUS, num_slots=4 * ranks),
            dispatch_format=self.row_format,
            regime=Regime.STEADY,
        )

    @property
    def slot_rank(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.tokens), dtype=np.int32), 4)

    def batch(self, rank: int, index: int, fill: int) -> Batch:
        """Any rank can make any rank's inputs, so what must arrive is known without communication."""
        rng = np.random.default_rng((rank, index, fill))
        tokens, size = self.tokens[rank], row_size(self.row_format, HIDDEN)
        slots = len(self.slot_rank)
        ids = np.array([rng.permutation(slots)[:TOP_K] for _ in range(tokens)], dtype=np.int32).reshape(tokens, TOP_K)
        ids[rng.random(ids.shape) < self.masked] = -1
        rows = np.zeros((tokens, size.padded_row_bytes), dtype=np.uint8)
        rows[:, : size.row_bytes] = rng.integers(0, 256, (tokens, size.row_bytes))
        scales = np.zeros((tokens, size.padded_scale_bytes), dtype=np.uint8)
        scales[:, : size.scale_bytes] = rng.integers(0, 256, (tokens, size.scale_bytes))
        return Batch(ids=ids, weights=rng.random((tokens, TOP_K), dtype=np.float32), rows=rows, scales=scales)

    def partials(self, here: int, source: int, token: int, fill: int) -> np.ndarray:
        """What the experts of rank `here` return for one token: bf16 values whose sum depends on its order."""
        rng = np.random.default_rng((here, source, token, fill))
        return (rng.standard_normal(HIDDEN) * np.exp2(rng.integers(-9, 9, HIDDEN))).astype(BF16)

    def expected_sums(self, rank: int, index: int, fill: int) -> np.ndarray:
        ids = self.batch(rank, index, fill).ids
        sums = np.zeros((len(ids), HIDDEN), dtype=np.float32)
        for token, selected in enumerate(ids):
            for here in sorted({int(self.slot_rank[slot]) for slot in selected if slot >= 0}):
                sums[token] += self.partials(here, rank, token, fill).astype(np.float32)
        return sums.astype(BF16).view(np.uint16)


def check_received(case: Case, rank: int, index: int, fill: int, got: Received) -> None:
    """Every (source, token) with an expert here, once, with its own bits and only the selections of this rank."""
    sent = [case.batch(source, index, fill) for source in range(len(case.tokens))]
    wanted = [
        (source, token)
        for source, batch in enumerate(sent)
        for token, ids in enumerate(batch.ids)
        if any(case.slot_rank[slot] == rank for slot in ids if slot >= 0)
    ]
    assert list(zip(got.source.tolist(), got.token.tolist(), strict=True)) == wanted
    for at, (source, token) in enumerate(wanted):
        batch = sent[source]
        here = np.array([slot >= 0 and case.slot_rank[slot] == rank for slot in batch.ids[token]])
        np.testing.assert_array_equal(got.rows[at], batch.rows[token])
        np.testing.assert_array_equal(got.scales[at], batch.scales[token])
        np.testing.assert_array_equal(got.ids[at], np.where(here, batch.ids[token], -1))
        np.testing.assert_array_equal(got.weights[at], np.where(here, batch.weights[token], 0))


def exchange(case: Case, group: StoreGroup) -> Description:
    """The whole life of the backend at one point: two sets, checked, timed as a chain, refilled and checked again."""
    rank = group.rank
    backend = Gloo({})
    batches = tuple(case.batch(rank, index, 0) for index in range(SETS))
    shard = Shard(rank=rank, tokens=case.tokens, slot_rank=case.slot_rank, batches=batches)
    backend.prepare(case.point, shard, group)
    for fill in range(2):
        for index in range(SETS):
            if fill:
                backend.refill(index, case.batch(rank, index, fill))
            backend.poison()
            backend.dispatch(index)
            got = backend.received(index)
            check_received(case, rank, index, fill, got)
            sent_by = zip(got.source.tolist(), got.token.tolist(), strict=True)
            partials = [case.partials(rank, source, token, fill) for source, token in sent_by]
            backend.stage(index, np.array(partials, dtype=BF16).reshape(-1, HIDDEN).view(np.uint16))
            backend.combine(index)
            np.testing.assert_array_equal(backend.combined(index), case.expected_sums(rank, index, fill))
        for _ in range(3):  # the timed pair: experts must put the staged partials of this set where combine reads
            for index in range(SETS):
                backend.dispatch(index)
                backend.experts(index)
                backend.combine(index)
                np.testing.assert_array_equal(backend.combined(index), case.expected_sums(rank, index, fill))
    described = backend.describe()
    backend.close()
    backend.close()
    return described


def exchanges(group: StoreGroup, cases: list[Case]) -> list[Description]:
    """One worker: several points, one after another, in one process group."""
    return [exchange(case, group) for case in cases]


def run_ranks(cases: list[Case]) -> list[list[Description]]:
    """What each rank described at each point, once every one has checked everything."""
    return run_on_store(len(cases[0].tokens), exchanges, cases, limit_s=TIMEOUT_S)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [Case(tokens=(9, 9)), Case(tokens=(5, 3), masked=1.0), Case(tokens=(1, 4), row_format=RowFormat.MXFP8)],
            id="ep2",
        ),
        pytest.param([Case(tokens=(7, 0, 12), row_format=RowFormat.FP8), Case(tokens=(0, 0, 1))], id="ep3"),
    ],
)
def test_exchange_is_exact_at_one_point_after_another(cases: list[Case]) -> None:
    by_rank = run_ranks(cases)
    for rank, described in enumerate(by_rank):
        for case, seen in zip(cases, described, strict=True):
            assert seen.transport == "gloo tcp"
            assert 0 < seen.workspace_bytes <= Gloo({}).workspace_bytes(case.point)
            size = row_size(case.row_format, HIDDEN)
            padding = size.padded_bytes - size.row_bytes - size.scale_bytes
            meta_bytes = 32  # token, 3 ids and 3 weights of 4 bytes each, padded to 16
            pairs = [
                sum(
                    len({int(case.slot_rank[slot]) for slot in row if slot >= 0})
                    for row in case.batch(rank, index, 1).ids
                )
                for index in range(SETS)
            ]
            assert seen.protocol_bytes == 8 * len(case.tokens) + round((padding + meta_bytes) * sum(pairs) / SETS)


def test_points_of_other_domains_and_formats_are_unsupported() -> None:
    point = Case(tokens=(1, 1)).point
    assert Gloo({}).unsupported(point) is None
    assert "domain=nvlink" in (Gloo({}).unsupported(replace(point, domain=Domain.NVLINK)) or "")
    assert "combine_format=fp8" in (Gloo({}).unsupported(replace(point, combine_format=RowFormat.FP8)) or "")
