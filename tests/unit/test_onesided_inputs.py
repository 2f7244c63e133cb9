"""Arguments of the one-sided exchange: every problem at once, and none where there is none. On CPU tensors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (make torch)")

from epcross.kernels.errors import InvalidArguments  # noqa: E402
from epcross.kernels.onesided import OneSidedAllToAll, agreement  # noqa: E402
from epcross.kernels.onesided.agreement import shape_of  # noqa: E402
from epcross.kernels.onesided.inputs import (  # noqa: E402
    Expected,
    Options,
    option_problems,
    slot_problems,
    slot_ranks,
)


def expected(dispatch_format: str = "bf16", local_ranks: int = 1) -> Expected:
    shape = shape_of(ep_size=4, max_tokens_per_rank=8, top_k=2, hidden=64, dispatch_format=dispatch_format)
    device = torch.device("cpu")
    return Expected(
        shape=shape, local_ranks=local_ranks, num_slots=16, bf16_rows=dispatch_format == "bf16", device=device
    )


def arguments(*leading: int, row: Any = None) -> dict[str, Any]:
    """Good ones, for bf16."""
    return {
        "rows": torch.zeros(*leading, 64, dtype=torch.bfloat16) if row is None else row,
        "ids": torch.zeros(*leading, 2, dtype=torch.int32),
        "weights": torch.zeros(*leading, 2, dtype=torch.float32),
        "scales": None,
        "group_tokens": None,
    }


def problems(of: Expected, counts: tuple[int, ...], **given: Any) -> list[str]:
    return of.dispatch_problems(**given, counts=counts)


def test_good_arguments_have_no_problem() -> None:
    assert problems(expected(), (5,), **arguments(5)) == []
    assert problems(expected(), (0,), **arguments(0)) == []
    assert problems(expected(), (3,), **arguments(5) | {"group_tokens": 8}) == []
    as_bytes = torch.zeros(5, 128, dtype=torch.uint8)
    assert problems(expected(), (5,), **arguments(5, row=as_bytes)) == []
    assert problems(expected(local_ranks=3), (5, 0, 2), **arguments(3, 5)) == []
    fp8 = arguments(5, row=torch.zeros(5, 64, dtype=torch.uint8)) | {"scales": torch.zeros(5, 16, dtype=torch.uint8)}
    assert problems(expected("fp8"), (5,), **fp8) == []


def test_every_problem_is_said_at_once() -> None:
    wrong = {
        "rows": torch.zeros(5, 63, dtype=torch.bfloat16),
        "ids": torch.zeros(5, 2, dtype=torch.int64),
        "weights": torch.zeros(2, 5, dtype=torch.float32).T,
        "scales": torch.zeros(5, 16, dtype=torch.uint8),
        "group_tokens": 4,
    }
    assert problems(expected(), (9,), **wrong) == [
        "tokens=9 of local rank 0 must be 0 to max_tokens_per_rank=8",
        "group_tokens=4 must be the largest count of any rank: 9 (the most here) to max_tokens_per_rank=8",
        "rows is [5, 63] and must be [tokens, 64]",
        "ids is torch.int64 and must be torch.int32",
        "ids has room for 5 tokens, and there are 9",
        "weights has room for 5 tokens, and there are 9",
        "weights has strides [1, 5]: the values of a local rank must be contiguous",
        "scales is given, and this format has none",
    ]


def test_dense_is_what_torch_calls_contiguous() -> None:
    shape = shape_of(ep_size=4, max_tokens_per_rank=8, top_k=1, hidden=64, dispatch_format="bf16")
    of = Expected(shape=shape, local_ranks=1, num_slots=16, bf16_rows=True, device=torch.device("cpu"))
    dense = torch.zeros(1, 5, dtype=torch.int32).T
    assert (dense.stride(), dense.is_contiguous()) == ((1, 5), True)
    apart = torch.zeros(5, 2, dtype=torch.int32)[:, :1]
    given = arguments(5) | {"weights": torch.zeros(5, 1)}
    assert problems(of, (5,), **given | {"ids": dense}) == []
    assert problems(of, (5,), **given | {"ids": apart}) == [
        "ids has strides [2, 1]: the values of a local rank must be contiguous"
    ]


def test_a_format_with_scales_needs_them_and_takes_bytes_only() -> None:
    assert problems(expected("nvfp4"), (5,), **arguments(5)) == [
        "rows is torch.bfloat16 and must be torch.uint8",
        "rows is [5, 64] and must be [tokens, 32]",
        "scales is missing: this format has 16 bytes of them for each token",
    ]


def test_vectors_must_be_aligned_and_on_the_device() -> None:
    shifted = torch.zeros(5 * 64 + 1, dtype=torch.bfloat16)[1:].view(5, 64)
    (problem,) = problems(expected(), (5,), **arguments(5, row=shifted))
    assert problem == "rows does not begin at a multiple of 16 bytes (128 bytes a token)"
    elsewhere = arguments(5, row=torch.zeros(5, 64, dtype=torch.bfloat16, device="meta"))
    assert "rows is on meta and must be on cpu" in problems(expected(), (5,), **elsewhere)


def test_local_ranks_have_a_dimension_and_a_count_each() -> None:
    three = expected(local_ranks=3)
    assert (
        problems(three, (5, 5, 5), **arguments(2, 5))[0] == "rows is [2, 5, 64] and must be [3 local ranks, tokens, 64]"
    )
    rows = torch.zeros(3, 5, 64)
    assert three.token_counts(rows, None) == (5, 5, 5)
    assert three.token_counts(rows, [1, 2, 3]) == (1, 2, 3)
    assert expected().token_counts(rows[0], 2) == (2,)
    with pytest.raises(InvalidArguments, match="one is needed for each of 3 local ranks"):
        three.token_counts(rows, 5)
    with pytest.raises(InvalidArguments, match="rows has 2 dimensions and must have 3"):
        three.token_counts(rows[0], None)


@pytest.mark.parametrize("one", [np.int64(3), np.array(3), torch.tensor(3), torch.tensor([3]), [np.int32(3)]])
def test_counts_may_be_any_kind_of_whole_number(one: Any) -> None:
    assert expected().token_counts(torch.zeros(5, 64), one) == (3,)
    assert problems(expected(), (3,), **arguments(5) | {"group_tokens": np.int64(4)}) == []


@pytest.mark.parametrize("wrong", [2.0, "3", [1.5], [None], True, torch.tensor([1.0]), object()])
def test_counts_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArguments, match="must be a whole number, or a sequence of one for each local rank"):
        expected().token_counts(torch.zeros(5, 64), wrong)
    if not isinstance(wrong, list):
        assert problems(expected(), (5,), **arguments(5) | {"group_tokens": wrong}) == [
            f"group_tokens={wrong!r} must be a whole number"
        ]


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(InvalidArguments, match=r"^rows is a ndarray and must be a tensor$"):
        expected().token_counts(np.zeros((5, 64)), None)  # pyright: ignore[reportArgumentType]
    wrong = arguments(5) | {"ids": [[0, 1]] * 5, "weights": None}
    assert problems(expected(), (5,), **wrong) == [
        "ids is a list and must be a tensor",
        "weights is a NoneType and must be a tensor",
    ]


def test_ids_outside_the_slots_are_found_when_asked() -> None:
    ids = torch.tensor([[0, -1], [15, 3], [16, -2]], dtype=torch.int32)
    assert expected().id_problems(ids, (2,)) == [], "only tokens that are sent are looked at"
    (problem,) = expected().id_problems(ids, (3,))
    assert problem == "2 ids of local rank 0 are outside -1 to 15; the first is 16, selection 0 of token 2"


def test_out_is_checked_as_well() -> None:
    assert expected().combine_problems(torch.zeros(5, 64, dtype=torch.bfloat16), (5,)) == []
    assert expected().combine_problems(torch.zeros(4, 64), (5,)) == [
        "out is torch.float32 and must be torch.bfloat16",
        "out has room for 4 tokens, and there are 5",
    ]


def test_slots_go_to_ranks_in_order_or_as_told() -> None:
    assert slot_ranks(8, 4, None) == ((0, 0, 1, 1, 2, 2, 3, 3), [])
    assert slot_ranks(3, 2, [1, 1, 0, 1]) == ((1, 1, 0, 1), [])
    assert slot_ranks(9, 4, None)[1] == ["num_experts=9 is no multiple of ep_size=4: give a placement"]
    assert slot_ranks(3, 2, np.array([1, 1, 0, 1]))[0] == (1, 1, 0, 1)  # pyright: ignore[reportArgumentType]
    assert slot_ranks(3, 2, [2, 0])[1] == [
        "placement[0]=2 must be a rank, 0 to 1",
        "placement has 2 slots, and there are num_experts=3",
    ]


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ([0, 0.7], "placement[1]=0.7 must be a rank, 0 to 1"),
        ([0, "1"], "placement[1]='1' must be a rank, 0 to 1"),
        ([0, None], "placement[1]=None must be a rank, 0 to 1"),
        ([0, -1], "placement[1]=-1 must be a rank, 0 to 1"),
        (5, "placement=5 must be a sequence of ranks, one for each slot"),
    ],
)
def test_a_placement_holds_ranks_and_nothing_is_cut_to_one(placement: Any, problem: str) -> None:
    assert slot_ranks(2, 2, placement) == ((), [problem])


def test_a_placement_without_any_rank_is_a_sentence_of_some_length() -> None:
    assert slot_ranks(9, 2, [7] * 9)[1] == [
        *(f"placement[{slot}]=7 must be a rank, 0 to 1" for slot in range(4)),
        "placement has 5 more slots without a rank",
    ]


def test_options_of_a_wrong_kind_are_named() -> None:
    given: dict[str, Any] = {"timeout_s": "3", "num_sms": 1.5, "programmatic_launch": "no"}
    assert option_problems(Options(local_ranks=2.0, ranks_per_gpu=None, **given)) == [  # type: ignore[arg-type]
        "local_ranks=2.0 must be a whole number",
        "ranks_per_gpu=None must be a whole number",
        "num_sms=1.5 must be a whole number",
        "timeout_s='3' must be a number of seconds",
        "programmatic_launch='no' must be True or False",
    ]


def test_options_are_checked_together() -> None:
    options = Options(local_ranks=73, ranks_per_gpu=2, timeout_s=0, num_sms=0, programmatic_launch=True)
    assert option_problems(options) == [
        "local_ranks=73 must be at least 1 and at most 72",
        "num_sms=0 must be at least 1",
        "timeout_s=0 must be above 0 and at most 3600",
        "local_ranks and ranks_per_gpu are two ways to share a GPU: leave one of them 1",
    ]


def test_slots_are_bounded_and_enough() -> None:
    assert slot_problems(4, 8) == ["top_k=8 is above the number of slots 4"]
    assert slot_problems(4097, 8) == ["4097 slots are above 4096: give fewer experts, or a shorter placement"]
    for many in ((10**9, 8, None), (8, 8, range(10**9))):  # at once, and without a list of so many
        assert slot_ranks(*many)[1] == [f"{10**9} slots are above 4096: give fewer experts, or a shorter placement"]
    assert slot_problems(8, 8) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the test is for those without")
def test_without_a_gpu_the_exchange_says_so_with_everything_else() -> None:
    with pytest.raises(InvalidArguments) as caught:
        OneSidedAllToAll(
            None, num_experts=7, top_k=17, hidden=12, max_tokens_per_rank=8, protocol="telepathy", local_ranks=4
        )
    assert caught.value.problems == (
        "num_experts=7 is no multiple of ep_size=4: give a placement",
        "torch sees no CUDA GPU: an H100 or newer and torch for CUDA are needed",
        "top_k=17 must be 1 to 16",
        "hidden=12 must be a multiple of 8; pad it",
        "protocol=telepathy is not one of fence, sentinel, auto",
    )


ABSENT = "torch sees no CUDA GPU: an H100 or newer and torch for CUDA are needed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the test is for those without")
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"top_k": "2"}, "top_k='2' must be a whole number"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"hidden": 64.0}, "hidden=64.0 must be a whole number"),
        ({"hidden": -8}, "hidden=-8 must be 8 to 524288"),
        ({"max_tokens_per_rank": None}, "max_tokens_per_rank=None must be a whole number"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0 must be 1 to 1048575"),
        ({"num_experts": "8"}, "num_experts='8' must be a whole number"),
        ({"num_experts": -2}, "num_experts=-2 must be at least 1"),
        ({"dispatch_format": "fp9"}, "dispatch_format=fp9 is not one of bf16, fp8, mxfp8, nvfp4"),
        ({"protocol": ["fence"]}, "protocol=['fence'] is not one of fence, sentinel, auto"),
        ({"local_ranks": "2"}, "local_ranks='2' must be a whole number"),
        ({"timeout_s": None}, "timeout_s=None must be a number of seconds"),
        ({"device": "cpu"}, "device='cpu' is no GPU: give its number, such as 0, or None for torch's current one"),
        ({"device": "gpu"}, "device='gpu' is no GPU: give its number, such as 0, or None for torch's current one"),
        ({"device": 10**30}, f"device={10**30} is no GPU: give its number, such as 0, or None for torch's current one"),
        ({"device": -1}, "device=-1 is no GPU: give its number, such as 0, or None for torch's current one"),
    ],
)
def test_every_argument_of_a_wrong_kind_is_a_sentence_and_only_one(wrong: dict[str, Any], problem: str) -> None:
    good: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 4, "protocol": "fence"}
    with pytest.raises(InvalidArguments) as caught:
        OneSidedAllToAll(None, **good | wrong)
    assert set(caught.value.problems) == {problem, ABSENT}


def test_the_gpu_that_is_meant_is_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for asked, meant in ((None, second), ("cuda", second), (0, first), ("cuda:0", first), (second, second)):
        assert agreement._device(asked) == (meant, [])  # pyright: ignore[reportArgumentType]
    assert agreement._device(2) == (second, ["device=2 is not one of the 2 GPUs here: give 0 to 1"])


def test_a_group_of_others_is_refused() -> None:
    from torch import distributed

    not_ours: Any = distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(InvalidArguments, match="is no group of which this process is a member"):
        OneSidedAllToAll(not_ours, num_experts=8, top_k=2, hidden=64, max_tokens_per_rank=4, protocol="fence")


class NoSize:
    """As a device mesh or a communicator of another library: some of a group's words, and not all."""

    def rank(self) -> int:
        return 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the test is for those without")
