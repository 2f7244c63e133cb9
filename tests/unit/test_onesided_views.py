"""What a workspace shows, and how it is armed: on CPU memory, filled as the kernels fill it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (make torch)")

from epcross.kernels.onesided.agreement import shape_of  # noqa: E402
from epcross.kernels.onesided.layout import ARMED_WORD, CONTROL, Layout, Protocol, layout  # noqa: E402
from epcross.kernels.onesided.views import Views  # noqa: E402

EP, CAPACITY, TOP_K, HIDDEN = 5, 3, 7, 48


def at(protocol: Protocol, dispatch_format: str = "fp8") -> Layout:
    return layout(
        protocol,
        shape_of(ep_size=EP, max_tokens_per_rank=CAPACITY, top_k=TOP_K, hidden=HIDDEN, dispatch_format=dispatch_format),
    )


def rank_bytes(of: Layout) -> int:
    return -(-of.total_bytes // 128) * 128


def filled(of: Layout, ranks: int) -> np.ndarray:
    """Random bytes, except that every word is its own."""
    return np.random.default_rng(7).integers(0, 256, (ranks, rank_bytes(of)), np.uint8)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("dispatch_format", ["bf16", "fp8", "nvfp4"])
def test_views_show_the_bytes_that_the_kernels_index(ranks: int, protocol: Protocol, dispatch_format: str) -> None:
    of = at(protocol, dispatch_format)
    memory = filled(of, ranks)
    views = Views(torch.from_numpy(memory), of)
    dispatched, shape = views.dispatched, of.shape
    assert len(dispatched.sets) == (2 if protocol is Protocol.SENTINEL else 1)
    lead = (ranks,) if ranks > 1 else ()
    for parity, landing in enumerate(dispatched.sets):
        assert tuple(landing.rows.shape) == (*lead, EP, CAPACITY, shape.row_bytes)
        assert tuple(landing.scales.shape) == (*lead, EP, CAPACITY, shape.scale_bytes)
        for rank in range(ranks):
            for source in range(EP):
                for token in range(CAPACITY):
                    where = (rank, source, token) if ranks > 1 else (source, token)
                    start = of[f"records_{parity}"].offset + (source * CAPACITY + token) * of.record_stride
                    record = memory[rank, start:]
                    scales = record[shape.row_bytes :]
                    ids = scales[shape.scale_bytes :]
                    assert landing.rows[where].numpy().tobytes() == record[: shape.row_bytes].tobytes()
                    assert landing.scales[where].numpy().tobytes() == scales[: shape.scale_bytes].tobytes()
                    assert landing.ids[where].numpy().tobytes() == ids[: 4 * TOP_K].tobytes()
                    assert landing.weights[where].numpy().tobytes() == ids[4 * TOP_K : 8 * TOP_K].tobytes()
                    start = of["partials"].offset + (source * CAPACITY + token) * of.partial_stride
                    partial = views.partials[where].view(torch.uint8).numpy()
                    assert partial.tobytes() == memory[rank, start : start + 2 * HIDDEN].tobytes()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("protocol", Protocol)
def test_arming_leaves_armed_words_where_words_are_awaited_and_zero_elsewhere(ranks: int, protocol: Protocol) -> None:
    of = at(protocol)
    memory = filled(of, ranks)
    views = Views(torch.from_numpy(memory), of)
    views.arm(0xFFFF_FFFF_FFFF_FFFE)
    expected = np.zeros_like(memory)
    for region in of.armed:
        expected[:, region.offset : region.offset + region.size].view("<u8")[:] = ARMED_WORD
    control = expected[:, of["control"].offset :][:, : CONTROL.itemsize]
    control.view(CONTROL)["dispatch_epoch"] = 0xFFFF_FFFF_FFFF_FFFE
    assert np.array_equal(memory, expected)
    assert views.dispatch_epoch.tolist() == [-2] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_set_of_the_last_dispatch_is_the_one_shown(ranks: int) -> None:
    of = at(Protocol.SENTINEL)
    dispatched = Views(torch.from_numpy(filled(of, ranks)), of).dispatched
    for epoch in (6, 7, -1, -2):
        dispatched.epoch.fill_(epoch)
        assert dispatched.set_index.tolist() == [epoch % 2] * ranks
        assert dispatched.set_index.dtype is torch.int32
        assert dispatched.rows.data_ptr() == dispatched.sets[epoch % 2].rows.data_ptr()
        assert dispatched.ids.data_ptr() == dispatched.sets[epoch % 2].ids.data_ptr()
    assert dispatched.sets[0].rows.data_ptr() != dispatched.sets[1].rows.data_ptr()
    fence = Views(torch.from_numpy(filled(at(Protocol.FENCE), ranks)), at(Protocol.FENCE)).dispatched
    fence.epoch.fill_(7)
    assert fence.set_index.tolist() == [0] * ranks


@pytest.mark.parametrize("epoch", [1, 2, (1 << 43) + 5, (1 << 64) - 1])
@pytest.mark.parametrize("ep_size", [2, 70])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("protocol", Protocol)
def test_what_arrived_is_what_headers_of_this_round_say(
    protocol: Protocol, ranks: int, ep_size: int, epoch: int
) -> None:
    """Headers of this round among those of the rounds before, as header.cuh makes them."""
    shape = shape_of(ep_size=ep_size, max_tokens_per_rank=4, top_k=1, hidden=8, dispatch_format="bf16")
    of, random = layout(protocol, shape), np.random.default_rng(3)
    memory = np.zeros((ranks, rank_bytes(of)), np.uint8)
    counts = random.integers(0, 5, ep_size)
    sent = (random.random((ranks, 4, ep_size)) < 0.5) & (np.arange(4)[:, None] < counts)
    for parity in range(of.sets):
        for rank in range(ranks):
            for token in range(4):
                for source in range(ep_size):
                    age = epoch % of.sets != parity  # the set of the round before
                    old = token >= max(int(counts[source]), 1)  # left from earlier: two rounds with two sets
                    count, present = (4, True) if age or old else (counts[source], sent[rank, token, source])
                    since = int(age) + int(old) * of.sets
                    header = ((epoch - since) << 21 | int(count) << 1 | int(present)) % (1 << 64)
                    start = of[f"headers_{parity}"].offset + 8 * (token * ep_size + source)
                    memory[rank, start : start + 8].view("<u8")[0] = header
    memory[:, : CONTROL.itemsize].view(CONTROL)["combine_epoch"] = epoch
    dispatched = Views(torch.from_numpy(memory), of).dispatched
    arrived, tokens, mask = (
        value.numpy() for value in (dispatched.arrived(), dispatched.source_tokens(), dispatched.source_mask)
    )
    if ranks == 1:
        arrived, tokens, mask = arrived[None], tokens[None], mask[None]
    assert np.array_equal(arrived, sent.transpose(0, 2, 1))
    assert np.array_equal(tokens, np.tile(counts, (ranks, 1)))
    for source in range(ep_size):
        assert np.array_equal(mask[..., source // 32] >> source % 32 & 1, sent[..., source])
    assert mask.shape == (ranks, 4, 3)
