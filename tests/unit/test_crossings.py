"""Where one series overtakes another, as the report's table and figure say it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import report_runs
from report_runs import make_run, points

from epcross.harness.analysis import plots, rivals
from epcross.harness.analysis.figures import canvas, crossings
from epcross.harness.analysis.figures.canvas import Figure, Omitted
from epcross.harness.analysis.figures.scene import Scene
from epcross.harness.errors import InputError
from epcross.harness.record import Record

SENTINEL, FENCE, TWO_SIDED = "#D55E00", "#0072B2", "#999999"
TOKENS = (1, 4, 16, 64)
EXACT = 6.245712991583701
"""Where 10 + t crosses 4 + 2 t, log-log between the points 4 and 16."""


def rank(row: Record, factor: float) -> Record:
    value = (row.latency_us or 0.0) * factor
    return replace(row, latency_us=value, latency_min_us=value, latency_max_us=value)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Five launches at EP 2, 4 and 8; at EP 8, Fence takes three times as long."""

    def change(row: Record) -> Record:
        slower = row.backend == "shm_fence" and row.ep_size == 8
        return rank(replace(row, flags=""), 3.0 if slower else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_runs, "TIMING", replace(report_runs.TIMING, launches=5))
        run = make_run(tmp_path_factory.mktemp("run"), points(ep_sizes=(2, 4, 8)), change)
    (found,) = plots.load(run)
    return found


def drawn(scene: Scene) -> Figure:
    figure = plots.figure(scene, "crossings")
    assert isinstance(figure, Figure)
    return figure


def test_every_pair_of_a_place_is_judged_once(scene: Scene) -> None:
    found = rivals.rivals(scene)
    assert len(found) == 3 * 3 * 2  # EP sizes, pairs, regimes
    pair = next(one for one in found if one.ep_size == 4 and one.line["b"] == "SHM Sentinel")
    assert (pair.line["a"], pair.line["state"], pair.called) == ("SHM Fence", "crossed", True)
    assert (pair.line["faster_below"], pair.line["faster_above"]) == ("SHM Sentinel", "SHM Fence")
    assert pair.estimate == pytest.approx(EXACT)
    slow = next(one for one in found if one.ep_size == 8 and one.line["b"] == "SHM Sentinel")
    assert (slow.line["state"], slow.estimate, slow.line["faster_above"]) == ("none in range", None, "SHM Sentinel")


def test_strips_are_coloured_by_who_leads(scene: Scene) -> None:
    figure = drawn(scene)
    steady, entry = figure.drawing.axes
    assert (steady.get_title(), entry.get_title()) == ("steady", "entry")
    labels = [label.get_text().replace("\n", " ") for label in steady.get_yticklabels()][::-1]
    assert labels[:3] == [f"SHM Fence or SHM Sentinel, EP {size}" for size in (2, 4, 8)]  # one pair over EP
    parts = {}
    for patch in steady.patches:
        if patch.get_gid() is None:
            box = patch.get_extents().transformed(steady.transData.inverted())
            parts.setdefault(labels[len(labels) - 1 - round((box.y0 + box.y1) / 2)], []).append(
                (patch.get_facecolor(), box.x0, box.x1)
            )
    from matplotlib.colors import to_rgba

    below, above = parts["SHM Fence or SHM Sentinel, EP 2"]
    assert (below[0], above[0]) == (to_rgba(SENTINEL), to_rgba(FENCE))
    assert below[1] < 1 < below[2] <= EXACT <= above[1] < 64 < above[2]
    ((color, left, right),) = parts["SHM Fence or SHM Sentinel, EP 8"]
    assert (color, left < 1, right > 64) == (to_rgba(SENTINEL), True, True)
    (crossing,) = [np.asarray(line.get_xdata())[0] for line in steady.lines if line.get_marker() == "x"][:1]
    assert crossing == pytest.approx(EXACT)


def test_who_leads_is_told_without_colour(scene: Scene) -> None:
    markers = {str(line.get_marker()) for line in drawn(scene).drawing.axes[0].lines}
    assert {scene.styles[one].marker for one in scene.styles if one.backend != "shm_two_sided"} <= markers


def test_its_data_are_those_of_the_lines(scene: Scene) -> None:
    figure = drawn(scene)
    assert canvas.drawn(figure.drawing) == {f"{line['panel']}|{line['key']}" for line in figure.data}
    assert len(figure.data) == 18
    assert all(line["low"] <= line["estimate"] <= line["high"] for line in figure.data if line["state"] == "crossed")


def test_what_launches_do_not_tell_is_left_white(tmp_path: Path) -> None:
    (two_launches,) = plots.load(make_run(tmp_path))  # two launches call nothing
    figure = drawn(two_launches)
    for ax in figure.drawing.axes:
        assert {patch.get_facecolor() for patch in ax.patches} == {(1.0, 1.0, 1.0, 1.0)}
    texts = [text.get_text() for text in figure.drawing.legends[0].get_texts()]
    assert texts == ["cannot be told", "crossing, 95 % interval"]


def test_one_series_alone_has_no_rival(tmp_path: Path) -> None:
    (alone,) = plots.load(make_run(tmp_path, points(backends=("shm_fence",))))
    assert rivals.rivals(alone) == []
    omitted = plots.figure(alone, "crossings")
    assert isinstance(omitted, Omitted)
    assert omitted.reason.startswith("it needs two series of one run")


