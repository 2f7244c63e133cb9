"""What the documents say of bytes counted on the links of a committed run, as Markdown."""

from collections import Counter

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_run import EvidenceRun, names, panel_of
from epcross.harness.measuring.link_bytes import MARGIN, Moved, moved, ratio
from epcross.harness.terms import Regime

_MISSING = "-"


def links(run: EvidenceRun) -> str:
    """Bytes that NVLink counted of a steady pair over those that must cross, from the least to the largest of a series'
    points, and what most rows of those that differ say they are."""
    panels, name_of = run.panels(), names(run.rows)
    shares: dict[tuple[str, int], list[float]] = {}
    counts: dict[tuple[str, int], set[tuple[str, str, int]]] = {}
    found: dict[str, list[Moved]] = {}
    rounded: set[tuple[str, str, int]] = set()
    for row in sorted(run.headline_rows(Regime.STEADY), key=lambda row: row.tokens_per_rank):
        unit = row.run_id, row.point_id, row.launch  # its rows share its count
        if (share := ratio(row)) is None:
            if row.nvlink_tx_bytes is not None:
                rounded.add(unit)
            continue
        place = name_of(row), panels.index(panel_of(row))
        counts.setdefault(place, set()).add(unit)
        shares.setdefault(place, []).append(share)
        if what := moved(row):
            found.setdefault(name_of(row), []).append(what)
    if not shares:
        return "nothing was counted on the links of this run"
    heads = " | ".join(run.words(panel) for panel in panels)
    lines = [
        f"| counted over what must cross, steady | {heads} | where they differ by more than {MARGIN:.0%}, most often |",
        f"| :--- |{' ---: |' * len(panels)} :--- |",
    ]
    for name, (label, _) in run.series().items():
        own = [shares.get((name, index), []) for index in range(len(panels))]
        if any(own):
            cells = [f"{min(each):.2f} to {max(each):.2f}" if each else _MISSING for each in own]
            lines.append(f"| {label} | {' | '.join(cells)} | {_most_often(found.get(name, []))} |")
    n = span(map(len, counts.values()))
    note = f"Each range is over n = {n} counts, one of each launch at each number of tokens."
    if rounded:
        why = "their rows have what must cross in whole pairs, rounded"
        note += f" {len(rounded)} more, at few tokens, are left out: {why}."
    return "\n".join([*lines, "", note])


def _most_often(found: list[Moved]) -> str:
    """What most say; if that is several times a count, from the least to the most of those."""
    if not found:
        return _MISSING
    (what, _), *_ = Counter(each.what for each in found).most_common(1)
    those = sorted((each for each in found if each.what == what), key=lambda each: each.times or 0)
    least, most = those[0], those[-1]
    if str(least) == str(most):
        return str(most)
    return f"{least.times:.2f} to {most.times:.2f} times {what}"
