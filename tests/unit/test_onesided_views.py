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
        masks = of["received_masks"].offset
        shown = dispatched.source_mask[None] if ranks == 1 else dispatched.source_mask
        for rank in range(ranks):
            for token in range(CAPACITY):
                expected = memory[rank, masks + 16 * token : masks + 16 * token + 12]
                assert shown[rank, token].numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("protocol", Protocol)
def test_arming_leaves_armed_words_where_words_are_awaited_and_zero_elsewhere(ranks: int, protocol: Protocol) -> None:
    of = at(protocol)
    memory = filled(of, ranks)
    views = Views(torch.from_numpy(memory), of)
    views.arm(0xFFFF_FFFE)
    expected = np.zeros_like(memory)
    for region in of.armed:
        expected[:, region.offset : region.offset + region.size].view("<u8")[:] = ARMED_WORD
    control = expected[:, of["control"].offset :][:, : CONTROL.itemsize]
    control.view(CONTROL)["dispatch_epoch"] = 0xFFFF_FFFE
    assert np.array_equal(memory, expected)
    assert views.dispatch_epoch.tolist() == [-2] * ranks
    memory[:, of["control"].offset :][:, : CONTROL.itemsize].view(CONTROL)["set_index"] = 1
    assert views.dispatched.set_index.tolist() == [1] * ranks


def test_the_set_of_the_last_dispatch_is_the_one_shown() -> None:
    of = at(Protocol.SENTINEL)
    memory = filled(of, 1)
    views = Views(torch.from_numpy(memory), of)
    dispatched = views.dispatched
    for parity in (0, 1):
        dispatched.set_index.fill_(parity)
        assert dispatched.rows.data_ptr() == dispatched.sets[parity].rows.data_ptr()
        assert dispatched.ids.data_ptr() == dispatched.sets[parity].ids.data_ptr()
    assert dispatched.sets[0].rows.data_ptr() != dispatched.sets[1].rows.data_ptr()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_arrived_is_in_the_mask_and_within_the_round(ranks: int) -> None:
    of = layout(Protocol.FENCE, shape_of(ep_size=70, max_tokens_per_rank=4, top_k=1, hidden=8, dispatch_format="bf16"))
    memory = np.zeros((ranks, rank_bytes(of)), np.uint8)
    sent = np.random.default_rng(3).random((ranks, 4, 70)) < 0.5
    masks = np.zeros((ranks, 4, 4), "<u4")
    for rank, token, source in zip(*sent.nonzero(), strict=True):
        masks[rank, token, source // 32] |= np.uint32(1 << source % 32)
    start = of["received_masks"].offset
    memory[:, start : start + 64] = masks.reshape(ranks, -1).view(np.uint8)
    most = np.arange(3, 3 + ranks)
    memory[:, : CONTROL.itemsize].view(CONTROL)["most_tokens"] = most[:, None]
    sent &= np.arange(4)[None, :, None] < most[:, None, None]
    arrived = Views(torch.from_numpy(memory), of).dispatched.arrived().numpy()
    assert np.array_equal(arrived if ranks > 1 else arrived[None], sent.transpose(0, 2, 1))
