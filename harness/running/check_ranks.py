"""The ranks of `epcross check`: one worker process each, started and watched by the command itself.

Workers go from case to case. After a failure all of them are killed and the next case gets fresh ones, so that it is
judged by itself. Whatever a rank does, `visit` returns within the limits.
"""

import os
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from epcross.harness.planning.estimate import usable_cores
from epcross.harness.planning.schema import BackendConfig, Device
from epcross.harness.point import Scalar, Timing, processes
from epcross.harness.running.child import Child
from epcross.harness.running.core_watch import watch_cores
from epcross.harness.running.processes import remove_segments
from epcross.harness.running.rank_place import import_folder, place
from epcross.harness.running.rendezvous import new_token
from epcross.harness.running.rendezvous_server import StoreServer
from epcross.harness.running.seat import seat_here
from epcross.harness.running.stuck import ask, frames
from epcross.harness.terms import BackendKind
from epcross.harness.verification.contract import WAITING

VISIT = "epcross.harness.verification.visit:visit_case"
START_LIMIT_S = 90.0  # to import the backend and join
START_RANK_S = 2.0  # more for each rank that a core has to start
GRACE_S = 3.0  # for the other ranks, once one has failed
LEAVE_S = 3.0
TELL_S = 10.0  # of silence, before it is told what is waited for; then after twice as long each time
NAMED_RANKS = 8  # of those that are waited for


