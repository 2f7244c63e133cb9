"""The oracle in torch says what the one in numpy says, which the reference was checked against. On any device."""

import numpy as np
import pytest
from tests._points import oracle_landed, received_from, slots_of, small_point

from epcross.harness.backends.base import Reduction
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.errors import ConfigError
from epcross.harness.point import Placement, Routing
from epcross.harness.terms import PlacementKind, RowFormat, WeightsBy
from epcross.harness.verification.device_check import DeviceChecker
from epcross.harness.verification.device_rows import DeviceRows
from epcross.harness.verification.verify import Checker
from epcross.harness.workload.batches import group_batch
from epcross.harness.workload.tape import Payload
from epcross.kernels import reference
from epcross.kernels.codecs import bf16_to_float, float_to_bf16

torch = pytest.importorskip("torch", reason="torch is not installed, which the oracle of the GPU domain is made of")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = (5, 3, 0, 7)


def on_device(landed):
    received = received_from(landed)
    return DeviceReceived(**{n: torch.from_numpy(getattr(received, n)).to(DEVICE) for n in received.__slots__})


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def tensor(array):
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(DEVICE)


def scene(payload, weights_by=WeightsBy.EXPERTS, reduction=None, **point):
    """A batch, what lands, and for each rank a checker of each kind."""
    at = small_point(TOKENS, **{"hidden": 160, **point})
    batch, slots = group_batch(at, seed=1, set_index=0, payload=payload), slots_of(at)
    rows = DeviceRows(DEVICE)
    device = [DeviceChecker(at, rank, slots, weights_by, reduction, rows=rows) for rank in range(len(TOKENS))]
    host = [Checker(at, rank, slots, weights_by, reduction) for rank in range(len(TOKENS))]
    return batch, oracle_landed(batch), device, host


@pytest.mark.parametrize("weights_by", list(WeightsBy))
@pytest.mark.parametrize("payload", list(Payload))
@pytest.mark.parametrize("row_format", list(RowFormat))
def test_it_agrees_with_the_reference_and_the_oracle_in_numpy(row_format, payload, weights_by):
    batch, landed, device, host = scene(payload, weights_by, dispatch_format=row_format)
    partials = []
    for rank, here in enumerate(landed):
        received = on_device(here)
        assert device[rank].check_received(batch, received) is None
        made = bits(device[rank].partials(batch, received))
        assert np.array_equal(made, host[rank].partials(batch, received_from(here)))
        partials.append(made)
    slots = slots_of(batch.point)
    weighted = weights_by is WeightsBy.COMBINE
    sums = reference.combine(batch.ids, batch.weights, landed, partials, slots.slot_rank, weighted=weighted)
    for rank, expected in enumerate(sums):
        assert device[rank].check_combined(batch, tensor(expected)) is None
        if len(expected):
            wrong = expected.copy()
            wrong[-1, 3] ^= 0x4000
            told = str(device[rank].check_combined(batch, tensor(wrong)))
            as_told = str(host[rank].check_combined(batch, wrong))
            if payload is Payload.ADVERSARIAL:  # NaN has many patterns, and sums may have any
                told, as_told = (text.split(", want")[0] for text in (told, as_told))
            assert told == as_told
            assert f"rank {rank}: a wrong combined sum (source {rank}, token {TOKENS[rank] - 1}, column 3)" in told


@pytest.mark.parametrize(
    "point",
    [
        {"hidden": 67},  # rows that end inside a vector
        {"hidden": 4},
        {"routing": Routing(masked_fraction=0.5)},
        {"placement": Placement(kind=PlacementKind.REPLICATED, num_slots=12)},
    ],
)
def test_odd_shapes_land_right(point):
    batch, landed, device, _ = scene(Payload.RANDOM, **point)
    for rank, here in enumerate(landed):
        assert device[rank].check_received(batch, on_device(here)) is None


def spoilt(**changes):
    """What rank 1 is told of a batch in which something is wrong."""
    batch, landed, device, _ = scene(Payload.RANDOM, dispatch_format=RowFormat.FP8)
    received = on_device(landed[1])
    for name, change in changes.items():
        change(getattr(received, name))
    return str(device[1].check_received(batch, received))


