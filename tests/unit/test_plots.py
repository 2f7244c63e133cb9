import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import report_runs
import yaml
from report_runs import FIXED_US, TOKENS, make_run, model_us, points

from epcross.harness.analysis import material, plots
from epcross.harness.analysis.figures import canvas, crossover_map, skew
from epcross.harness.analysis.figures.canvas import Canvas, Figure, NotDrawn, Omitted
from epcross.harness.analysis.figures.scene import Scene
from epcross.harness.analysis.levels import levels
from epcross.harness.analysis.looks import UNKNOWN_COLOR, looks
from epcross.harness.analysis.style import theme
from epcross.harness.errors import InputError
from epcross.harness.record import Record
from epcross.harness.terms import Phase, Regime, Status

ROOT = Path(__file__).parents[2]

# Severe deuteranopia and protanopia in linear RGB.
# Source: Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009).
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]


CPU = ("shm_", "gloo")
LAYERS = ("layer_", "megamoe")


def lab(color: str, sight: list[list[float]] | None = None) -> np.ndarray:
    """CIELAB (D65) of a colour as somebody with this sight sees it."""
    srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    if sight is not None:
        linear = np.clip(np.array(sight) @ linear, 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = np.array(to_xyz) @ linear / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def scene_of(*runs: Path) -> Scene:
    (scene,) = plots.scenes(material.load(list(runs)))
    return scene


def figures_of(scene: Scene) -> dict[str, Figure | Omitted]:
    return {figure.name: figure for figure in plots.draw(scene)}


def figure(found: dict[str, Figure | Omitted], name: str) -> Figure:
    one = found[name]
    assert isinstance(one, Figure), one
    return one


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, dict[str, Figure | Omitted]]:
    """All figures of a run with three backends at EP 2, and EP 4 oversubscribed."""

    def change(row: Record) -> Record:
        return replace(row, flags="oversubscribed within_launch") if row.ep_size == 4 else row

    scene = scene_of(make_run(tmp_path_factory.mktemp("usual"), points(ep_sizes=(2, 4)), change))
    return scene, figures_of(scene)


@pytest.mark.parametrize("sight", [None, DEUTERANOPIA, PROTANOPIA], ids=["usual", "deuteranopia", "protanopia"])
def test_colours_of_the_backends_are_told_apart_by_everyone(sight: list[list[float]] | None):
    """Of those that may stand in one figure: a figure is about one phase, and so about exchanges or about layers."""
    colors = {
        path.stem: yaml.safe_load(path.read_text())["color"] for path in (ROOT / "conf" / "backend").glob("*.yaml")
    }
    layers = {name for name in colors if name.startswith(("layer_", "megamoe"))}
    together = [colors.keys() - layers - {"experts_only"}, layers]
    assert all(len(names) >= 4 for names in together)
    distance = {
        (a, b): float(np.linalg.norm(lab(colors[a], sight) - lab(colors[b], sight)))
        for names in together
        for a, b in itertools.combinations(sorted(names), 2)
    }
    assert {
        pair: value for pair, value in distance.items() if value < 20
    } == {}  # about ten just noticeable differences


def test_each_backend_has_a_marker_of_its_own_among_those_in_a_figure() -> None:
    """A figure is about exchanges of one domain, or about layers."""
    groups: dict[str, list[str]] = {}
    for path in (ROOT / "conf" / "backend").glob("*.yaml"):
        group = "cpu" if path.stem.startswith(CPU) else "layers" if path.stem.startswith(LAYERS) else "gpu"
        if path.stem != "experts_only":
            groups.setdefault(group, []).append(yaml.safe_load(path.read_text())["marker"])
    assert {group: len(markers) for group, markers in groups.items()} == {"cpu": 4, "layers": 10, "gpu": 14}
    assert all(len(set(markers)) == len(markers) for markers in groups.values())


