"""Why rows have no number; and whether a run that is done measured anything: it tells no failure where nothing can be
used, and is no success."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from epcross.harness.record import Record
from epcross.harness.terms import Status

_SHOWN_REASONS = 3


def reasons_of(rows: Iterable[Record]) -> list[dict[str, Any]]:
    """Every reason why rows are not ok, the commonest first: `backend`, `status`, `reason`, and how many `rows`.

    Points that are impossible from the start have rows as well, so that theirs are among them.
    """
    found = Counter((row.backend, str(row.status), row.reason or "") for row in rows if row.status != Status.OK)
    return [
        {"backend": backend, "status": status, "reason": reason, "rows": count}
        for (backend, status, reason), count in found.most_common()
    ]


def why_unmeasured(rows: Sequence[Record]) -> str | None:
    """One sentence, with the commonest reasons, if all rows of a run that is done are unavailable or unsupported.

    None if a point was measured, if something failed, and for a run without rows, such as that of a floor alone.
    """
    if not rows or any(row.status not in (Status.UNAVAILABLE, Status.UNSUPPORTED) for row in rows):
        return None
    reasons = Counter(row.reason or "" for row in rows).most_common()
    why = [f"{count}: {reason}" if len(reasons) > 1 else reason for reason, count in reasons[:_SHOWN_REASONS]]
    if more := reasons[_SHOWN_REASONS:]:
        why.append(f"{sum(count for _, count in more)}: {len(more)} other reasons")
    subject = f"all {len(rows)} rows are" if len(rows) > 1 else "its only row is"
    statuses = " or ".join(sorted({row.status for row in rows}))
    return f"No point was measured: {subject} {statuses} ({'; '.join(why)})"
