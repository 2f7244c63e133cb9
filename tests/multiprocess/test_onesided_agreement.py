"""Ranks of the one-sided exchange settle what is wrong before any of them goes on: over a real group, without a GPU."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch (make torch)")

from _files_group import FilesGroup  # noqa: E402
from _ranks import run_ranks  # noqa: E402

from epcross.kernels.errors import DoesNotFit, InvalidArguments, NotOneDomain  # noqa: E402
from epcross.kernels.onesided import OneSidedAllToAll  # noqa: E402
from epcross.kernels.onesided.buffers import Transport, Workspaces  # noqa: E402

pytestmark = pytest.mark.beside


def refused(group: FilesGroup, folder: str, *asked: dict[str, Any]) -> tuple[str, ...]:
    """What this rank is told when each rank asks for something else, on a machine without a GPU."""
    from torch import distributed

    store = f"file://{Path(folder) / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    try:
        good = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 4, "protocol": "fence"}
        given: dict[str, Any] = good | asked[group.rank]
        with pytest.raises(InvalidArguments) as caught:
            OneSidedAllToAll(distributed.group.WORLD, **given)
        return caught.value.problems
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the test is for those without")
def test_every_rank_hears_of_the_problems_of_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, refused, str(tmp_path), {"protocol": "telepathy"}, {"hidden": 128})
    assert first == second
    absent = "torch sees no CUDA GPU: an H100 or newer and torch for CUDA are needed"
    assert first[:3] == (
        f"rank 0: {absent}",
        "rank 0: protocol=telepathy is not one of fence, sentinel, auto",
        f"rank 1: {absent}",
    )
    assert "rank 1 has hidden=128 and rank 0 hidden=64: it must be the same on every rank" in first
    assert "rank 1 has protocol=fence and rank 0 protocol=telepathy: it must be the same on every rank" in first


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the test is for those without")
def test_arguments_of_a_wrong_kind_on_one_rank_leave_no_rank_waiting(tmp_path: Path) -> None:
    wrong = {"device": "cpu", "placement": "abcdefgh", "top_k": None, "local_ranks": "2"}
    first, second = run_ranks(2, refused, str(tmp_path), {"ranks_per_gpu": 2}, wrong)
    assert first == second
    for said in (
        "rank 1: device='cpu' is no GPU: give its number, such as 0, or None for torch's current one",
        "rank 1: placement[0]='a' must be a rank, 0 to 1",
        "rank 1: top_k=None must be a whole number",
        "rank 1: local_ranks='2' must be a whole number",
        # each rank judges by its own, so one might go on alone
        "rank 1 has ranks_per_gpu=1 and rank 0 ranks_per_gpu=2: it must be the same on every rank",
    ):
        assert said in first


def mapped(group: FilesGroup, folder: str, failing: str) -> list[str]:
    """What this rank is told, and what steps it took, when one fails on rank 1; memory of the CPU stands in."""
    from torch import distributed
    from torch.distributed import _symmetric_memory as symmetric

    went = []

    def step(name: str) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            went.append(name)
            if name == failing and group.rank == 1:
                raise RuntimeError("CUDA driver error: out of memory")
            return torch.zeros(256, dtype=torch.uint8)

        return run

    symmetric.empty, symmetric.rendezvous = step("empty"), step("rendezvous")  # type: ignore[assignment]
    distributed.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=group.rank, world_size=group.size
    )
    world = distributed.group.WORLD
    assert world is not None
    try:
        with pytest.raises((DoesNotFit, NotOneDomain)) as caught:
            Workspaces(world, torch.device("cpu"), bytes_per_rank=128, local_ranks=2, transport=Transport.POSIX_FD)
        return [type(caught.value).__name__, str(caught.value), *went]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("failing", "error", "words"),
    [
        (
            "empty",
            "DoesNotFit",
            "rank 1 cannot allocate 256 bytes for its workspaces, which were free: lower max_tokens",
        ),
        (
            "rendezvous",
            "NotOneDomain",
            "rank 1 cannot map the workspaces of its peers (posix_fd): ranks must be of one",
        ),
    ],
)
def test_memory_that_one_rank_cannot_have_is_every_ranks_error(
    failing: str, error: str, words: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, mapped, str(tmp_path), failing)
    assert first == second
    kind, sentence, *went = first
    assert kind == error
    assert sentence.startswith(words)
    assert sentence.endswith(": CUDA driver error: out of memory")
    assert went == (["empty"] if failing == "empty" else ["empty", "rendezvous"])