@pytest.mark.parametrize("name", ["deepep_normal", "nccl_ep_ht", "shm_fence"])
def test_a_backend_looks_the_same_beside_whatever_others(name: str) -> None:
    few, many = ({(name, ""), *((other, "") for other in others)} for others in ((), ("ag_rs", "gloo", "nccl_ep")))
    assert looks(few, {})[name, ""] == looks(many, {})[name, ""]


def test_variants_and_others_are_told_apart() -> None:
    found = looks(
        [("ag_rs", ""), ("deepep_v2", "a=1"), ("deepep_v2", "a=2"), ("mine", ""), ("yours", "")], {"mine": "#123456"}
    )
    assert len({look.marker for look in found.values()}) == 5
    assert found["deepep_v2", "a=1"].color == found["deepep_v2", "a=2"].color
    assert found["deepep_v2", "a=1"] == looks([("deepep_v2", "")], {"deepep_v2": "#ffffff"})["deepep_v2", ""]
    assert (found["mine", ""].color, found["yours", ""].color) == ("#123456", UNKNOWN_COLOR)


def test_the_simulated_sight_confuses_what_it_should():
    red, green = "#c04040", "#707020"  # the usual confusion: told apart by most, hardly by a deuteranope
    usual, deutan = (float(np.linalg.norm(lab(red, s) - lab(green, s))) for s in (None, DEUTERANOPIA))
    assert deutan < usual / 2


def test_series_differ_in_more_than_colour(usual):
    scene, _ = usual
    looks = {(style.marker, style.line) for style in scene.styles.values()}
    assert len(looks) == len({style.label for style in scene.styles.values()}) == len(FIXED_US)
    assert {style.label for style in scene.styles.values()} == {"SHM Fence", "SHM Sentinel", "SHM two-sided"}
    assert (
        len({style.marker for style in scene.styles.values()})
        == len({style.line for style in scene.styles.values()})
        == 3
    )


def test_every_figure_is_drawn_and_shows_exactly_the_series_of_its_data(usual):
    _, found = usual
    assert list(found) == [
        "latency", "ratio", "crossover_map", "crossings", "phases", "bandwidth", "skew", "variance", "latency_flagged",
    ]  # fmt: skip
    for one in found.values():
        assert isinstance(one, Figure), one
        assert canvas.drawn(one.drawing) == {f"{entry['panel']}|{entry['key']}" for entry in one.data}
        assert len(one.data) > 0


def test_a_series_that_is_not_drawn_is_an_error():
    with theme():
        drawing = Canvas(["one"])
        with pytest.raises(NotDrawn, match=r"x: not drawn: \['one\|gloo'\]"):
            drawing.finish(name="x", title="X", caption=[], data=[{"panel": "one", "key": "gloo"}])
        drawing.mark("one", "gloo", drawing.panels["one"].axhline(1.0))
        with pytest.raises(NotDrawn, match=r"drawn without data: \['one\|gloo'\]"):
            drawing.finish(name="x", title="X", caption=[], data=[])


def test_latency_lines_are_the_medians(usual):
    _, found = usual
    one = figure(found, "latency")
    panels = {ax.get_title(): ax for ax in one.drawing.axes}
    assert list(panels) == ["EP 2, steady", "EP 2, entry"]  # EP 4 is flagged
    for ax in panels.values():
        lines = {str(line.get_gid()).split("|")[1].split("@")[0]: line for line in ax.lines if line.get_gid()}
        assert lines.keys() == FIXED_US.keys()
        for backend, line in lines.items():
            assert list(np.asarray(line.get_xdata())) == list(TOKENS)
            middle = [model_us(backend, tokens) * 1.035 for tokens in TOKENS]  # of 1.00, 1.01, ... 1.07
            assert np.asarray(line.get_ydata()) == pytest.approx(middle)
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert ax.get_xlabel() == "tokens per rank"
    assert panels["EP 2, steady"].get_ylabel() == "round trip (us)"
    entry = next(entry for entry in one.data if entry["series"] == "shm_fence" and entry["tokens_per_rank"] == 4)
    assert (entry["lowest_us"], entry["highest_us"], entry["trials"]) == (pytest.approx(14), pytest.approx(14.98), 8)


