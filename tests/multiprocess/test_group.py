"""The group's promises, with threads as ranks where threads are enough and processes where a death is meant."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from epcross.harness.backends.base import Group
from epcross.harness.errors import GroupError
from epcross.harness.running.group import StoreGroup
from epcross.harness.running.rendezvous import Abort, Address, ScopeAborted, StoreClient, decode, encode, new_token
from epcross.harness.running.rendezvous_server import StoreServer

T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(token=new_token()) as server:
        yield server


def join(server: StoreServer, rank: int, size: int, timeout_s: float = 10.0) -> StoreGroup:
    return StoreGroup(server.address, scope="g", rank=rank, size=size, shared_name="epcross-test", timeout_s=timeout_s)


def on_all(server: StoreServer, size: int, work: Callable[[Group], T], timeout_s: float = 10.0) -> list[T]:
    def rank(r: int) -> T:
        with join(server, r, size, timeout_s) as group:
            return work(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_is_in_rank_order(server: StoreServer, size: int) -> None:
    def work(group: Group) -> list[list[bytes]]:
        return [group.all_gather(bytes([group.rank]) * (n * 50_000 * (group.rank + 1))) for n in range(3)]

    expected = [[bytes([r]) * (n * 50_000 * (r + 1)) for r in range(size)] for n in range(3)]
    assert on_all(server, size, work) == [expected] * size


def test_barrier_holds_everyone_until_the_last(server: StoreServer) -> None:
    def work(group: Group) -> tuple[float, float]:
        group.barrier()
        if group.rank == 2:
            time.sleep(0.2)
        came = time.monotonic()
        group.barrier()
        return came, time.monotonic()

    times = on_all(server, 3, work)
    assert min(left for _, left in times) >= max(came for came, _ in times)


def failure(work: Callable[[], object]) -> tuple[GroupError, float]:
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        work()
    return caught.value, time.monotonic() - start


def test_abort_wakes_waiters_at_once_and_fails_later_calls(server: StoreServer) -> None:
    with ThreadPoolExecutor(2) as pool, join(server, 0, 3) as a, join(server, 1, 3) as b, join(server, 2, 3) as c:
        waiting = [pool.submit(failure, g.barrier) for g in (a, b)]
        time.sleep(0.1)
        c.abort("rows are wrong")
        c.abort("a second reason")  # the first is kept
        for future in waiting:
            error, _ = future.result(timeout=2)
            assert str(error) == "rank 2 gave up: rows are wrong"
            assert error.rank == 2
            assert isinstance(error, ScopeAborted)
            assert error.abort.waiting == (0, 1)
        error, took_s = failure(c.barrier)
        assert error.rank == 2
        assert took_s < 1


def test_a_wait_that_runs_out_names_who_did_not_come_and_ends_the_group(server: StoreServer) -> None:
    with join(server, 0, 3) as a, join(server, 1, 3) as b, ThreadPoolExecutor(1) as pool:
        late = pool.submit(failure, lambda: b.barrier(30.0))
        time.sleep(0.05)
        error, took_s = failure(lambda: a.barrier(0.2))
        assert error.rank == 2
        assert "rank 2 did not come to barrier 1 in 0.2 s" in str(error)
        assert 0.1 < took_s < 2
        other, _ = late.result(timeout=2)
        assert other.rank == 2


def test_ranks_that_go_different_ways_are_told(server: StoreServer) -> None:
    with join(server, 0, 2) as a, join(server, 1, 2) as b, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(failure, a.barrier)
        time.sleep(0.05)
        error, _ = failure(lambda: b.all_gather(b"x"))
        assert "all_gather 1 and barrier 1 are open at once" in str(error)
        assert waiting.result(timeout=2)[0].rank == 1


def test_a_peer_that_left_is_not_waited_for(server: StoreServer) -> None:
    with join(server, 0, 2) as a:
        join(server, 1, 2).close()
        error, took_s = failure(a.barrier)
        assert (error.rank, took_s < 2) == (1, True)
        assert "left the group" in str(error)


PEER = """
import sys, time
from epcross.harness.running.group import StoreGroup
from epcross.harness.running.rendezvous import Address
group = StoreGroup(Address(host=sys.argv[1], port=int(sys.argv[2]), token=sys.argv[3]), scope="g", rank=1, size=2,
                   shared_name="epcross-test")
