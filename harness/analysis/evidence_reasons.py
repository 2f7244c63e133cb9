"""What the documents say of points without a number, and of repeats that are left out, as Markdown."""

import re
from collections import Counter

from epcross.harness.analysis.evidence_run import TIMED, EvidenceRun
from epcross.harness.analysis.known_issues import issues_in, issues_of_row
from epcross.harness.record import Record
from epcross.harness.storing.withdrawn import Place
from epcross.harness.terms import HEADLINES, Flag, Status

_REASONS = 3  # of a backend's points, in a status
_NEXT_LINE = " | "  # of what a process wrote before it ended
_PATH = re.compile(r"(?<![^\s('\"])(?:/[^\s/'\"]+)+/(?=[^\s/'\"])")  # the folders of an absolute one


def reasons(run: EvidenceRun) -> list[str]:
    """A sentence for each backend that has points without a number, or numbers that are left out for a known issue: how
    many, by status, with the commonest reasons."""
    shown = [row for row in run.rows if row.phase in HEADLINES and row.regime in TIMED]
    sentences = []
    for backend, config in run.backends.items():
        own = [row for row in shown if row.backend == backend]
        if words := [*_without_number(own), *_known_issues(run, own)]:
            sentences.append(f"{config['label']}: {'; '.join(words)}.")
    return sentences


def withdrawn(run: EvidenceRun) -> str:
    """Which series' numbers are withdrawn, and why, as in "entry of AG/RS; Fence (its clock was wrong)"; empty if none
    are."""
    shown = {
        (row.run_id, row.backend, row.regime) for row in run.rows if row.phase in HEADLINES and row.regime in TIMED
    }
    entries = [entry for each in run.withdrawn.values() for entry in each if entry.place in shown]
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for backend, config in run.backends.items():
        for entry in entries:
            if entry.backend == backend:
                labels.setdefault((entry.regime, entry.reason), {})[config["label"]] = None
    told = [f"{regime} of {'; '.join(names)} ({_PATH.sub('', why)})" for (regime, why), names in labels.items()]
    return "; ".join(told)


def _without_number(rows: list[Record]) -> list[str]:
    points: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: (row.tokens_per_rank, row.dispatch_format)):
        if row.status != Status.OK:
            reason = (row.reason or "no reason given").split(_NEXT_LINE)[0]  # the rest is in the rows
            points.setdefault(row.status, {})[row.point_id] = _PATH.sub("", reason)
    words = []
    for status, each in sorted(points.items()):
        told = Counter(each.values()).most_common(_REASONS)
        words += [f"{_count(count, 'point')} {status} ({reason})" for reason, count in told]
        if rest := len(each) - sum(count for _, count in told):
            words.append(f"{_count(rest, 'point')} {status} for other reasons")
    return words


def _known_issues(run: EvidenceRun, rows: list[Record]) -> list[str]:
    """What was measured with a version that has a known issue, or turned out to be wrong since."""
    since: dict[Place, list[str]] = {}
    for entry in (entry for each in run.withdrawn.values() for entry in each):
        since.setdefault(entry.place, []).append(entry.reason)
    issues = {each.run_id: issues_in(each.plan) for each in (run.run, *run.older)}
    left_out: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if row.status != Status.OK or Flag.KNOWN_ISSUE not in row.flags.split():
            continue
        known = [issue.reason for issue in issues_of_row(row, issues[row.run_id].get(row.backend, ()))]
        if why := [*since.get((row.run_id, row.backend, row.regime), ()), *known]:
            left_out.setdefault((row.regime, "; ".join(why)), []).append(row)
    return [
        f"{_count(len(own), 'repeat')} of {_count(len({row.point_id for row in own}), 'point')} in {regime} left out"
        f" ({_PATH.sub('', reason)})"
        for (regime, reason), own in left_out.items()
    ]


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
