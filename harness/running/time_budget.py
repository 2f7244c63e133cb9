"""How a soak's time is shared: each process group gets its share of what is left when it begins."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from epcross.harness.planning.estimate import GPU_START_S, GROUP_START_S, usable_cores
from epcross.harness.running.job import Job
from epcross.harness.terms import Domain

LEAST_CASE_S = 0.02

AROUND_CASE_S = 0.15
"""Preparing and checking a case before its soak, and half a burst too much, on two cores of a 2020s server."""


class TimeBudget:
    """The seconds of a whole run, from now on, over cases of the given domains and EP sizes.

    A group that took longer than its share leaves less to each of the later ones, one that was quicker more.
    """

    def __init__(
        self,
        seconds: float,
        cases: Iterable[tuple[Domain, int]],
        *,
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._cores = cores or usable_cores()
        self._clock = clock
        self._ends_at_s = clock() + seconds
        self._weight_left = sum(self._crowd(*case) for case in cases)

    def allot(self, job: Job) -> Job:
        """`job` with its share: when it must stop beginning cases, and how long each goes on."""
        units = sum(len(turn.point_ids) for turn in job.turns)
        crowd = self._crowd(job.domain, job.ep_size)
        now = self._clock()
        share_s = max(0.0, self._ends_at_s - now) * min(1.0, units * crowd / self._weight_left)
        self._weight_left -= units * crowd
        begin_s = len(job.turns) * (GROUP_START_S if job.domain is Domain.CPU else GPU_START_S) * crowd
        case_s = max(LEAST_CASE_S, (share_s - begin_s) / units - AROUND_CASE_S * crowd)
        timing = replace(job.timing, chain_ms=case_s * 1e3, wall_limit_s=job.timing.wall_limit_s + case_s)
        return replace(job, timing=timing, stop_at_s=now + share_s)

    def _crowd(self, domain: Domain, ep_size: int) -> float:
        """How much longer everything takes where ranks outnumber cores; so much more time its cases get. On a GPU ranks
        compute nothing on a core."""
        return max(1.0, ep_size / self._cores) if domain is Domain.CPU else 1.0
