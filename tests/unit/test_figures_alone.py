"""Figures outside a report: of runs and merged folders, one by one, shown and saved."""

import base64
import re
from pathlib import Path

import pytest
from report_runs import make_run, points

from epcross.harness.analysis import material, plots
from epcross.harness.analysis.figures.canvas import Figure, Omitted, svg
from epcross.harness.errors import InputError, StoreError
from epcross.harness.storing.merge import merge

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), points(backends=("shm_fence", "shm_sentinel"), tokens=(1, 4)))


def latency(run: Path) -> Figure:
    (scene,) = plots.load(run)
    figure = plots.figure(scene, "latency")
    assert isinstance(figure, Figure)
    return figure


def test_a_name_that_is_no_figure_is_refused(run: Path) -> None:
    (scene,) = plots.load(str(run))
    with pytest.raises(InputError, match="no figure 'latncy'; there are latency, ratio, crossover_map, crossings, "):
        plots.figure(scene, "latncy")


def test_names_are_those_of_the_figures(run: Path) -> None:
    (scene,) = plots.load(run)
    assert [one.name for one in plots.draw(scene)] == list(plots.FIGURES)


def test_a_notebook_shows_it_with_its_caption(run: Path) -> None:
    figure = latency(run)
    page = figure._repr_html_()
    (image,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert base64.b64decode(image) == svg(figure)
    for words in figure.caption:
        assert words.replace("'", "&#x27;") in page
    omitted = Omitted(name="a", title="A <b>", reason="there are no rows")
    assert omitted._repr_html_() == "<p>A &lt;b&gt;: left out, because there are no rows.</p>"


@pytest.mark.parametrize(("suffix", "begins"), [(".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_it_is_saved_as_its_name_says(run: Path, tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = latency(run).save(tmp_path / f"latency{suffix}")
    assert path.read_bytes().startswith(begins)


def test_another_format_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"latency\.jpg: figures are saved as \.pdf, \.svg, \.png"):
        latency(run).save(tmp_path / "latency.jpg")
    assert list(tmp_path.iterdir()) == []


def test_a_merged_folder_is_its_runs(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path, points(backends=("shm_fence",), tokens=(16,)))
    merge(tmp_path / "merged", [run, other])
    apart = {one.run_id: one for one in material.load([run, other]).runs}
    together = {one.run_id: one for one in material.load([tmp_path / "merged"]).runs}
    assert together.keys() == apart.keys()
    for run_id, one in together.items():
        assert set(one.records) == set(apart[run_id].records)
        assert len(one.records) == len(apart[run_id].records) > 0
        assert (one.missing, one.problems, one.floor) == (0, (), apart[run_id].floor)
        assert one.samples.num_rows == apart[run_id].samples.num_rows
        assert set(one.samples["run_id"].to_pylist()) == {run_id}


def test_the_committed_quickstart_has_its_figures() -> None:
    (committed,) = sorted((ROOT / "results" / "measured").glob("*-quickstart-*"))[-1:]
    (scene,) = plots.load(committed)
    assert {cell.series.run_id for cell in scene.cells} == {committed.name}
    assert isinstance(plots.figure(scene, "latency"), Figure)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run directory: it has no run\.json"):
        plots.load(tmp_path)
