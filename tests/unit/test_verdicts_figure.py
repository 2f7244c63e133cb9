"""Claims at a glance: every judgement is drawn, with its verdict in words."""

from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba

from epcross.harness.analysis import plots
from epcross.harness.analysis.figures.canvas import Figure, Omitted, drawn
from epcross.harness.analysis.figures.verdicts import COLORS
from epcross.harness.claims.book import read_book
from epcross.harness.claims.claim import Way
from epcross.harness.claims.findings import Judgement
from epcross.harness.claims.verdict import Verdict


@pytest.fixture(scope="module")
def judgements() -> list[Judgement]:
    """Each verdict once, by two ways, and a fact."""
    claims = read_book().claims
    by_kernels = [
        Judgement(claim=claim, way=way, verdict=verdict, reason="", found="1.5 [1.4..1.6]" if number % 2 else "")
        for number, (claim, verdict) in enumerate(zip(claims, Verdict, strict=False))
        for way in (Way.REPRODUCES, Way.REPLICATES)
    ]
    return [*by_kernels, replace(by_kernels[0], claim=claims[-1], way=Way.CHECKS, found="900")]


def test_every_judgement_has_its_cell(judgements: list[Judgement]) -> None:
    figure = plots.verdicts(judgements, "judged by 5 rows of a run")
    assert isinstance(figure, Figure)
    (ax,) = figure.drawing.axes
    cells = {str(patch.get_gid()).split("|")[1]: patch for patch in ax.patches}
    assert len(cells) == len(figure.data) == len(judgements) == 13
    assert drawn(figure.drawing) == {f"|{line['key']}" for line in figure.data}
    words = {(round(text.get_position()[0], 2), text.get_position()[1]): text.get_text() for text in ax.texts}
    for one in judgements:
        patch = cells[f"{one.claim.id}/{one.way}"]
        assert patch.get_facecolor() == to_rgba(COLORS[one.verdict])
        box = patch.get_extents().transformed(ax.transData.inverted())
        middle = round((box.x0 + box.x1) / 2, 2), (box.y0 + box.y1) / 2
        (said,) = [text for place, text in words.items() if place == pytest.approx(middle)]
        assert said == (f"{one.verdict}\n{one.found}" if one.found else str(one.verdict))
    assert figure.caption[1] == ("3 inside, 2 exceeded, 2 outside, 2 inconclusive, 2 not measured, 2 not comparable")
    assert figure.caption[2] == "judged by 5 rows of a run"


def test_a_fact_goes_across_both_ways(judgements: list[Judgement]) -> None:
    figure = plots.verdicts(judgements)
    assert isinstance(figure, Figure)
    widths = {str(patch.get_gid()).split("/")[1]: patch.get_extents().width for patch in figure.drawing.axes[0].patches}
    assert widths["reproduces"] == pytest.approx(widths["replicates"])
    assert widths["checks"] > 1.95 * widths["reproduces"]


def test_each_claim_is_stated_with_its_bounds(judgements: list[Judgement]) -> None:
    figure = plots.verdicts(judgements)
    assert isinstance(figure, Figure)
    texts = {text.get_text() for text in figure.drawing.axes[0].texts}
    for one in judgements:
        assert {one.claim.id, str(one.claim.bounds)} <= texts
        assert any(text.replace("\n", " ").startswith(one.claim.statement[:40]) for text in texts)


def test_no_claim_no_figure() -> None:
    omitted = plots.verdicts([])
    assert isinstance(omitted, Omitted)
    assert omitted.reason == "there is no claim"
