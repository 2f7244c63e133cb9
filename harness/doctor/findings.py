"""What the doctor has to say, and the words for it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from epcross.harness.doctor.facts import Facts
from epcross.harness.running.seat import ranks_in_words
from epcross.harness.terms import Domain, Scope


class Severity(StrEnum):
    """How bad a finding is."""

    STOPS = "stops"  # the sweep cannot run so
    COSTS = "costs"  # it runs, and rows or baselines are lost, or numbers are worse
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know."""

    severity: Severity
    subject: str
    text: str
    next_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the ranks are for."""

    domain: Domain = Domain.NVLINK
    scope: Scope = Scope.SCALE_UP
    arch: str = ""  # as the cluster's file says
    shm_bytes: int = 0  # of a node
    gpu_bytes: int = 0  # of a rank
    cpu_ranks: bool = False  # ranks that spin on cores of their own

    @property
    def gpus(self) -> bool:
        """Whether ranks need GPUs."""
        return self.domain is not Domain.CPU


def in_words(facts: Iterable[Facts]) -> str:
    """Ranks and the nodes they are on."""
    listed = list(facts)
    nodes = ", ".join(dict.fromkeys(fact.seat.node for fact in listed))
    return f"rank{'s' if len(listed) > 1 else ''} {ranks_in_words([fact.seat.rank for fact in listed])} on {nodes}"


def grouped(facts: Sequence[Facts], of: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    """The facts by a word of each."""
    found: dict[str, list[Facts]] = {}
    for fact in facts:
        found.setdefault(of(fact), []).append(fact)
    return found


def differ(
    facts: Sequence[Facts], what: str, of: Callable[[Facts], str], severity: Severity, step: str
) -> Iterator[Finding]:
    """A finding if a word is not the same at all ranks."""
    groups = grouped(facts, of)
    if len(groups) > 1:
        text = "; ".join(f"{name or 'none'} at {in_words(members)}" for name, members in groups.items())
        yield Finding(severity=severity, subject=what, text=f"not the same everywhere: {text}", next_step=step)
