"""The gloo baseline, in real processes, against a numpy computation of the same exchange, bit for bit."""

import multiprocessing
import traceback
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from epcross.harness.backends.base import Batch, Received, Shard
from epcross.harness.backends.gloo import Gloo
from epcross.harness.point import Model, Placement, Point
from epcross.harness.terms import Domain, PlacementKind, Regime, RowFormat
from epcross.kernels.formats import row_size

if reason := Gloo({}).unavailable():
    pytest.skip(reason, allow_module_level=True)

TIMEOUT_S = 60
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGroup:
    """As much of `Group` as the backend uses, over a file both ranks can see."""

    rank: int
    size: int
    path: Path

    def torch(self, backend: str) -> Any:
        import torch.distributed as dist

        dist.init_process_group(backend, init_method=f"file://{self.path}", rank=self.rank, world_size=self.size)
        return dist.group.WORLD


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


def exchange(case: Case, rank: int, path: Path) -> dict[str, Any]:
    """The whole life of the backend on one rank: two sets, checked, timed-style, refilled and checked again."""
    point = case.point
    backend = Gloo({})
    assert backend.unsupported(point) is None
    batches = tuple(case.batch(rank, index, 0) for index in range(SETS))
    shard = Shard(rank=rank, tokens=case.tokens, slot_rank=case.slot_rank, batches=batches)
    backend.prepare(point, shard, TorchGroup(rank=rank, size=len(case.tokens), path=path))  # type: ignore[arg-type]
    for fill in range(2):
        for index in range(SETS):
            if fill:
                backend.refill(index, case.batch(rank, index, fill))
            backend.poison()
            backend.dispatch(index)
            got = backend.received(index)
            check_received(case, rank, index, fill, got)
            partials = [case.partials(rank, int(s), int(t), fill) for s, t in zip(got.source, got.token, strict=True)]
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
    import torch.distributed as dist

    dist.destroy_process_group()
    return {
        "workspace_bytes": described.workspace_bytes,
        "protocol_bytes": described.protocol_bytes,
        "transport": described.transport,
    }


def rank_main(case: Case, rank: int, path: Path, results: Any) -> None:
    try:
        results.put((rank, exchange(case, rank, path), None))
    except BaseException:
        results.put((rank, {}, traceback.format_exc()))


def run_ranks(case: Case, path: Path) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")  # a forked torch may hold locks of threads that were not forked
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(case, rank, path, results), daemon=True)
        for rank in range(len(case.tokens))
    ]
    for process in ranks:
        process.start()
    described: dict[int, dict[str, Any]] = {}
    try:
        for _ in ranks:
            rank, result, failure = results.get(timeout=TIMEOUT_S)
            assert failure is None, f"rank {rank}:\n{failure}"
            described[rank] = result
        for process in ranks:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
    except Empty:
        pytest.fail(f"ranks {sorted(set(range(len(ranks))) - set(described))} sent nothing within {TIMEOUT_S} s")
    finally:
        for process in ranks:
            process.kill()
    return [described[rank] for rank in range(len(ranks))]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(tokens=(9, 9)), id="ep2"),
        pytest.param(Case(tokens=(7, 0, 12), row_format=RowFormat.FP8), id="ep3-ragged-fp8"),
        pytest.param(Case(tokens=(5, 3), masked=1.0), id="ep2-all-masked"),
    ],
)
def test_exchange_is_exact(case: Case, tmp_path: Path) -> None:
    described = run_ranks(case, tmp_path / "store")
    point, size = case.point, row_size(case.row_format, HIDDEN)
    unpadded = size.row_bytes + size.scale_bytes
    for rank, seen in enumerate(described):
        assert seen["transport"] == "gloo tcp"
        assert 0 < seen["workspace_bytes"] <= Gloo({}).workspace_bytes(point)
        pairs = []
        for index in range(SETS):
            ids = case.batch(rank, index, 1).ids
            pairs.append(sum(len({int(case.slot_rank[slot]) for slot in row if slot >= 0}) for row in ids))
        meta_bytes = 32  # token, 3 ids and 3 weights of 4 bytes each, padded to 16
        beside = size.padded_bytes - unpadded + meta_bytes
        assert seen["protocol_bytes"] == 8 * point.ep_size + round(beside * sum(pairs) / SETS)


def test_a_worker_that_raises_is_named(tmp_path: Path) -> None:
    case = Case(tokens=(2,), masked=0.0)
    (tmp_path / "store").mkdir()  # a folder where torch wants a file
    with pytest.raises(AssertionError, match="rank 0:"):
        run_ranks(case, tmp_path / "store")


def test_points_of_other_domains_and_formats_are_unsupported() -> None:
    from dataclasses import replace

    point = Case(tokens=(1, 1)).point
    assert Gloo({}).unsupported(point) is None
    assert "domain=nvlink" in (Gloo({}).unsupported(replace(point, domain=Domain.NVLINK)) or "")
    assert "combine_format=fp8" in (Gloo({}).unsupported(replace(point, combine_format=RowFormat.FP8)) or "")