def test_what_is_no_group_is_named_with_everything_else() -> None:
    good: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 4, "protocol": "fence"}
    for group in (NoSize(), "world", 0, [0, 1], SimpleNamespace(rank=0, size=2)):
        with pytest.raises(InvalidArguments) as caught:
            OneSidedAllToAll(group, **good)  # pyright: ignore[reportArgumentType]
        assert caught.value.problems == (
            f"group={group!r} is no group of which this process is a member: give a torch.distributed.ProcessGroup "
            "that it is in, or None for this process alone",
            ABSENT,
        )
    wrong: dict[str, Any] = {"num_experts": "8", "top_k": None, "hidden": 12, "protocol": np.ones(2)}
    with pytest.raises(InvalidArguments) as caught:  # a placement is not judged: whose ranks are they?
        OneSidedAllToAll(NoSize(), **good | wrong, placement=[0, 1], local_ranks=3)  # pyright: ignore[reportArgumentType]
    assert caught.value.problems[1:] == (
        "num_experts='8' must be a whole number",
        ABSENT,
        "top_k=None must be a whole number",
        "hidden=12 must be a multiple of 8; pad it",
        "protocol=[1. 1.] is not one of fence, sentinel, auto",
    )


def test_a_value_of_a_wrong_kind_hides_no_other_problem() -> None:
    with pytest.raises(ValueError, match="ep_size=None") as caught:
        OneSidedAllToAll.workspace_bytes(
            ep_size=None,  # pyright: ignore[reportArgumentType]
            max_tokens_per_rank=0,
            top_k=17,
            hidden="7168",  # pyright: ignore[reportArgumentType]
            dispatch_format=np.ones(2),  # pyright: ignore[reportArgumentType]
            protocol="telepathy",
        )
    assert isinstance(caught.value, InvalidArguments)
    assert caught.value.problems == (
        "ep_size=None must be a whole number",
        "hidden='7168' must be a whole number",
        "dispatch_format=[1. 1.] is not one of bf16, fp8, mxfp8, nvfp4",
        "max_tokens_per_rank=0 must be 1 to 1048575",
        "top_k=17 must be 1 to 16",
        "protocol=telepathy is not one of fence, sentinel, auto",
    )
    options = Options(local_ranks=73, ranks_per_gpu=None, timeout_s=0, num_sms=0, programmatic_launch="no")  # type: ignore[arg-type]
    assert option_problems(options) == [
        "ranks_per_gpu=None must be a whole number",
        "programmatic_launch='no' must be True or False",
        "local_ranks=73 must be at least 1 and at most 72",
        "num_sms=0 must be at least 1",
        "timeout_s=0 must be above 0 and at most 3600",
    ]
    assert slot_ranks("8", 2, [0, 7]) == (  # pyright: ignore[reportArgumentType]
        (),
        ["num_experts='8' must be a whole number", "placement[1]=7 must be a rank, 0 to 1"],
    )