def test_what_is_wrong_is_said_as_ever():
    def flip(rows):
        rows[2, 5] ^= 1

    def other(ids):
        ids[0, 0] = 77

    assert "rank 1: wrong bytes in a row" in spoilt(rows=flip)
    assert "1 of " in spoilt(rows=flip)
    assert "wrong bytes in a scale row" in spoilt(scales=flip)
    assert "wrong ids of a row" in spoilt(ids=other)
    assert "wrong weights of a row" in spoilt(weights=lambda weights: weights.add_(0.5))
    assert "a row that was not sent here" in spoilt(token=lambda token: token.fill_(-1))
    assert "a row received twice" in spoilt(
        token=lambda token: token.fill_(int(token[0])), source=lambda source: source.fill_(int(source[0]))
    )


def test_rows_in_another_order_are_the_same_rows():
    batch, landed, device, _ = scene(Payload.ADVERSARIAL)
    received = on_device(landed[0])
    order = torch.randperm(len(received.source), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    shuffled = DeviceReceived(**{name: getattr(received, name)[order] for name in received.__slots__})
    assert device[0].check_received(batch, shuffled) is None
    assert torch.equal(
        device[0].partials(batch, shuffled).view(torch.int16),
        device[0].partials(batch, received)[order].view(torch.int16),
    )


def test_a_lost_row_is_missing():
    batch, landed, device, _ = scene(Payload.EXACT)
    received = on_device(landed[0])
    fewer = DeviceReceived(**{name: getattr(received, name)[1:] for name in received.__slots__})
    assert "a missing row" in str(device[0].check_received(batch, fewer))


def test_malformed_outputs_are_named():
    batch, landed, device, _ = scene(Payload.EXACT)
    received = on_device(landed[0])
    wrong = DeviceReceived(**{n: getattr(received, n) for n in received.__slots__ if n != "rows"}, rows=received.ids)
    assert "received rows are torch.int32" in str(device[0].check_received(batch, wrong))
    assert "combined is torch.float32" in str(device[0].check_combined(batch, torch.zeros(5, 160)))


def test_an_inexact_reduction_is_held_to_the_same_bound():
    reduction = Reduction(order="unordered", exact=False)
    batch, landed, device, host = scene(Payload.RANDOM, reduction=reduction)
    partials = [host[rank].partials(batch, received_from(here)) for rank, here in enumerate(landed)]
    sums = reference.combine(batch.ids, batch.weights, landed, partials, slots_of(batch.point).slot_rank)
    near = float_to_bf16(bf16_to_float(sums[0]) * np.float32(1 + 2**-9))
    far = float_to_bf16(bf16_to_float(sums[0]) * np.float32(1.05))
    for given in (sums[0], near, far):
        assert (device[0].check_combined(batch, tensor(given)) is None) == (
            host[0].check_combined(batch, given) is None
        )
    assert device[0].check_combined(batch, tensor(far)) is not None
    with pytest.raises(ConfigError, match="unordered"):
        scene(Payload.RANDOM, reduction=Reduction(order="unordered"))


@pytest.mark.parametrize("payload", list(Payload))
def test_timed_partials_depend_on_nothing_but_rank_source_and_token(payload):
    batch, landed, device, _ = scene(payload, routing=Routing(masked_fraction=0.2))
    other = group_batch(batch.point, seed=1, set_index=1, payload=payload)
    other_landed = oracle_landed(other)
    value: dict[tuple[int, int, int], bytes] = {}
    for gb, arrived in ((batch, landed), (other, other_landed)):
        for rank, here in enumerate(arrived):
            made = bits(device[rank].timed_partials(gb, on_device(here)))
            assert set(np.unique(np.abs(bf16_to_float(made)))) <= {1.0, 2.0, 4.0}
            for n, key in enumerate(zip(here.source.tolist(), here.token.tolist(), strict=True)):
                assert value.setdefault((rank, *key), made[n].tobytes()) == made[n].tobytes()
    assert len(set(value.values())) == len(value)  # no two alike: a partial of another rank or token is seen


@pytest.mark.parametrize("weights_by", list(WeightsBy))
def test_timed_sums_are_those_of_timed_partials(weights_by):
    batch, landed, device, _ = scene(Payload.RANDOM, weights_by)
    partials = [bits(device[rank].timed_partials(batch, on_device(here))) for rank, here in enumerate(landed)]
    weighted = weights_by is WeightsBy.COMBINE
    slot_rank = slots_of(batch.point).slot_rank
    sums = reference.combine(batch.ids, batch.weights, landed, partials, slot_rank, weighted=weighted)
    for rank, expected in enumerate(sums):
        assert device[rank].check_combined(batch, tensor(expected), timed=True) is None
    assert "in a timed series" in str(device[0].check_combined(batch, tensor(sums[0] ^ np.uint16(0x8000)), timed=True))
