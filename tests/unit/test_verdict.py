"""Who is blamed, from what supervisors say."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from epcross.harness.running.rendezvous import Abort
from epcross.harness.running.verdict import Ending, Outcome, Verdict, judge
from epcross.harness.terms import Flag, Stage, Status

OK = Outcome(ending=Ending.OK, stage=Stage.CLOSE)


def outcome(ending: Ending, abort: Abort | None, stage: Stage = Stage.TIME, reason: str = "why") -> Outcome:
    return Outcome(ending=ending, stage=stage, reason=reason, abort=abort)


def test_all_fine() -> None:
    assert judge([OK, OK]) is None


def test_the_first_abort_names_the_culprit() -> None:
    abort = Abort(rank=1, reason="lost", kind="lost", waiting=(0,))
    outcomes = [
        outcome(Ending.ERROR, abort, reason="lost its peer"),
        outcome(Ending.ERROR, abort, Stage.PREPARE, "was killed"),
    ]
    assert judge(outcomes) == Verdict(status=Status.ERROR, rank=1, stage=Stage.PREPARE, reason="was killed")


def test_one_failure_among_finished_ranks_counts() -> None:
    abort = Abort(rank=2, reason="lost", kind="lost")
    assert judge([OK, OK, outcome(Ending.ERROR, abort, Stage.CLOSE)]) == Verdict(
        status=Status.ERROR, rank=2, stage=Stage.CLOSE, reason="why"
    )


@pytest.mark.parametrize(
    ("waiting", "stages", "culprit"),
    [
        ((0, 2), (Stage.TIME, Stage.TIME, Stage.TIME), 1),  # it alone waits for nobody
        ((), (Stage.TIME, Stage.TIME, Stage.PREPARE), 2),  # nobody waits at the store: the least advanced
        ((0, 1, 2), (Stage.TIME, Stage.VERIFY_BEFORE, Stage.TIME), 1),
    ],
)
def test_a_wall_limit_blames_who_was_not_waiting(
    waiting: tuple[int, ...], stages: Sequence[Stage], culprit: int
) -> None:
    abort = Abort(rank=None, kind="wall", reason="not done in 4 s", waiting=tuple(waiting))
    endings = (Ending.WALL, Ending.BYSTANDER, Ending.BYSTANDER)
    verdict = judge([outcome(e, abort, s) for e, s in zip(endings, stages, strict=True)])
    assert verdict == Verdict(status=Status.TIMEOUT, rank=culprit, stage=stages[culprit], reason="not done in 4 s")


def test_a_wall_limit_tells_where_every_rank_stood() -> None:
    abort = Abort(rank=None, kind="wall", reason="not done in 4 s")
    places = ["k.py line 9 in wait", "k.py line 3 in dispatch", "k.py line 9 in wait"]
    verdict = judge([replace(outcome(Ending.BYSTANDER, abort), place=place) for place in places])
    assert verdict is not None
    assert verdict.reason == "not done in 4 s; rank 1: k.py line 3 in dispatch; ranks 0, 2: k.py line 9 in wait"


def test_a_vain_wait_blames_the_silent_peer() -> None:
    abort = Abort(rank=0, kind="wait", reason="waited for peer 1")
    peer = outcome(Ending.BYSTANDER, abort, Stage.VERIFY_BEFORE)
    answered = judge([outcome(Ending.WAIT, abort), peer])  # it lived and was on its way
    assert answered is not None
    assert (answered.rank, answered.status, answered.stage) == (0, Status.TIMEOUT, Stage.TIME)
    verdict = judge([outcome(Ending.WAIT, abort), replace(peer, answered=False)])
    assert verdict is not None
    assert (verdict.rank, verdict.status, verdict.stage) == (1, Status.TIMEOUT, Stage.VERIFY_BEFORE)
    assert "rank 0: waited for peer 1" in verdict.reason


def test_vain_waits_on_all_sides_blame_the_first() -> None:
    abort = Abort(rank=1, kind="wait", reason="y")
    verdict = judge([outcome(Ending.WAIT, abort, reason="x"), outcome(Ending.WAIT, abort, reason="y")])
    assert verdict == Verdict(status=Status.TIMEOUT, rank=1, stage=Stage.TIME, reason="y")


def test_refusals_are_no_failures() -> None:
    verdict = judge([outcome(Ending.UNSUPPORTED, None)] * 2)
    assert verdict is not None
    assert verdict.status is Status.UNSUPPORTED


def test_outcomes_travel() -> None:
    flagged = replace(OK, flags=(Flag.NOT_ALONE,))
    for sent in (OK, flagged, outcome(Ending.WAIT, Abort(rank=1, reason="r", waiting=(0, 3)))):
        assert Outcome.decode(sent.encode()) == sent
