"""Tokens of ranks, capacity, and what makes a point impossible for everyone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import plan_of, problems_of, the_problem

from epcross.harness.planning.tokens import capacity, counted, nominal_tokens, tokens_of_ranks
from epcross.harness.planning.typed import Mismatch

ONE = ("sweep=crossover", "backend=plain", "regime=steady")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 4), (8, 8, 8, 8)),
        (([3, 0, 5], 3), (3, 0, 5)),
        ((10, 2, 1.5), (5, 15)),
        ((10, 3, 2.0), (0, 10, 20)),
        ((10, 4, 1.1), (9, 9, 11, 11)),
        ((10, 1, 2.0), (10,)),
        ((8, 4, 1.0, 1), (8, 8, 8, 0)),
        ((8, 4, 1.5, 2), (4, 12, 0, 0)),
    ],
)
def test_tokens_of_ranks(arguments: tuple, expected: tuple[int, ...]):
    assert tokens_of_ranks(*arguments) == expected


@given(mean=st.integers(1, 5000), ep_size=st.integers(2, 64), skew=st.floats(1.0, 2.0), empty=st.integers(0, 3))
def test_a_ramp_keeps_the_total_and_has_the_stated_skew(mean: int, ep_size: int, skew: float, empty: int):
    if ep_size - empty < 2:
        return
    tokens = tokens_of_ranks(mean, ep_size, skew, empty)
    filled = tokens[: ep_size - empty]
    assert sum(tokens) == mean * len(filled)
    assert list(filled) == sorted(filled)
    assert all(t >= 0 for t in tokens)
    assert tokens[ep_size - empty :] == (0,) * empty
    assert max(tokens) == pytest.approx(mean * skew, abs=1.0)


def test_nominal_tokens_and_capacity():
    assert nominal_tokens(7) == 7
    assert nominal_tokens([5, 0]) == 3
    assert capacity([3, 9, 0], None, 1.0) == 9
    assert capacity([3, 10], None, 1.1) == 11
    assert capacity([3, 9], None, 1.25) == 12
    assert capacity([3, 9], 64, 1.0) == 64
    with pytest.raises(Mismatch, match="give one of them"):
        capacity([3], 64, 2.0)
    with pytest.raises(Mismatch, match="must be at least 1"):
        capacity([3], None, 0.5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ep_size=3"], "model 'deepseek_v3': num_experts=256 does not divide over ep_size=3"),
        (["ep_size=72"], "are ep_size=64 or ep_size=128, or use placement=replicated with num_slots=288"),
        (["ep_size=3", "placement=strided"], "under a strided placement"),
        (
            ["ep_size=3", "placement=replicated", "placement.num_slots=257"],
            "num_slots=257 does not divide over ep_size=3 ranks; use num_slots=258",
        ),
        (["placement=replicated", "placement.num_slots=200"], "num_slots=200 cannot hold num_experts=256"),
        (["ep_size=0"], "ep_size=0 must lie between 1 and 1024"),
        (["ep_size=2048"], "ep_size=2048 must lie between 1 and 1024"),
        (["model.top_k=300"], "top_k=300 must lie in [1, num_experts=256]"),
        (["model.top_k=0"], "top_k=0 must be at least 1"),
        (["model.num_experts=1000000000000"], "num_experts=1000000000000 must be at most 65536"),
        (["model.num_experts=1000000000001", "ep_size=3"], "num_experts=1000000000001 must be at most 65536"),
        (["model.num_experts=65538"], "num_experts=65538 must be at most 65536"),
        (["model.hidden=1048577"], "hidden=1048577 must be at most 1048576"),
        (["model.intermediate=1000000000000"], "intermediate=1000000000000 must be at most 1048576"),
        (
            ["placement=replicated", "placement.num_slots=1000000000000"],
            "placement.num_slots=1000000000000 must be at most 65536",
        ),
        (["launcher.points_per_job=-1"], "launcher.points_per_job=-1 must be at least 0"),
        (["timing.wall_limit_s=1e12"], "timing.wall_limit_s=1000000000000.0 must be at most 604800"),
        (["timing.iterations=1000000000000"], "timing.iterations=1000000000000 must be at most 1000000"),
        (["timing.sets=1025"], "timing.sets=1025 must be at most 1024"),
        (["timing.max_pairs=1000000000000"], "timing.max_pairs=1000000000000 must be at most 1000000000"),
        (["timing.warmup_pairs=1000000000000"], "timing.warmup_pairs=1000000000000 must be at most 1000000000"),
        (["model.hidden=7", "dispatch_format=nvfp4"], "hidden=7 cannot be a nvfp4 row"),
        (["tokens_per_rank=-1"], "a rank cannot have fewer than 0 tokens"),
        (["tokens_per_rank=0"], "no rank has any token"),
        (["tokens_per_rank=[0,0]"], "no rank has any token"),
        (["tokens_per_rank=[1,2,3]"], "lists 3 ranks, but ep_size=2"),
        (["tokens_per_rank=[1,2]", "empty_ranks=1"], "leave out token_skew and empty_ranks"),
        (["tokens_per_rank=32", "max_tokens_per_rank=16"], "is less than the 32 tokens of the fullest rank"),
        (["tokens_per_rank=32", "max_tokens_per_rank=64", "capacity_factor=2.0"], "give one of them"),
        (["token_skew=2.5"], "token_skew=2.5 must lie between 1 and 2"),
        (["empty_ranks=2"], "empty_ranks=2 must lie between 0 and 1"),
        (["capacity_factor=0.5"], "must be at least 1"),
        (["tokens_per_rank=99999999999999999999"], "tokens_per_rank=99999999999999999999 must be at most 16777216"),
        (["tokens_per_rank=[1,20000000]"], "tokens_per_rank=[1, 20000000] must be at most 16777216"),
        (
            ["tokens_per_rank=1", "max_tokens_per_rank=20000000"],
            "max_tokens_per_rank=20000000 must be at most 16777216",
        ),
        (
            ["tokens_per_rank=9", "capacity_factor=1e8"],
            "tokens_per_rank=9 with capacity_factor=100000000.0: the 900000000 rows of a rank must be at most 16777216",
        ),
        (["masked_fraction=1.0"], "drops every selection"),
        (["routing=hot_expert", "routing.hot_fraction=1.5"], "hot_fraction=1.5 must lie in [0, 1]"),
        (["routing=zipf", "routing.exponent=-1.0"], "exponent=-1.0 must lie in [0, 8]"),
    ],
)
def test_an_impossible_point_is_an_error_that_says_what_is_possible(words: list[str], says: str):
    words = words if any(w.startswith("tokens_per_rank") for w in words) else [*words, "tokens_per_rank=8"]
    assert says in the_problem(*ONE, *words)


def test_the_edges_are_possible():
    for words in (
        ["ep_size=1", "tokens_per_rank=1"],
        ["ep_size=256", "tokens_per_rank=1"],
        ["tokens_per_rank=[0,1]"],
        ["tokens_per_rank=32", "max_tokens_per_rank=32"],
        ["tokens_per_rank=8", "routing=local_only", "ep_size=64"],
        ["tokens_per_rank=8", "model.top_k=256"],
        ["tokens_per_rank=8", "model.num_experts=65536", "model.hidden=1048576", "model.intermediate=1048576"],
        ["tokens_per_rank=8", "placement=replicated", "placement.num_slots=65536", "timing.wall_limit_s=604800"],
    ):
        (point,) = plan_of(*ONE, *words).points
        assert len(point.tokens) == point.ep_size
        assert point.max_tokens_per_rank >= max(point.tokens)


@pytest.mark.parametrize(
    "factor", ["model.num_experts", "model.hidden", "model.intermediate", "model.top_k", "ep_size"]
)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0", "=0 must"),
        ("-1", "=-1 must"),
        (str(10**12), f"={10**12} must"),
        (str(10**22), f"={10**22} must"),
        ("1.5", " is 1.5, but must be an integer"),
        ("x", " is 'x', but must be an integer"),
    ],
)
def test_an_absurd_size_is_named_with_its_value(factor: str, value: str, says: str):
    problems = problems_of(*ONE, "tokens_per_rank=8", f"{factor}={value}")
    assert all(f"{factor.removeprefix('model.')}{says}" in text for text in problems), problems


@pytest.mark.parametrize("tokens", [-1, 0, 99999999999999999999])
def test_a_wrong_number_of_tokens_is_told_once_for_all_ep_sizes(tokens: int):
    (problem,) = problems_of(*ONE, f"tokens_per_rank={tokens}", "ep_size=1,2,4")
    assert problem.startswith(f"tokens_per_rank={tokens}")


def test_a_point_with_several_faults_names_them_all():
    problems = problems_of(*ONE, "tokens_per_rank=-1", "model.top_k=300", "ep_size=3", "masked_fraction=2.0")
    assert len(problems) == 4


def test_tokens_are_counted_in_words():
    assert [counted(count) for count in (0, 1, 2, "1", "1.5", "1, 8")] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1 token",
        "1.5 tokens",
        "1, 8 tokens",
    ]