group.barrier()
print("here", flush=True)
time.sleep(60)
"""


def test_a_killed_peer_is_noticed_at_once(server: StoreServer) -> None:
    address = server.address
    command = [sys.executable, "-c", PEER, address.host, str(address.port), address.token]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer, join(server, 0, 2) as group:
        group.barrier()
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"here\n"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(failure, group.barrier)
            time.sleep(0.05)
            os.kill(peer.pid, signal.SIGKILL)
            error, _ = waiting.result(timeout=2)
    assert error.rank == 1
    assert "its process ended" in str(error)


def test_a_stranger_is_refused(server: StoreServer) -> None:
    wrong = Address(host=server.address.host, port=server.address.port, token="guess")
    with pytest.raises(GroupError, match="token is wrong"):
        StoreClient(wrong, "g", 0)
    with join(server, 0, 1) as group:  # and costs the run nothing
        assert group.all_gather(b"x") == [b"x"]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x05\x00\x00\x00\x09x", encode([b"get", b"k", b"1"])],
)
def test_garbage_is_dropped(server: StoreServer, garbage: bytes) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as sock:
        sock.sendall(garbage)
        sock.settimeout(5)
        reply = sock.recv(1000)
        assert reply == b"" or decode(reply[4:])[0] == b"refused"
    with join(server, 0, 1) as group:
        group.barrier()


def test_a_rank_joins_once(server: StoreServer) -> None:
    with join(server, 0, 2), pytest.raises(GroupError, match="rank 0 has joined this group before"):
        join(server, 0, 2)


def test_values_counters_and_watches(server: StoreServer) -> None:
    a, b = StoreClient(server.address, "run"), StoreClient(server.address, "run")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(b.get, "k", 5.0)
        time.sleep(0.05)
        a.set("k", b"v")
        assert waiting.result(timeout=2) == b"v"
    assert [a.add("n", 2), b.add("n", -5)] == [2, -3]
    assert "nobody set it" in str(failure(lambda: a.get("absent", 0.1))[0])
    b.send_watch("g")
    assert a.abort("g", "cancelled") == Abort(rank=None, reason="cancelled")
    with pytest.raises(ScopeAborted, match="the group gave up: cancelled"):
        b.receive()
    a.close()
    b.close()


def test_a_lost_server_ends_every_wait() -> None:
    server = StoreServer(token=new_token())
    group = join(server, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(failure, group.barrier)
        time.sleep(0.05)
        server.close()
        error, _ = waiting.result(timeout=2)
    assert "the process that hosts it ended" in str(error)
    assert "the store is lost" in str(failure(group.barrier)[0])
    group.close()


def test_a_taken_port_is_passed_over(server: StoreServer) -> None:
    taken = server.address.port
    with StoreServer(token="t", ports=(taken, 0)) as other:
        assert other.address.port not in (0, taken)
    with pytest.raises(GroupError, match=f"every port tried on 127.0.0.1 is taken: {taken}"):
        StoreServer(token="t", ports=(taken,))


def test_the_address_is_private_and_waited_for(tmp_path: Path) -> None:
    address = Address(host="127.0.0.1", port=1, token=new_token())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(Address.discover, tmp_path / "store", 5.0)
        time.sleep(0.05)
        address.publish(tmp_path / "store")
        assert found.result(timeout=2) == address
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "store").read_text())["token"] == address.token
    assert address.token not in repr(address)
    with pytest.raises(GroupError, match="rank 0 did not start"):
        Address.discover(tmp_path / "never", 0.05)


def test_shared_name_is_checked(server: StoreServer) -> None:
    for name in ("x" * 41, "a/b", ""):
        with pytest.raises(GroupError, match="shared name"):
            StoreGroup(server.address, scope="g", rank=0, size=1, shared_name=name)


TORCH_RANK = """
import sys
from epcross.harness.running.group import StoreGroup
from epcross.harness.running.rendezvous import Address
rank = int(sys.argv[4])
with StoreGroup(Address(host=sys.argv[1], port=int(sys.argv[2]), token=sys.argv[3]), scope="g", rank=rank, size=2,
                shared_name="epcross-test") as group:
    assert "torch" not in sys.modules
    import torch, torch.distributed as dist
    for pg in (group.torch("gloo"), group.torch("gloo")):
        x = torch.tensor([rank + 1])
        dist.all_reduce(x, group=pg)
        print(int(x))
"""


def test_a_torch_group_of_the_same_ranks(server: StoreServer) -> None:
    pytest.importorskip("torch", reason="torch is not installed; pip install -e '.[gloo]'")
    address = server.address
    command = [sys.executable, "-W", "ignore", "-c", TORCH_RANK, address.host, str(address.port), address.token]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(2)]
    assert [r.communicate(timeout=60)[0].split() for r in ranks] == [["3", "3"]] * 2
    assert [r.returncode for r in ranks] == [0, 0]
