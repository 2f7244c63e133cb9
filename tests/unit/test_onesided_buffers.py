"""What processes tell each other before memory is allocated, and what all of them conclude from it."""

from dataclasses import replace

import pytest

from epcross.kernels.errors import DoesNotFit, InvalidArguments, NotOneDomain
from epcross.kernels.onesided.buffers import Facts, Transport, gather, judge


def facts(process: int = 0, **changes: object) -> Facts:
    default = Facts(
        process=process,
        host="a",
        gpu=f"GPU-{process}",
        wanted_bytes=1000,
        free_bytes=1000,
        fabric=False,
        may_overlap=False,
        settings=(("hidden", "7168"), ("top_k", "8")),
    )
    return replace(default, **changes)  # pyright: ignore[reportArgumentType]


def group(count: int, **changes: object) -> list[Facts]:
    return [facts(process, **changes) for process in range(count)]


def test_the_way_follows_from_what_every_rank_can_do() -> None:
    assert judge(group(1)) is Transport.LOCAL
    assert judge(group(1, fabric=True)) is Transport.LOCAL
    assert judge(group(4)) is Transport.POSIX_FD
    assert judge(group(4, fabric=True)) is Transport.FABRIC
    across = [facts(0, host="a", fabric=True), facts(1, host="b", fabric=True)]
    assert judge(across) is Transport.FABRIC


def test_hosts_without_fabric_handles_are_no_domain() -> None:
    across = [facts(0, host="a", fabric=True), facts(1, host="b"), facts(2, host="c")]
    with pytest.raises(NotOneDomain, match=r"ranks 1 \(b\), 2 \(c\) cannot export .* spans 3 hosts: .*IMEX"):
        judge(across)


def test_ranks_of_a_host_that_differ_would_hand_out_handles_the_others_cannot_open() -> None:
    with pytest.raises(
        NotOneDomain, match=r"ranks 1 \(a\) cannot export fabric handles, and the others of this host can"
    ):
        judge([facts(0, fabric=True), facts(1)])


def test_a_gpu_is_shared_only_if_said_so_and_set_up() -> None:
    shared = group(2, gpu="GPU-x", free_bytes=2000)
    with pytest.raises(NotOneDomain, match=r"ranks 0, 1 share GPU GPU-x, and ranks_per_gpu=1: .*ranks_per_gpu=2"):
        judge(shared)
    with pytest.raises(NotOneDomain, match="set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"):
        judge(shared, ranks_per_gpu=2)
    assert judge([replace(one, may_overlap=True) for one in shared], ranks_per_gpu=2) is Transport.POSIX_FD


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    with pytest.raises(DoesNotFit, match=r"GPU-1 \(rank 1\) take 1000 bytes and 999 bytes are free"):
        judge([facts(0), facts(1, free_bytes=999), facts(2)])
    shared = group(2, gpu="GPU-x", free_bytes=1999, may_overlap=True)
    with pytest.raises(DoesNotFit, match=r"\(rank 0, 1\) take 2000 bytes and 1999 bytes are free"):
        judge(shared, ranks_per_gpu=2)


def test_everyone_hears_of_everyones_mistakes_and_differences_at_once() -> None:
    wrong = [
        facts(0),
        facts(1, problems=("top_k=17 is above 16", "hidden=7 is odd")),
        facts(2, wanted_bytes=900, settings=(("hidden", "4096"), ("top_k", "8"))),
    ]
    with pytest.raises(InvalidArguments) as caught:
        judge(wrong)
    assert caught.value.problems == (
        "rank 1: top_k=17 is above 16",
        "rank 1: hidden=7 is odd",
        "rank 2 has hidden=4096 and rank 0 hidden=7168: it must be the same on every rank",
        "rank 2 has workspace_bytes=900 and rank 0 workspace_bytes=1000: it must be the same on every rank",
    )
    with pytest.raises(InvalidArguments, match=r"^top_k=17 is above 16$"):
        judge([facts(0, problems=("top_k=17 is above 16",))])


def test_a_process_alone_gathers_itself() -> None:
    assert gather(None, "x") == ["x"]