def test_narrow_integers_do_not_overflow_the_workspace_size() -> None:
    shape: dict[str, Any] = {"ep_size": 72, "max_tokens_per_rank": 4096, "top_k": 8, "hidden": 7168}
    wide = OneSidedAllToAll.workspace_bytes(**shape, protocol="sentinel")
    narrow: dict[str, Any] = {name: np.int32(value) for name, value in shape.items()}
    assert OneSidedAllToAll.workspace_bytes(**narrow, protocol="sentinel") == wide > 1 << 33


def test_the_workspace_size_is_a_function_of_the_shapes() -> None:
    shape: dict[str, Any] = {"ep_size": 2, "max_tokens_per_rank": 4, "top_k": 8, "hidden": 7168}
    fence = OneSidedAllToAll.workspace_bytes(**shape, protocol="fence")
    sentinel = OneSidedAllToAll.workspace_bytes(**shape, protocol="sentinel")
    record, partial = 14336 + 128, 14336  # 64 bytes of ids and weights, up to a line
    assert fence == 128 + 128 + 2 * 256 * 8 + 128 + 128 + 8 * record + 8 * partial
    escapes = 8 * 29 * 16  # a bitmap for each 32 of 896 vectors, and one for the tail of 4
    assert sentinel == 128 + 128 + 2 * (128 + 8 * record + -(-escapes // 128) * 128) + 2 * 8 * partial
    assert OneSidedAllToAll.workspace_bytes(**shape, protocol="auto") == sentinel
    fp8 = OneSidedAllToAll.workspace_bytes(**shape, protocol="fence", dispatch_format="fp8")
    assert fence - fp8 == 8 * (record - 7552)  # 7168 values, 224 bytes of scales and 64 of metadata, up to a line
    with pytest.raises(ValueError, match="protocol=telepathy is not one of fence, sentinel, auto"):
        OneSidedAllToAll.workspace_bytes(**shape, protocol="telepathy")
