"""What the GPU tests of the one-sided exchange rest on, without a GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (make torch)")

from epcross.kernels import reference  # noqa: E402
from epcross.kernels.formats import RowFormat  # noqa: E402

from tests.gpu._rounds import RESERVED, Case, make_inputs, random_bits, random_ids, same_sums  # noqa: E402  # isort: skip


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("dispatch_format", RowFormat)
def test_the_oracle_agrees_with_the_reference(dispatch_format: RowFormat, reserved: bool) -> None:
    """Small cases against kernels/reference.py, which is obviously right."""
    case = Case(ep_size=3, capacity=4, dispatch_format=dispatch_format, hidden=32, num_slots=6, top_k=3)
    inputs = make_inputs(case, [4, 0, 2], 5, routing="masked", reserved=reserved, device="cpu")
    slot_rank = case.linear("cpu")
    ids, weights, rows, scales = (
        [tensor[rank, :count].numpy() for rank, count in enumerate(inputs.counts)]
        for tensor in (inputs.ids, inputs.weights, inputs.rows, inputs.scales)
    )
    landed = reference.dispatch(ids, weights, rows, scales, slot_rank.numpy().astype(np.int32), 3)
    sent = inputs.destinations(slot_rank).numpy()
    answers = inputs.partials.view(torch.int16).numpy().view(np.uint16)
    for rank, here in enumerate(landed):
        assert np.array_equal(np.argwhere(sent[..., rank]), np.stack([here.source, here.token], axis=1))
    partials = [answers[rank][here.source, here.token] for rank, here in enumerate(landed)]
    sums = reference.combine(ids, weights, landed, partials, slot_rank.numpy().astype(np.int32))
    expected = inputs.combined(slot_rank)
    for rank, count in enumerate(inputs.counts):
        ours = torch.from_numpy(sums[rank].view(np.int16)).view(torch.bfloat16)
        assert same_sums(ours, expected[rank, :count])


def test_sums_are_compared_by_their_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert same_sums(nan, -nan)
    assert not same_sums(nan, zero)
    assert not same_sums(zero, -zero)
    assert same_sums(zero, zero.clone())


def test_ids_are_distinct_and_reach_every_slot() -> None:
    case = Case(ep_size=2, capacity=128)
    ids = random_ids(case, 128, torch.Generator("cpu").manual_seed(1))
    assert all(len(set(row)) == case.top_k for row in ids.view(-1, case.top_k).tolist())
    assert set(ids.unique().tolist()) == set(range(case.num_slots))
    masked = random_ids(case, 128, torch.Generator("cpu").manual_seed(1), "masked")
    assert 0.5 < float((masked == -1).float().mean()) < 0.7
    skewed = random_ids(case, 128, torch.Generator("cpu").manual_seed(1), "skewed")
    assert float(skewed.float().mean()) < 64 < float(ids.float().mean())


def test_reserved_words_are_half_of_all() -> None:
    bits = random_bits((64, 128), torch.Generator("cpu").manual_seed(1), reserved=True)
    words = bits.view(torch.int64).flatten().tolist()
    signed = {word - (1 << 64) if word >> 63 else word for word in RESERVED}
    assert signed <= set(words)
    assert 0.4 < sum(word in signed for word in words) / len(words) < 0.6
