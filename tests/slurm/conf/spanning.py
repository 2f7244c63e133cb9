"""A right backend over the group's all-gather, which does not care where its ranks are."""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from tests.broken_backends import ReferenceBackend

from epcross.harness.backends.base import Group, Shard
from epcross.harness.point import Point
from epcross.harness.terms import Domain, Scope


class Spanning(ReferenceBackend):
    """Can be told to be slow, or to lose a rank."""

    name = "spanning"
    domains = frozenset({Domain.CPU, Domain.NVLINK})
    scopes = frozenset(Scope)

    @classmethod
    def option_defaults(cls) -> Mapping[str, Any]:
        return {"sleep_s": 0.0, "die_rank": -1, "build_s": 0.0}

    def prebuild(self) -> None:
        time.sleep(float(self.options["build_s"] or 0))

    def unsupported(self, point: Point) -> str | None:
        return None

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        super().prepare(point, shard, group)
        time.sleep(float(self.options["sleep_s"] or 0))
        if shard.rank == self.options["die_rank"]:
            os.kill(os.getpid(), signal.SIGKILL)
