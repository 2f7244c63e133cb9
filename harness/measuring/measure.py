"""One unit, start to finish, on every rank, and its rows.

Collective: all ranks run it in step and rank 0 returns the rows. A wrong output is a result (`incorrect`); anything
else that goes wrong is raised, and the supervisors record it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from epcross.harness.backends.base import Backend, Group
from epcross.harness.measuring.link_bytes import difference
from epcross.harness.measuring.nvtx import staged
from epcross.harness.measuring.unit_rows import (
    Chain,
    chains_from_bytes,
    chains_to_bytes,
    described_fields,
    unit_result,
)
from epcross.harness.measuring.unit_session import Incorrect, UnitSession
from epcross.harness.point import Timing, Unit
from epcross.harness.record import UnitResult
from epcross.harness.storing.rows import RunContext, base_record, failed_records
from epcross.harness.terms import Domain, Flag, Stage, Status


def measure_unit(
    backend: Backend,
    unit: Unit,
    timing: Timing,
    group: Group,
    context: RunContext,
    report_stage: Callable[[Stage], None],
    flags: Iterable[Flag] = (),
    session_type: type[UnitSession] = UnitSession,
) -> UnitResult | None:
    """Measure one unit on this rank; the rows on rank 0, None on the others.

    Raises whatever the backend raises, `WaitExpired` and `GroupError`; a wrong output is no exception but rows of
    status `incorrect`.
    """
    begin, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    flags = frozenset(flags)
    ranges = None if unit.point.domain is Domain.CPU else staged(report_stage)
    report_stage = ranges or report_stage
    oversubscribed = Flag.OVERSUBSCRIBED in flags
    session = session_type(backend, unit.point, timing, group, report_stage, oversubscribed=oversubscribed)
    wrong: Incorrect | None = None
    chains: list[Chain] = []
    facts: dict[str, Any] = {}
    try:
        chains = session.run()
        facts = {**session.timer_fields(), **session.gpu_fields(), **session.traffic_fields()}
        facts |= session.link_fields()
        flags |= session.flags
        facts |= described_fields(backend, session.descriptions())
        facts |= session.layer_fields()
    except Incorrect as found:  # by all ranks
        wrong = found
    facts |= session.error_fields()
    # other exceptions skip this: close is collective, and the peers of a rank that raised are not coming
    report_stage(Stage.CLOSE)
    session.close()  # first: captured graphs hold addresses of the backend's buffers
    backend.close()
    if ranges is not None:
        ranges.close()
    if wrong is not None:
        if group.rank != 0:
            return None
        records = failed_records(
            unit.point,
            timing,
            unit.launch,
            context,
            Status.INCORRECT,
            wrong.sentence,
            failed_rank=wrong.rank,
            failed_stage=wrong.stage,
            flags=flags,
        )
        records = tuple(replace(record, verified_rounds=session.verified_rounds, **facts) for record in records)
        return UnitResult(point_id=unit.point.point_id, launch=unit.launch, records=records)
    gathered = [chains_from_bytes(data) for data in group.all_gather(chains_to_bytes(chains))]
    if group.rank != 0:
        return None
    common = replace(
        base_record(unit.point, context),
        launch=unit.launch,
        started_at=started_at,
        wall_s=round(time.monotonic() - begin, 3),
        verified_rounds=session.verified_rounds,
        boundary=None,
        **facts,
    )
    common = replace(common, nvlink_note=common.nvlink_note or difference(common))
    return unit_result(unit, timing, common, gathered, flags=flags, boundary=backend.boundary)
