"""Who is to blame when a unit fails: every supervisor judges the same outcomes and comes to the same verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from epcross.harness.running.rendezvous import Abort
from epcross.harness.running.stuck import told
from epcross.harness.terms import Flag, Stage, Status

_STAGES = list(Stage)


class Ending(StrEnum):
    """How a unit ended on one rank."""

    OK = "ok"
    ERROR = "error"  # raised, or its process ended
    WAIT = "wait"  # a bounded wait for a peer ran out
    WALL = "wall"  # the wall limit passed, or it never came to a collective
    BYSTANDER = "bystander"  # stopped because another rank failed
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"


_STATUS = {
    Ending.ERROR: Status.ERROR,
    Ending.BYSTANDER: Status.ERROR,
    Ending.WAIT: Status.TIMEOUT,
    Ending.WALL: Status.TIMEOUT,
    Ending.UNSUPPORTED: Status.UNSUPPORTED,
    Ending.UNAVAILABLE: Status.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one supervisor tells the others about a unit. `abort` is how the process group ended, if it did."""

    ending: Ending
    stage: Stage
    reason: str = ""
    answered: bool = True  # whether the worker noticed by itself that its group had ended
    abort: Abort | None = None
    place: str = ""  # in the backend, where its worker stood when the wall limit passed; if known
    flags: tuple[Flag, ...] = ()  # that this rank's host earned the unit, however it ended

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Outcome":
        """What `encode` wrote."""
        values = json.loads(data)
        abort = values["abort"]
        return cls(
            ending=Ending(values["ending"]),
            stage=Stage(values["stage"]),
            reason=values["reason"],
            answered=values["answered"],
            place=values["place"],
            abort=None if abort is None else Abort(**{**abort, "waiting": tuple(abort["waiting"])}),
            flags=tuple(map(Flag, values["flags"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a unit failed, and the first rank it failed on."""

    status: Status
    rank: int
    stage: Stage
    reason: str


def judge(outcomes: Sequence[Outcome]) -> Verdict | None:
    """The failure that `outcomes` (in rank order) amount to; None if all ranks did their part.

    The first abort of the process group names the culprit, with two exceptions, both of ranks that are only
    noticed by their silence:
    - the wall limit passes everywhere at once: to blame is who was not waiting for a peer, least advanced first;
    - a bounded wait for a peer ran out: to blame is a peer that stayed silent afterwards, if there is one.
    """
    failed = [r for r, outcome in enumerate(outcomes) if outcome.ending is not Ending.OK]
    if not failed:
        return None
    abort = next((o.abort for o in outcomes if o.abort is not None), None)
    waiting = set(abort.waiting) if abort else set()
    silent = [r for r in failed if outcomes[r].ending is Ending.BYSTANDER and not outcomes[r].answered]
    busy = [r for r in failed if r not in waiting]
    own = [r for r in failed if outcomes[r].ending is not Ending.BYSTANDER]

    def least_advanced(ranks: list[int]) -> int:
        return min(ranks, key=lambda r: (_STAGES.index(outcomes[r].stage), r))

    if abort and abort.kind == Ending.WALL:
        rank = least_advanced(busy or failed)
        return _verdict(outcomes, rank, Status.TIMEOUT, abort.reason + told([o.place for o in outcomes]))
    if abort and abort.kind == Ending.WAIT and silent:
        rank = least_advanced([r for r in silent if r in busy] or silent)
        return _verdict(outcomes, rank, Status.TIMEOUT, f"it did not answer; rank {abort.rank}: {abort.reason}")
    if abort and abort.rank in failed:
        rank = abort.rank
        assert rank is not None
    else:
        rank = least_advanced(own or failed)
    outcome = outcomes[rank]
    reason = outcome.reason or (abort.reason if abort else "it stopped without a reason")
    return _verdict(outcomes, rank, _STATUS[outcome.ending], reason)


def _verdict(outcomes: Sequence[Outcome], rank: int, status: Status, reason: str) -> Verdict:
    return Verdict(status=status, rank=rank, stage=outcomes[rank].stage, reason=reason)