class End(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    REFUSED = "refused"  # the backend says that it does not take it
    FAILED = "failed"
    HUNG = "hung"  # a rank did not come back
    NO_START = "no start"  # the workers never became ready
    UNAVAILABLE = "unavailable"  # a rank says that the backend cannot be used on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseEnd:
    """How a case ended, and why: the first problem first."""

    end: End
    problems: tuple[str, ...] = ()


class CheckRanks:
    """The processes of a check; a context manager that leaves none behind.

    Args:
        config: the backend.
        options: all of its options.
        device: what a rank is; decides how many processes hold the ranks.
        folder: for the workers' output.
        limit_s: of one case, on all ranks.
        env: added to the environment of every worker.
        kind, compute, compute_options: what the backend does, and the expert stage of a layer.
    """

    def __init__(
        self,
        config: BackendConfig,
        options: Mapping[str, Scalar],
        ep_size: int,
        folder: Path,
        limit_s: float,
        *,
        device: Device,
        env: Mapping[str, str] | None = None,
        kind: BackendKind = BackendKind.EXCHANGE,
        compute: str = "",
        compute_options: Mapping[str, Scalar] | None = None,
    ) -> None:
        self._experts = {"kind": kind, "compute": compute, "compute_options": dict(compute_options or {})}
        self._config, self._options, self._ep_size = config, dict(options), ep_size
        self._device, self._env = device, dict(env or {})
        self._size = processes(ep_size, device.sharing)
        self._folder, self._limit_s = folder, limit_s
        self._server = StoreServer(token=new_token())
        self._cores = watch_cores(seat_here(0, self._size), device.domain)  # for the runs that are on them
        self._generation = 0
        self._children: list[Child] = []
        self._stages: dict[int, str] = {}
        self._asked_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for child in self._children:
                    child.leave(LEAVE_S)
            self._discard()
        finally:
            self._cores.close()
            self._server.close()

    def visit(self, name: str, seed: int, tell: Callable[[str], None] = lambda text: None) -> CaseEnd:
        """Run one case on all ranks. `tell` hears what is waited for, and for how long, if that takes long."""
        self._tell = tell
        answers: dict[int, dict[str, Any]] = {}
        if not self._children:
            try:
                self._start()
            except OSError as error:
                self._discard()
                why = f"its interpreter {self._config.python} cannot be started: {error.strerror}"
                return CaseEnd(end=End.NO_START, problems=(why,))
            answers = self._answers("ready", START_LIMIT_S + START_RANK_S * self._size / usable_cores())
            if any("ready" not in answer for answer in answers.values()) or len(answers) < self._size:
                return self._failure(answers, started=False)
        request = {
            "name": name,
            "seed": seed,
            "backend": self._config.name,
            "options": self._options,
            "ep_size": self._ep_size,
            "domain": self._device.domain,
            "sharing": self._device.sharing,
            "timeout_s": self._limit_s,
            **self._experts,
        }
        self._stages.clear()
        for child in self._children:
            child.send({"case": request})
        answers = self._answers("done", self._limit_s)
        results = [answer.get("done") for answer in answers.values()]
        if len(answers) == self._size and all(result and "refused" in result for result in results):
            return CaseEnd(end=End.REFUSED, problems=(answers[0]["done"]["refused"],))
        if len(answers) == self._size and all(result and not result["problems"] for result in results):
            return CaseEnd(end=End.PASSED)
        return self._failure(answers, started=True)

    def _start(self) -> None:
        self._generation += 1
        address = self._server.address
        self._shared_name = f"{address.token[:12]}c{self._generation:05d}"
        self._stages = {}
        begin, quiet_s = time.monotonic(), TELL_S
        for rank in range(self._size):
            if (waited_s := time.monotonic() - begin) >= quiet_s:
                self._tell(f"{waited_s:.0f} s; {rank} of {self._size} processes are made")
                quiet_s *= 2
            spot = place(rank, self._size, self._device.domain)
            hello = {
                "address": asdict(address),
                "backend": self._config.to_json(),
                "context": {},
                "core": spot.core,
                "flags": [],
                "gpu": spot.gpu,
                "rank": rank,
                "scope": f"group {self._generation}",
                "shared_name": self._shared_name,
                "size": self._size,
                "supervisor": os.getpid(),
                "timing": asdict(_timing(self._limit_s)),
                "work": VISIT,
            }
            child = Child(
                hello,
                python=self._config.python,
                env={**self._env, **self._config.env},
                log=self._folder / f"start{self._generation}.rank{rank}.log",
                imports=import_folder(self._folder) if self._config.python else None,
            )
            self._children.append(child)

    def _answers(self, kind: str, limit_s: float) -> dict[int, dict[str, Any]]:
        """The last word of each rank, a message `kind` or `failed` or `{"ended": how}`; silent ranks are absent.

        Once one rank has failed, the others get `GRACE_S`.
        """
        answers: dict[int, dict[str, Any]] = {}
        self._asked_at = time.monotonic()
        deadline, quiet_s = time.monotonic() + limit_s, TELL_S
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self._children):
                selector.register(child.channel, selectors.EVENT_READ, rank)
            while len(answers) < self._size and (remaining := deadline - time.monotonic()) > 0:
                until_told = self._asked_at + quiet_s - time.monotonic()
                if until_told <= 0:
                    self._tell(self._waited_for(kind, answers, quiet_s))
                    quiet_s *= 2
                    continue
                for key, _ in selector.select(min(remaining, until_told)):
                    rank = key.data
                    messages = self._children[rank].messages()
                    if messages is None:
                        selector.unregister(key.fileobj)
                        answers.setdefault(rank, {"ended": self._children[rank].how_it_ended()})
                    for message in messages or ():
                        if "stage" in message:
                            self._stages[rank] = message["stage"]
                        if kind in message or "failed" in message:
                            answers[rank] = message
                    if rank in answers and _is_bad(answers[rank]):
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _waited_for(self, kind: str, answers: Mapping[int, dict[str, Any]], waited_s: float) -> str:
        """How many ranks have started; later, which have not answered for so long, by what they are in."""
        if kind == "ready":
            absent = [str(rank) for rank in range(self._size) if rank not in answers]
            return f"{waited_s:.0f} s; {len(answers)} of {self._size} ranks have started, not {_named(absent)}"
        found: dict[str, list[str]] = {}
        for rank in range(self._size):
            if rank not in answers:
                found.setdefault(self._stages.get(rank, "starting"), []).append(str(rank))
        ranks = [f"{_named(of)}: {stage}" for stage, of in found.items()]
        return f"{waited_s:.0f} s; {'; '.join(ranks)}"

    def _failure(self, answers: Mapping[int, dict[str, Any]], *, started: bool) -> CaseEnd:
        """What went wrong, those to blame first; ends all ranks."""
        unusable = [answer["reason"] for _, answer in sorted(answers.items()) if answer.get("failed") == "unavailable"]
        if not started and unusable and not any("ended" in answer for answer in answers.values()):
            self._discard()
            return CaseEnd(end=End.UNAVAILABLE, problems=tuple(dict.fromkeys(unusable)))
        silent = [rank for rank in range(self._size) if rank not in answers]
        problems = [
            f"rank {rank} in {self._stages.get(rank, 'start')}: {answer['ended']}"
            for rank, answer in answers.items()
            if "ended" in answer
        ]
        if not problems:
            problems += self._where(silent)
        for rank, answer in sorted(answers.items()):
            problems += answer.get("done", {}).get("problems", ()) if isinstance(answer.get("done"), dict) else ()
            if "failed" in answer:
                where = f"rank {rank}: " if started else ""
                problems.append(f"{where}{answer['reason']}")
        self._discard()
        hung = bool(silent) and not any("ended" in answer for answer in answers.values())
        end = End.NO_START if not started else End.HUNG if hung else End.FAILED
        return CaseEnd(end=end, problems=_told_once(problems))

    def _where(self, silent: list[int]) -> list[str]:
        """For each rank that does not answer, the call that it is in and the line that it stands on."""
        waited_s = time.monotonic() - self._asked_at
        # ranks that wait for others are not to blame, unless all do
        silent = [rank for rank in silent if self._stages.get(rank) != WAITING] or silent
        ask(self._children[rank].pid for rank in silent)
        return [
            f"rank {rank} hangs: it did not come back from {self._stages.get(rank, 'its start')} "
            f"within {waited_s:.0f} s{_stack(self._children[rank].log)}"
            for rank in silent
        ]

    def _discard(self) -> None:
        for child in self._children:
            child.kill()
        if self._children:
            remove_segments(self._shared_name)
        self._children = []


def _named(ranks: list[str]) -> str:
    """Ranks by their numbers, and of very many the first."""
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:NAMED_RANKS])}{more}"


def _is_bad(answer: Mapping[str, Any]) -> bool:
    done = answer.get("done")
    return "ready" not in answer and not (isinstance(done, dict) and not done.get("problems"))


def _told_once(problems: list[str]) -> tuple[str, ...]:
    """The problems without those that only pass on another one, as peers of a rank that gave up do."""
    distinct = list(dict.fromkeys(problems))
    return tuple(text for text in distinct if not any(other != text and other in text for other in distinct))


def _stack(log: Path) -> str:
    """Where in the backend a stuck worker stands, as words behind a reason."""
    return "".join(f"; {text}" if n == 0 else f", which has come to {text}" for n, text in enumerate(frames(log)))


def _timing(limit_s: float) -> Timing:
    """What a worker wants to know besides; nothing is timed, and the wall limit bounds waits for peers."""
    ones = dict.fromkeys(("launches", "seeds", "chains", "min_pairs", "max_pairs", "iterations", "sets"), 1)
    return Timing(**ones, warmup_pairs=0, chain_ms=1.0, wall_limit_s=limit_s)
