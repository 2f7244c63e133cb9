"""The C++ exchanges under schedules: ranks as threads, held up at each step of the model, compared bit for bit."""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _driving import STEPS, Build, Schedule, compiled, compiler, driven

from epcross.kernels.shm.layout import ProtocolName

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="needs g++ with its sanitizers (Debian: apt-get install g++)"),
    pytest.mark.timeout(600),
]
ROUNDS = 6


def schedules(protocol: ProtocolName, ep_size: int, *, generated: int) -> list[Schedule]:
    """Each rank held up at each step, longer than a round takes; then all of them here and there."""
    chosen = [
        Schedule(rank=rank, step=step, microseconds=300, seed=ep_size * 1000 + rank)
        for rank in range(ep_size)
        for step in STEPS[protocol]
    ]
    dice = random.Random(ep_size)
    return chosen + [
        Schedule(rank=0, step="any", microseconds=dice.choice((1, 20, 200)), seed=dice.randrange(1 << 30))
        for _ in range(generated)
    ]


FAULTS = {
    "one landing set": (ProtocolName.SENTINEL, "sentinel.hpp", "static_cast<int>(epoch() & 1u)", "0"),
    "re-arm too early": (
        ProtocolName.SENTINEL,
        "sentinel.hpp",
        "std::atomic_thread_fence(std::memory_order_acquire);",
        "rearm_records(set);",
    ),
    "escape not carried": (ProtocolName.SENTINEL, "sentinel.hpp", "Word{escaped} << 32 | token", "Word{token}"),
    "epoch not advanced": (ProtocolName.FENCE, "exchange.hpp", "++ws_.epoch();", ""),
}
RELAXED = {"wait.hpp": ("store(value, std::memory_order_release)", "store(value, std::memory_order_relaxed)")}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Future[Path]]:
    """Every driver by its build or fault. The compiler has one core for each: two run at once, before any rank does."""
    wanted: dict[Any, tuple[Build, dict[str, tuple[str, str]]]] = {
        **{how: (how, {}) for how in (Build.THREAD, Build.ADDRESS, Build.PLAIN)},
        "relaxed": (Build.THREAD, RELAXED),
        **{fault: (Build.QUICK, {file: (right, wrong)}) for fault, (_, file, right, wrong) in FAULTS.items()},
    }
    folders = {name: tmp_path_factory.mktemp("driver") for name in wanted}
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(compiled, folders[name], *how) for name, how in wanted.items()}


@pytest.fixture(scope="module", params=[Build.PLAIN, Build.THREAD, Build.ADDRESS], ids=lambda how: how.name.lower())
def driver(request: pytest.FixtureRequest, programs: dict[Any, Future[Path]]) -> Path:
    return programs[request.param].result()


@pytest.mark.parametrize("ep_size", [2, 3, 4])
@pytest.mark.parametrize("protocol", list(ProtocolName))
def test_every_schedule_gives_the_same_bits(driver: Path, protocol: ProtocolName, ep_size: int) -> None:
    chosen = schedules(protocol, ep_size, generated=10)
    ran = driven(driver, protocol, ep_size, chosen, rounds=ROUNDS)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout) == ROUNDS * len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [2, 3, 4])
@pytest.mark.parametrize("protocol", list(ProtocolName))
def test_many_schedules_give_the_same_bits(driver: Path, protocol: ProtocolName, ep_size: int) -> None:
    chosen = schedules(protocol, ep_size, generated=1000)
    ran = driven(driver, protocol, ep_size, chosen, rounds=20, timeout_s=550)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schedules_find_a_seeded_fault(fault: str, programs: dict[Any, Future[Path]]) -> None:
    protocol, *_ = FAULTS[fault]
    ran = driven(programs[fault].result(), protocol, 3, schedules(protocol, 3, generated=20), limit_s=2)
    assert ran.returncode == 1, "the fault went unnoticed"
    assert "held up at" in ran.stderr


def test_thread_sanitizer_sees_a_flag_without_release(programs: dict[Any, Future[Path]]) -> None:
    """So its silence about Fence says something."""
    ran = driven(programs["relaxed"].result(), ProtocolName.FENCE, 2, schedules(ProtocolName.FENCE, 2, generated=0))
    assert "WARNING: ThreadSanitizer: data race" in ran.stderr
    assert ran.returncode != 0


def test_the_steps_are_those_of_the_sources() -> None:
    """A step that no source names would be held up at nowhere."""
    csrc = Path(__file__).parents[2] / "kernels" / "shm" / "csrc"
    shared = (csrc / "exchange.hpp").read_text()
    for protocol, steps in STEPS.items():
        text = (csrc / f"{protocol.value}.hpp").read_text() + shared
        for step in steps:
            assert f"EPCROSS_STEP({step});" in text, (protocol, step)
        assert text.count("EPCROSS_STEP(") == len(steps)
