"""The three exchanges between real processes, compared bit for bit with numpy."""

import time
from itertools import product

import numpy as np
import pytest
from _exchange_case import BACKENDS, Case, round_trip, staged
from _files_group import FilesGroup
from _ranks import run_ranks

from epcross.harness.backends.shm import ShmBackend
from epcross.harness.errors import ConfigError, EpcrossError, WaitExpired
from epcross.harness.terms import RowFormat
from epcross.kernels.shm import build
from epcross.kernels.shm.segment import SHM_DIRECTORY, segment_name

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

EP_SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.build()


def _prepared(group: FilesGroup, name: str, case: Case, seeds: tuple[int, ...]) -> ShmBackend:
    backend = BACKENDS[name]({**BACKENDS[name].option_defaults(), **case.options})
    assert backend.unsupported(case.point) is None
    backend.prepare(case.point, case.shard(group.rank, seeds, build.load().ARMED), group)
    return backend


def _matrix(group: FilesGroup, name: str) -> int:
    """Every combination of counts, format and payload, two rounds of two sets each."""
    armed, ep = build.load().ARMED, group.size
    counts = ((3,) * ep, tuple((rank * 2) % 5 for rank in range(ep)))
    formats = (RowFormat.BF16, RowFormat.FP8, RowFormat.NVFP4)
    cases = [
        Case(tokens=tokens, row_format=row_format, payload=payload)
        for tokens, row_format, payload in product(counts, formats, ("random", "ones", "armed", "mixed"))
    ]
    rounds = 0
    for case in [*cases, Case(tokens=(0,) * ep), Case(tokens=(3,) * ep, masked=1.0)]:
        backend = _prepared(group, name, case, (1, 2))
        assert not (SHM_DIRECTORY / segment_name(group.shared_name, group.rank)).exists(), "a kill would leak it"
        for set_index in (0, 1, 0, 1):
            round_trip(backend, case, group.rank, set_index, set_index + 1, armed)
            rounds += 1
        backend.close()
        backend.close()
    return rounds


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("name", BACKENDS)
def test_any_counts_formats_and_bits_arrive_exactly(name: str, ep_size: int) -> None:
    assert run_ranks(ep_size, _matrix, name) == [26 * 4] * ep_size