def test_the_floor_is_two_flags_and_the_wire_bytes_copied(usual):
    scene, found = usual
    ax = figure(found, "latency").drawing.axes[0]
    (floor,) = [line for line in ax.lines if line.get_linestyle() == ":"]
    row = next(row for row in scene.material.records if row.tokens_per_rank == 64)
    moved = 2 * 64 * (row.padded_bytes + row.combine_row_bytes)
    assert moved > 0
    assert np.asarray(floor.get_ydata())[-1] == pytest.approx(2 * 0.1 + moved / 20.0 / 1e3)


def test_captions_say_how_where_and_how_often(usual):
    scene, found = usual
    for name, one in found.items():
        assert isinstance(one, Figure)
        text = "\n".join(one.caption)
        assert "n = 8 repeats (2 launches x 2 seeds x 2 chains)" in text, name
        assert "median over ranks of the chain period" in text, name
        assert "domain cpu; run " + scene.material.runs[0].run_id in text, name
        assert "inside the window: transfer" in text, name
        assert "within_launch: fewer than 5 launches" in text, name


def test_captions_count_the_repeats_that_are_drawn(tmp_path):
    """At 4 tokens a repeat is flagged, at 16 the dispatch of two, and at 64 all of the peers of Fence."""

    def change(row: Record) -> Record:
        one = row.tokens_per_rank == 4 and row.repeat == 0
        two = row.tokens_per_rank == 16 and row.repeat < 2 and row.phase == Phase.DISPATCH
        all_others = row.tokens_per_rank == 64 and row.backend != "shm_fence"
        few = row.tokens_per_rank == 64 and row.repeat > 2
        return replace(row, flags="not_alone within_launch") if one or two or all_others or few else row

    scene = scene_of(make_run(tmp_path, change=change))
    found = figures_of(scene)

    def n(name: str) -> str:
        (line,) = [line for line in figure(found, name).caption if line.startswith("n = ")]
        return line

    assert n("latency") == "n = 3 to 8 repeats (1 to 2 launches x 2 seeds x 2 chains)"
    assert n("variance") == n("skew") == n("bandwidth") == n("latency")
    assert n("phases").startswith("n = 3 to 8 repeats (")
    for name in ("ratio", "crossover_map", "crossings"):  # 64 tokens are in none
        assert n(name) == "n = 7 to 8 repeats (2 launches x 2 seeds x 2 chains)", name
    assert n("latency_flagged").startswith("n = 8 repeats (")


def test_shares_of_phases_count_the_repeats_that_have_both(tmp_path):
    def change(row: Record) -> Record:
        return replace(row, flags="not_alone") if row.phase == Phase.DISPATCH and row.repeat < 3 else row

    found = figures_of(scene_of(make_run(tmp_path, points(regimes=(Regime.ENTRY,)), change)))
    assert "n = 5 repeats (2 launches x 2 seeds x 2 chains)" in figure(found, "phases").caption
    assert "n = 8 repeats (2 launches x 2 seeds x 2 chains)" in figure(found, "latency").caption


def test_skew_counts_the_repeats_that_have_samples(tmp_path):
    scene = scene_of(make_run(tmp_path, points(regimes=(Regime.ENTRY,))))
    samples = scene.material.samples
    fewer = replace(scene, material=replace(scene.material, samples=samples[samples["repeat"] > 1]))
    assert "n = 6 repeats (2 launches x 2 seeds x 2 chains)" in figure(figures_of(fewer), "skew").caption


def test_flagged_points_stand_apart_from_every_headline(usual):
    _, found = usual
    for name, one in found.items():
        assert isinstance(one, Figure)
        sizes = {entry["ep_size"] for entry in one.data}
        assert sizes == ({4} if name == "latency_flagged" else {2}), name
        if name != "latency_flagged":
            assert "left out: 24 of 48 points whose every row is flagged oversubscribed" in one.caption, name
    flagged = figure(found, "latency_flagged")
    assert flagged.caption[0].startswith("every row here is flagged oversubscribed")
    assert all(ax.get_title().endswith("oversubscribed: no headline") for ax in flagged.drawing.axes)


