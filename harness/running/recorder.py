"""Rank 0's pen: turns results and verdicts into stored units, and notes in `progress.jsonl` what happens when."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from epcross.harness.errors import StoreError
from epcross.harness.planning.known_issues import issues_of
from epcross.harness.record import Record, Samples, UnitResult
from epcross.harness.running.job import Job, Turn
from epcross.harness.running.progress import ProgressLog
from epcross.harness.running.verdict import Verdict
from epcross.harness.storing.rows import failed_records, join_words, readable_problems
from epcross.harness.storing.run_directory import add_floor, open_run
from epcross.harness.storing.units import write_unit
from epcross.harness.terms import Flag, Stage, Status

FINE = frozenset({Status.OK, Status.UNSUPPORTED, Status.UNAVAILABLE})
"""Statuses that do not make a run a failure."""


class Recorder:
    """Writes what one job leaves. Only the supervisor of rank 0 has one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.run = open_run(Path(job.run_dir))
        self.progress = ProgressLog(self.run.path, job.notes)

    def turn(self, turn: Turn) -> None:
        """A process group is about to begin."""
        self.progress.note("turn", job=self.job.name, kind=turn.kind, backend=turn.backend, launch=turn.launch)

    def start(self, turn: Turn, point_id: str) -> None:
        """A unit begins; what was begun and never ended counts as an attempt."""
        self.progress.note("start", job=self.job.name, point_id=point_id, launch=turn.launch, backend=turn.backend)

    def stopped(self, kind: str, reason: str) -> None:
        """The job ends early."""
        self.progress.note("stopped", job=self.job.name, kind=kind, reason=reason)

    def floor(self, result: dict[str, Any] | None, verdict: Verdict | None) -> None:
        """Store the floor of this job, or why there is none."""
        if verdict is None and result is not None:
            entry = {"domain": self.job.domain, "sharing": self.job.sharing, "ep_size": self.job.ep_size, **result}
        else:
            entry = {"error": _sentence(verdict)}
        add_floor(self.run, self.job.floor_name or self.job.name, entry)
        self.progress.note("floor", job=self.job.name, ok=verdict is None, reason=_sentence(verdict))

    def skipped(self, turn: Turn, point_id: str, reason: str) -> None:
        """Store the rows of a unit that is not tried, since its point failed in an earlier launch."""
        records = failed_records(
            self.job.points[point_id], self.job.timing, turn.launch, self.job.context, Status.SKIPPED, reason
        )
        self._store(turn, point_id, records, (), 0.0, {})

    def unit(
        self,
        turn: Turn,
        point_id: str,
        result: dict[str, Any] | None,
        verdict: Verdict | None,
        flags: Iterable[Flag],
        started_at: datetime,
        wall_s: float,
        stages_s: Mapping[str, float],
        seen: Iterable[Flag] = (),
    ) -> bool:
        """Store one unit's rows, and note how long each stage took; returns whether all of them are fine. `flags` are
        those that the worker knew, and put into its rows if it made any; `seen` those that the supervisors saw."""
        attempt = self.job.attempts.get(f"{point_id}.{turn.launch}", 0)
        marks = {Flag.RETRIED} if attempt else set()
        if verdict is None and result is None:
            verdict = Verdict(status=Status.ERROR, rank=0, stage=Stage.CLOSE, reason="rank 0 returned no rows")
        if verdict is None and result is not None:
            records = tuple(Record(**record) for record in result["records"])
            samples = tuple(Samples(**item) for item in result["samples"])
            try:
                _must_be_readable(records)
                records = tuple(
                    replace(
                        record,
                        attempt=attempt,
                        position=turn.position,
                        flags=join_words([*record.flags.split(), *marks, *seen, *self._known_issue(turn, record)]),
                    )
                    for record in records
                )
                return self._store(turn, point_id, records, samples, wall_s, stages_s)
            except StoreError as error:
                # rows that break their own rules are this unit's failure; a full disk fails again below
                verdict = Verdict(status=Status.ERROR, rank=0, stage=Stage.STORE, reason=str(error))
        assert verdict is not None
        silent = verdict.status in (Status.UNSUPPORTED, Status.UNAVAILABLE)  # nobody failed
        records = failed_records(
            self.job.points[point_id],
            self.job.timing,
            turn.launch,
            self.job.context,
            verdict.status,
            verdict.reason,
            failed_rank=None if silent else verdict.rank,
            failed_stage=None if silent else verdict.stage,
            flags=marks if silent else {*flags, *marks, *seen},
        )
        common = {
            "attempt": attempt,
            "position": turn.position,
            "started_at": started_at.isoformat(timespec="seconds"),
            "wall_s": round(wall_s, 3),
        }
        return self._store(turn, point_id, tuple(replace(r, **common) for r in records), (), wall_s, stages_s)

    def _known_issue(self, turn: Turn, record: Record) -> set[Flag]:
        """Here and not in the worker, whose interpreter may be another one, with nothing to compare versions with."""
        found = issues_of(record.backend_version, self.job.backends[turn.backend].known_issues)
        return {Flag.KNOWN_ISSUE} if found else set()

    def _store(
        self,
        turn: Turn,
        point_id: str,
        records: tuple[Record, ...],
        samples: tuple[Samples, ...],
        wall_s: float,
        stages_s: Mapping[str, float],
    ) -> bool:
        write_unit(self.run, UnitResult(point_id=point_id, launch=turn.launch, records=records, samples=samples))
        statuses = Counter(record.status for record in records)
        bad = next((record for record in records if record.status not in FINE), None)
        self.progress.note(
            "unit",
            job=self.job.name,
            point_id=point_id,
            launch=turn.launch,
            backend=turn.backend,
            statuses=dict(statuses),
            wall_s=round(wall_s, 3),
            stages_s=dict(stages_s),
            reason=bad.reason if bad else None,
            failed_rank=bad.failed_rank if bad else None,
            failed_stage=bad.failed_stage if bad else None,
        )
        return bad is None


def _must_be_readable(records: Iterable[Record]) -> None:
    """Raises `StoreError` for rows with a value of another type than their columns, whoever put it there."""
    for record in records:
        if problems := readable_problems(record):
            raise StoreError("; ".join(problems))


def _sentence(verdict: Verdict | None) -> str | None:
    return None if verdict is None else f"rank {verdict.rank} failed in {verdict.stage}: {verdict.reason}"