def _unequal_speeds(group: FilesGroup, name: str, first_epoch: int, rounds: int) -> int:
    """Rounds without a barrier, inputs changed in place before each, one rank slow at a time."""
    armed = build.load().ARMED
    counts = tuple(2 + rank for rank in range(group.size))
    case = Case(tokens=counts, payload="mixed", options={"first_epoch": first_epoch})
    backend = _prepared(group, name, case, (0, 1))
    for index in range(rounds):
        if index % 5 == 0 and (index // 5) % group.size == group.rank:
            time.sleep(0.002)  # the others run ahead as far as the protocol lets them
        backend.refill(index % 2, case.batch(group.rank, index, armed))
        backend.poison()
        round_trip(backend, case, group.rank, index % 2, index, armed)
    epoch = backend._ready.epoch
    backend.close()
    return epoch


@pytest.mark.parametrize("ep_size", [2, 3])
@pytest.mark.parametrize("name", BACKENDS)
def test_rounds_follow_each_other_with_ranks_of_unequal_speed(name: str, ep_size: int) -> None:
    assert run_ranks(ep_size, _unequal_speeds, name, 1, 200) == [200] * ep_size


@pytest.mark.parametrize("name", BACKENDS)
def test_epochs_wrap(name: str) -> None:
    assert run_ranks(2, _unequal_speeds, name, 2**32 - 3, 8) == [4] * 2


def _nan_partials(group: FilesGroup, name: str) -> int:
    """NaN and infinite partials, among them rows of the sentinel's own bits."""
    armed = build.load().ARMED
    case = Case(tokens=(4,) * group.size, hidden=64)
    backend = _prepared(group, name, case, (3,))
    for _ in range(3):
        round_trip(backend, case, group.rank, 0, 3, armed, nan=True)
    backend.dispatch(0)
    received = backend.received(0)
    backend.stage(0, np.full((len(received.source), 32), armed, np.uint64).view(np.uint16).reshape(-1, 64 * 2)[:, :64])
    backend.combine(0)
    reached = (case.batch(group.rank, 3, armed).ids >= 0).any(axis=1)
    combined = backend.combined(0)
    assert ((combined[reached] & 0x7FFF) > 0x7F80).all(), "a NaN was lost"
    assert (combined[~reached] == 0).all()
    backend.close()
    return int(reached.sum())


@pytest.mark.parametrize("name", BACKENDS)
def test_nan_stays_nan_in_combine(name: str) -> None:
    assert all(count > 0 for count in run_ranks(2, _nan_partials, name))


def _peer_missing(group: FilesGroup, name: str) -> str:
    """Rank 1 prepares, does one round and does not come to the next."""
    case = Case(tokens=(2,) * group.size, masked=0.0, num_slots=2 * group.size, options={"wait_limit_s": 0.2})
    armed = build.load().ARMED
    backend = _prepared(group, name, case, (1,))
    round_trip(backend, case, group.rank, 0, 1, armed)
    message = ""
    if group.rank != 1:
        begin = time.monotonic()
        with pytest.raises(WaitExpired) as first:
            backend.dispatch(0)
        assert 0.2 <= time.monotonic() - begin < 5.0
        begin = time.monotonic()
        with pytest.raises(WaitExpired):
            backend.combine(0)
        assert time.monotonic() - begin < 0.1, "a broken exchange must not wait again"
        message = str(first.value)
    group.barrier()
    backend.close()
    return message


@pytest.mark.parametrize("name", BACKENDS)
def test_a_peer_that_does_not_come_is_named(name: str) -> None:
    message = run_ranks(2, _peer_missing, name)[0]
    assert "rank 0" in message
    assert "rank 1" in message
    assert "dispatch" in message
    assert "epoch 2" in message


def _peer_missing_in_combine(group: FilesGroup, name: str) -> str:
    case = Case(tokens=(2,) * group.size, masked=0.0, top_k=4, num_slots=4, options={"wait_limit_s": 0.2})
    backend = _prepared(group, name, case, (1,))
    backend.dispatch(0)
    backend.stage(0, staged(case, backend.received(0), group.rank, 1))
    message = ""
    if group.rank != 1:
        with pytest.raises(WaitExpired) as expired:
            backend.combine(0)
        message = str(expired.value)
    group.barrier()
    return message


@pytest.mark.parametrize("name", BACKENDS)
def test_a_peer_that_does_not_return_partials_is_named(name: str) -> None:
    message = run_ranks(2, _peer_missing_in_combine, name)[0]
    assert "rank 0 waited" in message
    assert "rank 1 in combine, epoch 1" in message


def _misuse(group: FilesGroup, name: str) -> list[str]:
    """What a wrong caller is told; one rank is enough."""
    armed = build.load().ARMED
    case = Case(tokens=(2,))
    backend = _prepared(group, name, case, (1,))
    messages = []
    for bad_id in (-2, case.num_slots):
        batch = case.batch(0, 1, armed)
        batch.ids[1, 2] = bad_id
        with pytest.raises(ConfigError) as refused:
            backend.refill(0, batch)
        messages.append(str(refused.value))
    with pytest.raises(ConfigError) as refused:
        backend.refill(0, Case(tokens=(1,)).batch(0, 1, armed))
    messages.append(str(refused.value))
    backend.close()
    with pytest.raises(EpcrossError) as closed:
        backend.dispatch(0)
    messages.append(str(closed.value))
    return messages


@pytest.mark.parametrize("name", BACKENDS)
def test_bad_ids_and_bad_order_are_refused(name: str) -> None:
    (messages,) = run_ranks(1, _misuse, name)
    assert "token 1 names slot -2; allowed are 0 to 11" in messages[0]
    assert "token 1 names slot 12" in messages[1]
    assert "holds 2 tokens and cannot take 1" in messages[2]
    assert "call prepare first" in messages[3]


def _described(group: FilesGroup, name: str) -> tuple[str, int | None, int]:
    case = Case(tokens=(2,) * group.size, masked=0.0, hidden=64, top_k=4, num_slots=4)  # every token goes everywhere
    backend = _prepared(group, name, case, (1,))
    round_trip(backend, case, group.rank, 0, 1, build.load().ARMED)
    description = backend.describe()
    assert description.workspace_bytes == backend.workspace_bytes(case.point)
    backend.close()
    return description.version, description.protocol_bytes, description.workspace_bytes


@pytest.mark.parametrize(
    ("name", "own_bytes"),
    [
        ("shm_fence", 2 * 2 * 8),
        ("shm_two_sided", 3 * 2 * 8),
        # a count sent and armed again, 2 records of 21 words and 2 partials of 16 armed again, with one peer
        ("shm_sentinel", 2 * 8 + 2 * 21 * 8 + 2 * 16 * 8),
    ],
)
def test_the_description_counts_what_the_protocol_adds(name: str, own_bytes: int) -> None:
    for version, protocol_bytes, _ in run_ranks(2, _described, name):
        assert version == build.sources_hash()
        assert protocol_bytes == 4 * (4 * 8 + 8) + own_bytes  # four records with ids, weights and header