def test_ratios_are_to_the_fastest_of_the_others(usual):
    _, found = usual
    steady = [entry for entry in figure(found, "ratio").data if entry["panel"] == "EP 2, steady"]
    assert len(steady) == 3 * len(TOKENS)
    for entry in steady:
        others = [backend for backend in FIXED_US if backend != entry["series"]]
        peer = min(others, key=lambda backend: model_us(backend, entry["tokens_per_rank"]))
        expected = model_us(entry["series"], entry["tokens_per_rank"]) / model_us(peer, entry["tokens_per_rank"])
        assert entry["best_peer"] == peer
        assert entry["ratio"] == pytest.approx(expected)
        assert entry["low"] <= entry["ratio"] <= entry["high"]
        # launches are drawn together; two of them widen an interval more than twelvefold
        assert entry["high"] / entry["low"] < 1.4


def test_the_map_names_the_fastest_and_its_lead(usual):
    scene, found = usual
    places = {
        (entry["panel"], entry["tokens_per_rank"]): (entry["series"], entry["second"], entry["lead"])
        for entry in figure(found, "crossover_map").data
    }
    assert len(places) == 2 * len(TOKENS)
    assert places["steady", 1][:2] == ("shm_sentinel", "shm_fence")
    assert places["steady", 1][2] == pytest.approx(11 / 6 - 1)
    assert places["steady", 64][:2] == ("shm_fence", "shm_sentinel")
    assert places["steady", 64][2] == pytest.approx(132 / 74 - 1)
    winners = crossover_map.winners(scene.cells)
    assert not any(winner.clear for winner in winners)  # two launches tell nothing
    assert all(winner.objection.startswith("2 launches are fewer than") for winner in winners)


def test_the_map_calls_a_win_clear_from_three_launches_on(tmp_path, monkeypatch):
    monkeypatch.setattr(report_runs, "TIMING", replace(report_runs.TIMING, launches=3))
    scene = scene_of(make_run(tmp_path))
    winners = crossover_map.winners(scene.cells)
    assert all(winner.clear and not winner.objection for winner in winners)


def test_a_lead_within_the_margin_is_no_win(tmp_path: Path):
    def change(row: Record) -> Record:
        value = 100.0 * (1.02 if row.backend == "shm_fence" else 1.0)
        return replace(row, latency_us=value, latency_min_us=value, latency_max_us=value)

    scene = scene_of(make_run(tmp_path, points(("shm_fence", "shm_sentinel"), (Regime.STEADY,)), change))
    found = crossover_map.winners(scene.cells)
    assert [winner.cell.series.backend for winner in found] == ["shm_sentinel"] * len(TOKENS)
    assert [winner.lead for winner in found] == pytest.approx([0.02] * len(TOKENS))
    assert not any(winner.clear for winner in found)


def test_phases_share_the_round_trip(usual):
    _, found = usual
    shares = {(e["series"], e["tokens_per_rank"], e["phase"]): e["share_percent"] for e in figure(found, "phases").data}
    assert len(shares) == 3 * len(TOKENS) * 3
    for (_, _, phase), share in shares.items():
        assert share == pytest.approx({"dispatch": 40, "combine": 50, "rest": 10}[phase])


def test_bandwidth_is_that_of_the_named_view(usual):
    scene, found = usual
    row = next(row for row in scene.material.records if row.ep_size == 2)
    for entry in figure(found, "bandwidth").data:
        moved = 2 * entry["tokens_per_rank"] * (row.padded_bytes + row.combine_row_bytes)
        gbps = moved / (model_us(entry["series"], entry["tokens_per_rank"]) * 1.035) / 1e3
        assert (entry["view"], entry["wire_bytes"]) == ("wire_bytes", moved)
        assert entry["wire_gbps"] == pytest.approx(gbps)
        assert entry["percent_of_floor"] == pytest.approx(100 * gbps / 20.0)


