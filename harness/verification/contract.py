"""The contract suite: what every backend must do right before anyone times it, at each of `cases.py`.

    for case in cases(group.size, shape=MyBackend.contract_shape):
        if (why := refusal(make, case)) is None:
            problems = run_case(make, case, group)      # on every rank, collectively; empty = passed

`epcross check` does this in processes; see `running/check_ranks.py`.

A visit goes through the whole life of a backend: prepare once; then for each payload new inputs in place, verified
rounds that change sets, a chain of unverified pairs as in timing whose last sums are checked, and another verified
round; close twice. Outputs are poisoned before every round.
"""

import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from epcross.harness.backends import answers
from epcross.harness.backends.base import Backend, Bytes, Group, Shard
from epcross.harness.errors import GroupError
from epcross.harness.verification.cases import Case
from epcross.harness.verification.verify import Checker, Mismatch
from epcross.harness.workload.batches import GroupBatch, assemble, group_batch
from epcross.harness.workload.placement import lay_out
from epcross.harness.workload.tape import Payload

SETS = 2
CHAIN_PAIRS = 5
_SEED_STRIDE = 1000  # more than the seeds that one visit uses
_ROUNDS = (0, 1, 0)  # sets of the verified rounds: each set once, then one again without new inputs

WAITING = "waiting for the other ranks"
"""What `report` is told instead of a call."""

T = TypeVar("T")


