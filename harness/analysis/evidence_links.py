"""What the documents say of bytes counted on the links of a committed run, as Markdown."""

from collections import Counter

from epcross.harness.analysis.captions import span
from epcross.harness.analysis.evidence_run import EvidenceRun, names, panel_of
from epcross.harness.measuring.link_bytes import MARGIN, difference, ratio
from epcross.harness.terms import Regime

_MISSING = "-"


def links(run: EvidenceRun) -> str:
    """Bytes that NVLink counted of a steady pair over those that must cross, from the least to the largest of a series'
    points, and what most rows of those that differ say they are."""
    panels, name_of = run.panels(), names(run.rows)
    shares: dict[tuple[str, int], list[float]] = {}
    counts: dict[tuple[str, int], set[tuple[str, str, int]]] = {}
    reasons: dict[str, Counter[str]] = {}
    for row in sorted(run.headline_rows(Regime.STEADY), key=lambda row: row.tokens_per_rank):
        if (share := ratio(row)) is None:
            continue
        place = name_of(row), panels.index(panel_of(row))
        counts.setdefault(place, set()).add((row.run_id, row.point_id, row.launch))  # a unit's rows share its count
        shares.setdefault(place, []).append(share)
        if words := difference(row):
            reasons.setdefault(name_of(row), Counter())[words.rpartition(": ")[2]] += 1
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
            found = reasons[name].most_common(1)[0][0] if name in reasons else _MISSING
            lines.append(f"| {label} | {' | '.join(cells)} | {found} |")
    n = span(map(len, counts.values()))
    return "\n".join([*lines, "", f"Each range is over n = {n} counts, one of each launch at each number of tokens."])
