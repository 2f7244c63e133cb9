"""Which statements can be reproduced, by which sweeps, and which runs hold those."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epcross.harness.claims.book import Book, read_book
from epcross.harness.claims.claim import Claim
from epcross.harness.claims.sources import reference_folders
from epcross.harness.errors import ConfigError, StoreError
from epcross.harness.planning.typed import suggest
from epcross.harness.running.find_point import runs_in
from epcross.harness.storing.run_directory import RunDirectory, open_run

REHEARSAL = (
    "device=cpu",
    "backend=shm_sentinel,shm_fence,shm_two_sided",
    "model=tiny",
    "ep_size=2",
    "tokens_per_rank=1,4",
    "dispatch_format=bf16",
    "combine_format=bf16",
    "regime=steady",
    "scope=scale_up",
    "timing=smoke",
)
"""What turns the sweep of a statement into one that any machine walks in seconds."""

NO_SWEEP = frozenset({"soak"})
"""Sweeps of claims that are no tables of latencies; they have commands of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One sweep, and the claims that it is for."""

    sweep: str
    claims: tuple[Claim, ...]


def tasks_for(names: Sequence[str], book: Book | None = None) -> list[Task]:
    """The sweeps that the named statements need: ids of claims, names of sweeps, or all if none is named.

    Raises:
        ConfigError: a name is no statement, or has no sweep.
    """
    book = book or read_book(reference_folders(()))
    sweeps: dict[str, list[Claim]] = {}
    for claim in book.claims:
        if claim.sweep and claim.sweep not in NO_SWEEP:
            sweeps.setdefault(claim.sweep, []).append(claim)
    if not names:
        return [Task(sweep=sweep, claims=tuple(claims)) for sweep, claims in sweeps.items()]
    by_id = {claim.id: claim for claim in book.claims}
    problems: list[str] = []
    wanted: dict[str, dict[str, Claim]] = {}
    for name in names:
        if name in sweeps:
            wanted.setdefault(name, {}).update({claim.id: claim for claim in sweeps[name]})
        elif name not in by_id:
            problems.append(f"unknown statement '{name}'{suggest(name, [*by_id, *sweeps])}")
        elif by_id[name].sweep not in sweeps:
            how = f"epcross run sweep={by_id[name].sweep}" if by_id[name].sweep else f"epcross claims --claim {name}"
            problems.append(f"{name} is not measured by a sweep of latencies; see it with: {how}")
        else:
            wanted.setdefault(by_id[name].sweep, {})[name] = by_id[name]
    if problems:
        raise ConfigError(problems)
    return [Task(sweep=sweep, claims=tuple(claims.values())) for sweep, claims in wanted.items()]


def newest_runs(tasks: Sequence[Task], folder: Path) -> dict[str, RunDirectory]:
    """The newest run of each task's sweep that lies in `folder`; sweeps without one are absent."""
    wanted = {task.sweep for task in tasks}
    found: dict[str, RunDirectory] = {}
    for path in runs_in(folder):
        try:
            run = open_run(path)
        except StoreError:
            continue  # damaged, or being made: an older one may serve
        if run.sweep in wanted:
            found.setdefault(run.sweep, run)
    return found
