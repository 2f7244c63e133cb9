"""The contract suite passes right backends and catches each broken one, in words that say what is broken."""

import time

import pytest
from tests import broken_backends as broken
from tests.contract.threads import on_ranks

from epcross.harness.point import Point
from epcross.harness.verification import contract
from epcross.harness.verification.cases import cases


def case_named(name, size=2):
    return next(case for case in cases(size) if case.name == name)


def visited(backend, name="plain", *, size=2, timeout_s=10.0):
    """The problems on each rank."""
    case = case_named(name, size)
    return on_ranks(size, lambda group: contract.run_case(lambda: backend({}), case, group, timeout_s))


@pytest.mark.parametrize("backend", [broken.ReferenceBackend, broken.WeightsInCombine])
@pytest.mark.parametrize("name", [case.name for case in cases(2)])
def test_a_right_backend_passes(backend, name):
    assert visited(backend, name) == [[], []]


@pytest.mark.parametrize(
    "name", ["plain", "ragged", "zero_received_on_a_rank", "masked_rows", "any_bits_nvfp4", "rotated"]
)
def test_a_right_backend_passes_on_four_ranks(name):
    assert visited(broken.ReferenceBackend, name, size=4) == [[]] * 4


def test_a_right_backend_passes_alone():
    for name in ("plain", "one_token", "every_expert"):
        assert visited(broken.ReferenceBackend, name, size=1) == [[]]


@pytest.mark.parametrize(
    ("backend", "name", "words"),
    [
        (broken.ReturnsEarly, "plain", "dispatch of exact rows, set 1: rank 0: a row that was not sent here"),
        (broken.WritesLate, "plain", "wrong bytes in a row"),
        (broken.OneWrongRow, "plain", "wrong bytes in a row (source 1, token 0, column 3)"),
        (broken.SwapsTwoRows, "plain", "wrong bytes in a row, which is that of source"),
        (broken.SwapsScales, "format_fp8", "wrong bytes in a scale row"),
        (broken.WrongExpert, "plain", "wrong ids of a row"),
        (broken.WrongWeights, "plain", "wrong weights of a row"),
        (broken.DropsARow, "plain", "a missing row (source 0"),
        (broken.RepeatsARow, "plain", "a row received twice"),
        (broken.ForeignRow, "plain", "a row that was not sent here (source 0, token 1000)"),
        (broken.Unpadded, "odd_hidden", "received rows are uint8"),
        (broken.WeightTwice, "plain", "combine of exact rows, set 0: rank 0: a wrong combined sum"),
        (broken.WeightNever, "plain", "combine of exact rows, set 0: rank 0: a wrong combined sum"),
        (broken.WeightTwice, "one_token", "wrong; the first is as if weights were multiplied twice"),
        (broken.NoOpAfterFirst, "plain", "dispatch of exact rows, set 1: rank 0: a row that was not sent here"),
        (broken.StaleCombine, "plain", "combine of exact rows, set 1: rank 0: a wrong combined sum"),
        (broken.ForgetsCombine, "plain", "a wrong combined sum (source 0, token 0, column 0): got nan (0x7fa5)"),
        (broken.DropsAPartial, "plain", "1 of 6 combined rows are wrong"),
        (broken.WrongToken, "plain", "combine of exact rows, set 0: rank 1: a wrong combined sum"),
        (broken.LosesNaN, "any_bits_bf16", "got 0.0 (0x0000), want nan"),
        (broken.EatsAllOnes, "any_bits_bf16", "got 0x00, want 0xff"),
        (broken.EatsAllOnes, "any_bits_nvfp4", "got 0x00, want 0xff"),
        (broken.StaleExperts, "plain", "a chain of 5 pairs of exact rows, set 0: rank 0: a wrong combined sum"),
        (broken.IgnoresRefill, "plain", "dispatch of exact rows, set 0: rank"),
        (broken.MixesSets, "plain", "dispatch of exact rows, set 1: rank"),
        (broken.MixesRouting, "rotated", "combine of exact rows, set 0: rank"),
        (broken.ReturnsViews, "plain", "received returned a view"),
        (broken.ReturnsNothing, "plain", "received source are a NoneType, not int32 (0,)"),
        (broken.WrongType, "plain", "combined is float32 (6, 128), not uint16 (6, 128)"),
        (broken.DeclaresNonsense, "plain", "an unordered reduction cannot be exact; declare exact=False"),
        (broken.ClosesOnce, "plain", "the second close raised RuntimeError: double free"),
    ],
)
def test_a_broken_backend_is_caught_on_every_rank(backend, name, words):
    for problems in visited(backend, name):
        assert problems
        assert any(words in problem for problem in problems), problems
        assert all(problem.startswith(f"{name}: ") for problem in problems)


@pytest.mark.parametrize("broken_backend", [broken.EatsAllOnes, broken.LosesNaN])
def test_only_hostile_rows_catch_a_sentinel_that_eats_its_payload(broken_backend):
    assert visited(broken_backend, "plain") == [[], []]


STAGES = [
    *("workspace_bytes", "prepare", "refill", "poison", "dispatch", "received", "stage", "combine", "combined"),
    *("experts", "drain_timing", "describe"),
]


@pytest.mark.timing
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_names_its_stage_and_ends_every_rank(stage):
    started = time.monotonic()
    results = visited(broken.raises_in(stage))
    assert time.monotonic() - started < 8
    assert any(f"{stage} raised RuntimeError: deliberate" in problem for problem in results[1] or [])
    assert all(f"{stage} raised RuntimeError: deliberate" in str(problems) for problems in results)


def test_a_backend_that_cannot_be_made_or_closed_is_a_problem_too():
    def explode(options):
        raise RuntimeError("deliberate")

    assert all("__init__ raised RuntimeError: deliberate" in str(problems) for problems in visited(explode))
    assert "the first close raised RuntimeError: deliberate" in str(visited(broken.raises_in("close"))[1])


@pytest.mark.timing
def test_peers_of_a_rank_that_hangs_are_told_in_bounded_time():
    broken.Hangs.let_go.clear()
    broken.Hangs.timeout_s = 0.5
    case = case_named("plain")
    try:
        results = on_ranks(2, lambda group: contract.run_case(lambda: broken.Hangs({}), case, group, 0.5), 3)
    finally:
        broken.Hangs.let_go.set()
    assert results[1] is None
    assert results[0] == ["plain: rank 0: dispatch stopped: ranks [1] did not come within 0.5 s"]


def test_a_refusal_is_a_reason_and_no_problem():
    assert contract.refusal(lambda: broken.ReferenceBackend({}), case_named("plain")) is None
    assert contract.refusal(lambda: broken.ReferenceBackend({}), case_named("plain", 16)) == "ep_size=16 is above 8"


def test_cases_have_names_reasons_and_valid_points():
    for size in (1, 2, 3, 4, 8):
        each = cases(size)
        assert len({case.name for case in each}) == len(each)
        for case in each:
            assert case.why
            assert max(case.point.tokens) <= case.point.max_tokens_per_rank
            assert case.point.model.top_k <= case.point.model.num_experts
            assert Point.from_json(case.point.to_json()) == case.point