class _Broken(Exception):
    """The visit is over; `problems` say why."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def refusal(make: Callable[[], Backend], case: Case) -> str | None:
    """Why the backend does not take the case (absent here, or a limit of its own); None if it does."""
    backend = make()
    point = case.point
    return answers.unavailable(backend) or answers.unsupported(backend, point) or answers.refused_here(backend, point)


def run_case(
    make: Callable[[], Backend],
    case: Case,
    group: Group,
    timeout_s: float = 60,
    *,
    seed: int = 0,
    report: Callable[[str], None] = lambda stage: None,
    visit_type: "type[Visit] | None" = None,
) -> list[str]:
    """Visit one case on this rank; every rank of the group must. Problems as sentences, empty if it passed.

    A check that fails on one rank ends the visit on all of them and is in every rank's list. An exception in a backend
    aborts the group. A peer that does not come back is reported after `timeout_s`; this rank's own hang is not.

    Args:
        seed: of routing, weights and rows; the same on every rank.
        report: told the name of each call into the backend before it is made, and `WAITING` before each wait for peers.
        visit_type: how a backend of another family is visited; see `gpu_contract`.
    """
    problems: list[str] = []
    visit = None
    try:
        visit = (visit_type or Visit)(make, case, group, timeout_s, seed, report)
        visit.run()
    except _Broken as broken:
        problems += broken.problems
    if visit is not None:
        problems += visit.close(failed=bool(problems))
    return problems


class Visit:
    """One backend at one case on one rank."""

    def __init__(
        self,
        make: Callable[[], Backend],
        case: Case,
        group: Group,
        timeout_s: float,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        self.case, self.group, self.timeout_s = case, group, timeout_s
        self.seed, self.report = seed, report
        self.point = self.inputs = case.point  # `inputs`: whose rows the backend is given
        self.slots = lay_out(self.point.placement, self.point.model.num_experts, self.point.ep_size)
        self.backend = self.call("__init__", make)
        declared = self.backend.weights_by, self.backend.reduction
        self.checker = self.call("reduction", lambda: Checker(self.point, group.rank, self.slots, *declared))
        self.copies: list[tuple[str, Bytes, bytes]] = []

    def run(self) -> None:
        """The whole visit but its close. Raises what ends it."""
        backend = self.backend
        self.call("workspace_bytes", lambda: answers.workspace_bytes(backend, self.point))
        batches = [self.batch(self.case.payloads[0], 0, index) for index in range(SETS)]
        self.prepare(batches)
        for seed, payload in enumerate(self.case.payloads, start=1):
            # a round first in the state that `refill` leaves, later ones in that which rounds leave
            batches = [self.batch(payload, seed, index) for index in range(SETS)]
            self.refill(batches)
            for index in _ROUNDS:
                self.round(batches[index])
            self.chain(batches)
            batches = [self.batch(payload, seed + 100, index) for index in range(SETS)]
            self.refill(batches)
            self.round(batches[1])
        self.call("describe", lambda: answers.described(backend))
        for what, array, kept in self.copies:
            if array.tobytes() != kept:
                raise self.failed(f"{what} returned a view: its contents changed in a later round; return a copy")
        self.agree(None)

    def prepare(self, batches: list[GroupBatch]) -> None:
        """Prepare the backend with one batch for each set."""
        shard = Shard(
            rank=self.group.rank,
            tokens=self.point.tokens,
            slot_rank=self.slots.slot_rank,
            batches=tuple(gb.batch(self.group.rank) for gb in batches),
        )
        self.call("prepare", lambda: self.backend.prepare(self.point, shard, self.group))

    def batch(self, payload: Payload, seed: int, index: int) -> GroupBatch:
        """The inputs of one set, with the case's own ids if it has any."""
        seed += self.seed * _SEED_STRIDE
        if self.case.ids is None:
            return group_batch(self.inputs, seed=seed, set_index=index, payload=payload)
        ids = self.case.ids(self.point, self.slots, seed * SETS + index)
        return assemble(self.inputs, ids, seed=seed, set_index=index, payload=payload)

    def refill(self, batches: list[GroupBatch]) -> None:
        """New inputs in every set, while no rank sends."""
        self.agree(None)
        for index, gb in enumerate(batches):
            batch = gb.batch(self.group.rank)
            self.call("refill", lambda index=index, batch=batch: self.backend.refill(index, batch))
        self.agree(None)

    def round(self, gb: GroupBatch) -> None:
        """One verified pair."""
        backend, index = self.backend, gb.set_index
        self.call("poison", backend.poison)
        self.agree(None)  # no rank sends into an output that another is still poisoning
        self.call("dispatch", lambda: backend.dispatch(index))
        received = self.call("received", lambda: backend.received(index))
        self.agree(self.checker.check_received(gb, received), f"dispatch of {gb.payload} rows, set {index}")
        partials = self.checker.partials(gb, received)
        self.copies.append(("received", received.rows, received.rows.tobytes()))
        self.call("stage", lambda: backend.stage(index, partials))
        self.call("combine", lambda: backend.combine(index))
        self.combined(gb, "combine")

    def chain(self, batches: list[GroupBatch]) -> None:
        """Pairs back to back as timing runs them, then the last sums of each set; each was staged in a round."""
        backend = self.backend
        self.call("poison", backend.poison)
        self.agree(None)
        for pair in range(CHAIN_PAIRS):
            index = pair % SETS
            self.call("dispatch", lambda index=index: backend.dispatch(index))
            self.call("experts", lambda index=index: backend.experts(index))
            self.call("combine", lambda index=index: backend.combine(index))
        if backend.stable_order:
            self.combined(batches[(CHAIN_PAIRS - 1) % SETS], f"a chain of {CHAIN_PAIRS} pairs")
        self.call("drain_timing", backend.drain_timing)

    def combined(self, gb: GroupBatch, where: str) -> None:
        """Compare the sums of the last combine."""
        sums = self.call("combined", lambda: self.backend.combined(gb.set_index))
        self.agree(self.checker.check_combined(gb, sums), f"{where} of {gb.payload} rows, set {gb.set_index}")
        self.copies.append(("combined", sums.view(np.uint8), sums.tobytes()))

    def call(self, stage: str, action: Callable[[], T]) -> T:
        """The action's result; an exception of it ends the visit on every rank."""
        self.report(stage)
        try:
            return action()
        except GroupError as error:
            raise self.broken(f"{stage} stopped: {error}") from error
        except answers.WrongBackend as error:
            raise self.failed(str(error)) from error
        except answers.FAILURES as error:
            raise self.failed(f"{stage} raised {answers.failure(error)}") from error

    def agree(self, found: Mismatch | None, where: str = "") -> None:
        """Return if no rank found anything; also a barrier."""
        mine = "" if found is None else f"{self.case.name}: {where}: {found}"
        self.report(WAITING)
        try:
            everyone = self.group.all_gather(json.dumps(mine).encode(), self.timeout_s)
        except GroupError as error:
            raise _Broken([mine] if mine else self.broken(f"a peer was lost: {error}").problems) from error
        if problems := [text for text in map(json.loads, everyone) if text]:
            raise _Broken(problems)

    def failed(self, problem: str) -> _Broken:
        """The end of the visit for a reason that the peers cannot see."""
        broken = self.broken(problem)
        self.group.abort(broken.problems[0])
        return broken

    def broken(self, problem: str) -> _Broken:
        """The end of the visit, blamed on this rank."""
        return _Broken([f"{self.case.name}: rank {self.group.rank}: {problem}"])

    def close(self, *, failed: bool) -> list[str]:
        """Close twice. After a failure a lost group is no further problem."""
        for time in ("first", "second"):
            self.report("close")
            try:
                self.backend.close()
            except GroupError as error:
                return [] if failed else self.broken(f"close stopped: {error}").problems
            except answers.FAILURES as error:
                return self.broken(f"the {time} close raised {answers.failure(error)}").problems
        return []