def test_skew_is_the_slowest_over_the_fastest_rank_of_each_iteration():
    lines = [("r", "p", "round_trip", 0, rank, i, value) for rank, values in enumerate([[10, 20, 10], [11, 10, 10]])
             for i, value in enumerate(values)]  # fmt: skip
    lines += [("r", "p", "dispatch", 0, 0, 0, 1.0), ("r", "p", "dispatch", 0, 1, 0, 9.0)]
    columns = ["run_id", "point_id", "phase", "repeat", "rank", "iteration", "value_us"]
    spread = skew.rank_spread(pd.DataFrame(lines, columns=columns))
    assert spread == {("r", "p", 0): pytest.approx(10.0)}  # of 10 %, 100 % and 0 %
    assert skew.rank_spread(pd.DataFrame([], columns=columns)) == {}


def test_levels_of_variance_are_those_of_the_simulation():
    rng = np.random.default_rng(7)
    sums = np.zeros(3)
    for _ in range(60):
        launch, seed, chain = rng.normal(0, 0.20, 8), rng.normal(0, 0.10, (8, 4)), rng.normal(0, 0.05, (8, 4, 5))
        found = levels(
            {(i, j, k): float(np.exp(3 + launch[i] + seed[i, j] + chain[i, j, k]))
             for i in range(8) for j in range(4) for k in range(5)}
        )  # fmt: skip
        sums += [found.launch or 0, found.seed or 0, found.chain or 0]
    assert np.sqrt(sums / 60) == pytest.approx([0.20, 0.10, 0.05], rel=0.08)


def test_levels_that_cannot_be_told_apart_are_absent():
    one_seed = levels({(0, 0, 0): 1.0, (0, 0, 1): np.e, (1, 0, 0): 1.0, (1, 0, 1): np.e})
    assert (one_seed.launch, one_seed.seed) == (0.0, None)
    assert one_seed.chain == pytest.approx(0.5)  # variance of 0 and 1
    assert one_seed.shares() == {"launch": 0.0, "chain": pytest.approx(100.0)}
    alone = levels({(0, 0, 0): 5.0})
    assert (alone.launch, alone.seed, alone.chain, alone.shares()) == (None, None, None, {})


def drop_ok(row: Record) -> Record:
    gone = {"latency_us": None, "latency_min_us": None, "latency_max_us": None, "estimator": None, "n_samples": 0}
    return replace(row, status=Status.TIMEOUT, reason="rank 1 did not answer", **gone)


@pytest.mark.parametrize(
    ("name", "backends", "regimes", "floor", "change", "reason"),
    [
        ("phases", ["shm_fence"], [Regime.STEADY], True, None, "regime entry"),
        ("ratio", ["shm_fence"], [Regime.STEADY], True, None, "two series of one run"),
        ("crossover_map", ["shm_fence"], [Regime.STEADY], True, None, "two series of one run"),
        ("bandwidth", ["shm_fence"], [Regime.STEADY], False, None, "no run measured a floor"),
        ("latency_flagged", ["shm_fence"], [Regime.STEADY], True, None, "no point has flagged rows only"),
        ("latency", ["shm_fence"], [Regime.STEADY], True, drop_ok, "no round trip is ok and without flags"),
        ("skew", ["shm_fence"], [Regime.STEADY], True, drop_ok, "no samples of two ranks or more"),
        ("variance", ["shm_fence"], [Regime.STEADY], True, drop_ok, "several repeats"),
    ],
)
def test_a_figure_without_data_is_left_out_with_a_reason(
    tmp_path: Path, name: str, backends: list[str], regimes: list[Regime], floor: bool,
    change: Callable[[Record], Record] | None, reason: str,
):  # fmt: skip
    found = figures_of(scene_of(make_run(tmp_path, points(backends, regimes, tokens=(1, 4)), change, floor=floor)))
    one = found[name]
    assert isinstance(one, Omitted)
    assert reason in one.reason


