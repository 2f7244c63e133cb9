"""Cases for the shared-memory exchanges: every rank makes all ranks' inputs from a seed and knows what must arrive."""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from epcross.harness.backends.base import Backend, Batch, Received, Shard
from epcross.harness.backends.shm import ShmFence, ShmSentinel, ShmTwoSided
from epcross.harness.point import Model, Placement, Point
from epcross.harness.terms import Regime, RowFormat
from epcross.kernels.formats import row_size

BACKENDS = {backend.name: backend for backend in (ShmFence, ShmSentinel, ShmTwoSided)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is exchanged. `payload` chooses the bits of rows, scales and weights."""

    tokens: tuple[int, ...]
    row_format: RowFormat = RowFormat.BF16
    payload: str = "random"  # or: ones (all bits set), armed (all words equal the sentinel), mixed
    hidden: int = 70
    top_k: int = 3
    num_slots: int = 12
    masked: float = 0.2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> Point:
        return Point(
            backend="any",
            model=Model(name="test", num_experts=self.num_slots, top_k=self.top_k, hidden=self.hidden, intermediate=1),
            ep_size=len(self.tokens),
            tokens_per_rank=max(self.tokens),
            tokens=self.tokens,
            max_tokens_per_rank=max(self.tokens),
            placement=Placement(num_slots=self.num_slots),
            dispatch_format=self.row_format,
            regime=Regime.STEADY,
        )

    @property
    def slot_rank(self) -> np.ndarray:
        """Strided on purpose: a kernel that divides would send elsewhere."""
        return (np.arange(self.num_slots) % len(self.tokens)).astype(np.int32)

    def batch(self, rank: int, seed: int, armed: int) -> Batch:
        """The inputs of `rank`; every rank can make those of all."""
        random = np.random.default_rng([seed, rank])
        tokens, size = self.tokens[rank], row_size(self.row_format, self.hidden)
        ids = np.argsort(random.random((tokens, self.num_slots)), axis=1)[:, : self.top_k].astype(np.int32)
        ids[random.random(ids.shape) < self.masked] = -1
        weights = random.random(ids.shape, np.float32)
        rows = random.integers(0, 256, (tokens, size.padded_row_bytes), np.uint8)
        scales = random.integers(0, 256, (tokens, size.padded_scale_bytes), np.uint8)
        rows[:, size.row_bytes :] = 0
        scales[:, size.scale_bytes :] = 0
        if self.payload == "ones":
            rows[:], scales[:] = 0xFF, 0xFF
            weights.view(np.uint32)[:] = 0xFFFFFFFF
        elif self.payload in ("armed", "mixed"):
            share = 1.0 if self.payload == "armed" else 0.1
            for words in (rows.view(np.uint64), scales.view(np.uint64)):
                words[random.random(words.shape) < share] = armed
            weights.view(np.uint32)[:] = armed & 0xFFFFFFFF
        return Batch(ids=ids, weights=weights, rows=rows, scales=scales)

    def shard(self, rank: int, seeds: tuple[int, ...], armed: int) -> Shard:
        return Shard(
            rank=rank,
            tokens=self.tokens,
            slot_rank=self.slot_rank,
            batches=tuple(self.batch(rank, seed, armed) for seed in seeds),
        )


def partial(case: Case, seed: int, source: int, token: int, rank: int, *, nan: bool = False) -> np.ndarray:
    """What the experts of `rank` return for a token: bf16 bits [hidden], some NaN and infinite where `nan`."""
    random = np.random.default_rng([seed, source, token, rank, 7])
    values = random.normal(size=case.hidden).astype(ml_dtypes.bfloat16)
    bits = values.view(np.uint16)
    if nan:
        bits[random.random(case.hidden) < 0.3] = 0xFFFF
        bits[random.random(case.hidden) < 0.1] = 0x7F80
    return bits


def check_received(case: Case, received: Received, rank: int, seed: int, armed: int) -> None:
    """Every row that must be here is, once, bit for bit, and nothing else."""
    found = {}
    for n in range(len(received.source)):
        key = (int(received.source[n]), int(received.token[n]))
        assert key not in found, f"row {key} came twice"
        found[key] = n
    for source, tokens in enumerate(case.tokens):
        batch = case.batch(source, seed, armed)
        for token in range(tokens):
            here = (batch.ids[token] >= 0) & (case.slot_rank[batch.ids[token]] == rank)
            n = found.pop((source, token), None)
            assert (n is not None) == here.any(), f"token {token} of rank {source}"
            if n is None:
                continue
            assert received.rows[n].tobytes() == batch.rows[token].tobytes()
            assert received.scales[n].tobytes() == batch.scales[token].tobytes()
            np.testing.assert_array_equal(received.ids[n], np.where(here, batch.ids[token], -1))
            expected = np.where(here, batch.weights[token].view(np.uint32), 0)
            np.testing.assert_array_equal(received.weights[n].view(np.uint32), expected)
    assert not found


def check_combined(case: Case, combined: np.ndarray, rank: int, seed: int, armed: int, *, nan: bool = False) -> None:
    """Sums in fp32 from +0, ranks ascending, rounded once; NaN where the sum is."""
    batch = case.batch(rank, seed, armed)
    for token in range(case.tokens[rank]):
        sums = np.zeros(case.hidden, np.float32)
        chosen = batch.ids[token][batch.ids[token] >= 0]
        for destination in sorted(set(case.slot_rank[chosen].tolist())):
            bits = partial(case, seed, rank, token, destination, nan=nan)
            with np.errstate(invalid="ignore"):
                sums += bits.view(ml_dtypes.bfloat16).astype(np.float32)
        expected = sums.astype(ml_dtypes.bfloat16).view(np.uint16)
        is_nan = np.isnan(sums)
        np.testing.assert_array_equal(combined[token][~is_nan], expected[~is_nan])
        assert np.isnan(combined[token].view(ml_dtypes.bfloat16).astype(np.float32))[is_nan].all()


def staged(case: Case, received: Received, rank: int, seed: int, *, nan: bool = False) -> np.ndarray:
    rows = [
        partial(case, seed, int(source), int(token), rank, nan=nan)
        for source, token in zip(received.source, received.token, strict=True)
    ]
    return np.array(rows, np.uint16).reshape(len(rows), case.hidden)


def round_trip(backend: Backend, case: Case, rank: int, set_index: int, seed: int, armed: int, **nan: bool) -> None:
    """One verified round: dispatch, check, experts, combine, check."""
    backend.dispatch(set_index)
    received = backend.received(set_index)
    check_received(case, received, rank, seed, armed)
    backend.stage(set_index, staged(case, received, rank, seed, **nan))
    backend.experts(set_index)
    backend.combine(set_index)
    check_combined(case, backend.combined(set_index), rank, seed, armed, **nan)
