"""What is said of rows whose version has a known issue, or that are withdrawn: which, how many, and why.

Rows carry the flag alone. The reason is in the configuration of the backend, which every run keeps with its plan, or in
the `withdrawn.json` beside them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from epcross.harness.planning.known_issues import issues_of
from epcross.harness.planning.schema import BackendConfig, KnownIssue
from epcross.harness.record import Record
from epcross.harness.storing.withdrawn import Withdrawal
from epcross.harness.terms import Flag


def issues_of_row(row: Record, issues: Iterable[KnownIssue]) -> tuple[KnownIssue, ...]:
    """Those of `issues`, which its backend had in its run, that gave `row` its flag; none of a row without it."""
    return issues_of(row.backend_version, issues) if Flag.KNOWN_ISSUE in row.flags.split() else ()


def issues_in(plan: Mapping[str, Any]) -> dict[str, tuple[KnownIssue, ...]]:
    """The known issues of each backend in the plan of a run, as it is stored."""
    return {
        name: tuple(KnownIssue(**issue) for issue in config.get("known_issues", ()))
        for name, config in plan["backends"].items()
    }


def known_issue_lines(rows: Iterable[Record], backends: Mapping[str, BackendConfig]) -> list[str]:
    """A sentence for each backend, version and issue behind flagged rows of one run, whose plan has `backends`."""
    counts = Counter(
        (row.backend, row.backend_version, issue)
        for row in rows
        if row.backend in backends
        for issue in issues_of_row(row, backends[row.backend].known_issues)
    )
    return [
        f"{backend}: known issue of {issue.versions}: {issue.reason} "
        f"({count} row{'s' * (count != 1)} of {version} flagged {Flag.KNOWN_ISSUE})"
        for (backend, version, issue), count in counts.items()
    ]


def withdrawn_lines(rows: Iterable[Record], withdrawn: Iterable[Withdrawal]) -> list[str]:
    """A sentence for each entry of `withdrawn` that some of `rows` are withdrawn by."""
    counts = Counter((row.run_id, row.backend, row.regime) for row in rows)
    return [
        f"{entry.backend}: {entry.regime} is withdrawn: {entry.reason} "
        f"({count} row{'s' * (count != 1)} flagged {Flag.KNOWN_ISSUE})"
        for entry in withdrawn
        if (count := counts[entry.place])
    ]