def test_forms_of_one_backend_are_series_of_their_own(tmp_path: Path):
    plain = points(["shm_fence"], [Regime.STEADY], tokens=(1, 4))
    tuned = [replace(point, options=(("slots", 2),)) for point in plain]
    roomy = [replace(point, options=(("slots", 1),), max_tokens_per_rank=n) for point in plain for n in (8, 16)]
    scene = scene_of(make_run(tmp_path, [*tuned, *roomy]))
    one = figure(figures_of(scene), "latency")
    names = {entry["series"] for entry in one.data}
    assert names == {"shm_fence slots=2", "shm_fence slots=1 load 1", "shm_fence slots=1 load 2"}
    assert len(one.data) == 6


def test_two_runs_share_a_figure_and_are_never_divided_by_each_other(tmp_path: Path):
    slow = make_run(tmp_path, points(tokens=(1, 64)), lambda row: replace(row, latency_us=row.latency_max_us))
    fast = make_run(tmp_path, points(tokens=(1, 64)))
    scene = scene_of(slow, fast)
    found = figures_of(scene)
    assert len({entry["key"] for entry in figure(found, "latency").data}) == 2 * len(FIXED_US)
    for entry in figure(found, "ratio").data:
        assert entry["panel"].endswith(", run A" if entry["run_id"] == slow.name else ", run B")
    assert {style.fill for style in scene.styles.values()} == {"full", "none"}
    assert {style.label for style in scene.styles.values()} >= {"SHM Fence (A)", "SHM Fence (B)"}


def test_the_same_data_give_the_same_bytes(tmp_path: Path):
    run = make_run(tmp_path, points(["shm_fence"], [Regime.STEADY], tokens=(1, 4)))
    one, two = (figure(figures_of(scene_of(run)), "latency") for _ in range(2))
    assert canvas.svg(one) == canvas.svg(two)
    assert canvas.pdf(one) == canvas.pdf(two)
    assert canvas.png(one).startswith(b"\x89PNG")


def test_a_panel_of_ratios_without_a_point_has_an_axis_around_one() -> None:
    from matplotlib.figure import Figure

    from epcross.harness.analysis.figures.ratio import _ratio_axis

    axis = Figure().subplots()
    assert not _ratio_axis(axis, [], [])
    low, high = axis.get_ylim()
    assert low < 1 < high


@pytest.mark.parametrize("beyond", [1.01, 1.1, 1.25, 1.6, 2.5, 6, 30])
def test_every_axis_of_ratios_can_be_read(beyond: float) -> None:
    from matplotlib.figure import Figure

    from epcross.harness.analysis.figures.ratio import _ratio_axis

    axis = Figure().subplots()
    _ratio_axis(axis, [1 / beyond, beyond], [1 / beyond, beyond])
    ticks = [float(tick) for tick in axis.get_yticks()]
    assert 3 <= len(ticks) <= 9
    assert min(ticks) < 1 < max(ticks)


@pytest.mark.parametrize("series", [2, 13])
def test_a_long_legend_does_not_squeeze_the_panels(series: int) -> None:
    drawing = Canvas(["one"], columns=1)
    (ax,) = drawing.drawing.axes
    for number in range(series):
        drawing.explain(f"a series with a name, {number}", ax.plot([1, 2], [1, 2])[0])
    figure = drawing.finish(name="any", title="Any", caption=[], data=[])
    assert ax.get_position().height * figure.drawing.get_size_inches()[1] > 2


def test_a_figure_that_is_left_out_says_why_when_it_is_saved(tmp_path: Path) -> None:
    omitted = Omitted(name="latency_flagged", title="Flagged", reason="no row is flagged")
    with pytest.raises(InputError, match=r"there is no figure 'latency_flagged', because no row is flagged"):
        omitted.save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