def test_an_equal_part_is_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_runs, "TIMING", replace(report_runs.TIMING, launches=5))

    def change(row: Record) -> Record:
        return replace(row, latency_us=50.0, latency_min_us=50.0, latency_max_us=50.0, flags="")

    (equal,) = plots.load(make_run(tmp_path, points(backends=("shm_fence", "shm_sentinel")), change))
    figure = drawn(equal)
    assert {line["faster_above"] for line in figure.data} == {"equal"}
    texts = [text.get_text() for text in figure.drawing.legends[0].get_texts()]
    assert texts == ["equal"]
    assert figure.title == crossings.TITLE


def test_a_lead_that_ends_in_a_draw_is_coloured_up_to_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.colors import to_rgba

    monkeypatch.setattr(report_runs, "TIMING", replace(report_runs.TIMING, launches=5))

    def change(row: Record) -> Record:
        value = 40.0 if row.backend == "shm_sentinel" and row.tokens_per_rank <= 4 else 50.0
        return replace(row, latency_us=value, latency_min_us=value, latency_max_us=value, flags="")

    (half,) = plots.load(make_run(tmp_path, points(backends=("shm_fence", "shm_sentinel")), change))
    figure = drawn(half)
    for line in figure.data:
        assert (line["state"], line["faster_below"], line["faster_above"]) == ("none in range", "SHM Sentinel", "equal")
        assert (line["leads_from"], line["leads_to"]) == (1, 4)
    ax = figure.drawing.axes[0]
    parts = [patch for patch in ax.patches if patch.get_gid() is None]
    spans = [patch.get_extents().transformed(ax.transData.inverted()) for patch in parts]
    assert [patch.get_facecolor() for patch in parts[:2]] == [to_rgba(SENTINEL), to_rgba("#c8c8c8")]
    assert spans[0].x0 < 1
    assert [spans[0].x1, spans[1].x0] == pytest.approx([4, 4])
    assert spans[1].x1 > 64


def test_sure_leads_are_coloured_where_the_change_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 64 tokens Fence is ahead in the median and in most launches: in too few to be sure."""
    from matplotlib.colors import to_rgba

    monkeypatch.setattr(report_runs, "TIMING", replace(report_runs.TIMING, launches=5))

    def change(row: Record) -> Record:
        value = 50.0
        if row.backend == "shm_sentinel":
            value = 40.0 if row.tokens_per_rank <= 4 else 50.0
            if row.tokens_per_rank == 64:
                value = 40.0 if row.launch == 4 else 55.0
        return replace(row, latency_us=value, latency_min_us=value, latency_max_us=value, flags="")

    (half,) = plots.load(make_run(tmp_path, points(backends=("shm_fence", "shm_sentinel")), change))
    figure = drawn(half)
    assert {(line["state"], line["a_leads"], line["b_leads"]) for line in figure.data} == {("ambiguous", "", "1..4")}
    ax = figure.drawing.axes[0]
    ((color, span),) = [
        (patch.get_facecolor(), patch.get_extents().transformed(ax.transData.inverted()))
        for patch in ax.patches
        if patch.get_gid() is None
    ]
    assert color == to_rgba(SENTINEL)
    assert span.x0 < 1
    assert 4 < span.x1 < 5
    texts = [text.get_text() for text in figure.drawing.legends[0].get_texts()]
    assert texts[:2] == ["SHM Sentinel leads", "cannot be told"]


def test_a_figure_longer_than_a_screen_has_its_scale_at_the_top_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_the_top(figure: Figure) -> set[bool]:
        return {bool(tick.label2.get_visible()) for ax in figure.drawing.axes for tick in ax.xaxis.get_major_ticks()}

    assert at_the_top(drawn(scene)) == {False}
    monkeypatch.setattr(crossings, "_SCREEN", 8)
    assert at_the_top(drawn(scene)) == {True}


def test_some_are_set_against_all_others_and_these_not_among_themselves(scene: Scene) -> None:
    figure = plots.crossings_of(scene, "shm_sentinel", "shm_fence")
    assert isinstance(figure, Figure)
    assert {line["key"] for line in figure.data} == {
        f"{ours} or SHM two-sided, EP {size}" for ours in ("SHM Sentinel", "SHM Fence") for size in (2, 4, 8)
    }
    all_of_them = {(line["panel"], line["key"]): line["estimate"] for line in drawn(scene).data}
    assert all(
        all_of_them[line["panel"], line["key"]] == pytest.approx(line["estimate"], nan_ok=True) for line in figure.data
    )
    labels = [label.get_text().replace("\n", " ") for label in figure.drawing.axes[0].get_yticklabels()][::-1]
    assert labels[0] == "SHM Fence or SHM two-sided, EP 2"


def test_a_backend_that_is_not_there_is_named(scene: Scene) -> None:
    with pytest.raises(InputError, match="no backend gloo here; there are shm_fence, shm_sentinel, shm_two_sided"):
        plots.crossings_of(scene, "shm_fence", "gloo")
    with pytest.raises(InputError, match="no backend is named; there are"):
        plots.crossings_of(scene)
