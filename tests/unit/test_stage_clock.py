"""Where the time of a unit went."""

from epcross.harness.running.stage_clock import LOAD, StageClock
from epcross.harness.terms import Stage


def test_stages_are_summed_over_seeds_and_the_last_runs_until_asked() -> None:
    now_s = 10.0
    clock = StageClock(clock=lambda: now_s)
    for stage, until_s in (
        (Stage.START, 17.5),
        (Stage.TIME, 18.0),
        (Stage.VERIFY_AFTER, 18.25),
        (Stage.TIME, 18.75),
        (Stage.CLOSE, 18.75),
    ):
        now_s = until_s
        clock.enter(stage)
    now_s = 18.7501
    # load until 17.5; start until 18.0; time until 18.25 and again nothing; verify_after until 18.75
    assert clock.seconds() == {LOAD: 7.5, Stage.START: 0.5, Stage.TIME: 0.25, Stage.VERIFY_AFTER: 0.5}
    now_s = 19.75
    assert clock.seconds()[Stage.CLOSE] == 1.0
