"""The report as a reader sees it: opened in a real browser, every figure loaded and nothing wider than the window."""

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from report_runs import make_run, points  # type: ignore[import-not-found]

from epcross.harness.analysis import material
from epcross.harness.analysis.figures import canvas
from epcross.harness.record import Record
from epcross.harness.report import content, page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars",
)  # fmt: skip

LOOK = """<script>addEventListener("load", () => {
  const seen = {
    images: [...document.images].map(image => [image.complete, image.naturalWidth, image.clientWidth]),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    fetched: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !/^data:/.test(name)),
    broken: [...document.querySelectorAll("nav a")].filter(link => !document.querySelector(link.hash)).length,
  };
  document.body.setAttribute("data-seen", JSON.stringify(seen));
});</script>"""

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium to open the page (Debian: apt install chromium)"
)


def browse(url: str, profile: Path, *flags: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def change(row: Record) -> Record:
        return replace(row, flags="oversubscribed within_launch") if row.ep_size == 4 else row

    folder = tmp_path_factory.mktemp("page")
    run = make_run(folder / "runs", points(ep_sizes=(2, 4)), change)
    document = content.document(material.load([run]))
    path = folder / "report.html"
    path.write_text(page.to_html(document, {figure.name: canvas.svg(figure) for figure in document.figures}))
    return path


@pytest.mark.parametrize("width", [1200, 500])
def test_all_figures_load_and_the_page_fits_its_window(report: Path, tmp_path: Path, width: int) -> None:
    text = report.read_text()
    # the page forbids scripts, so one is let into a copy to look around
    copy = tmp_path / "copy.html"
    copy.write_text(re.sub(r"<meta http-equiv[^>]*>", LOOK, text))
    assert copy.read_text() != text
    dom = browse(copy.as_uri(), tmp_path / "profile", "--dump-dom", f"--window-size={width},2000")
    found = re.search(r'data-seen="([^"]*)"', dom)
    assert found, dom[-2000:]
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert len(seen["images"]) == 9
    for complete, natural, shown in seen["images"]:
        assert complete
        assert natural > 200
        assert 200 < shown <= width
    assert (seen["wide"], seen["fetched"], seen["broken"]) == (0, [], 0)


def test_the_page_itself_is_painted_with_its_colours(report: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(report.as_uri(), tmp_path / "profile", f"--screenshot={picture}", "--window-size=1100,9000")
    pixels = np.asarray(Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")).reshape(-1, 3)
    assert len(pixels) == 1100 * 9000
    for color in ("0072B2", "D55E00", "999999"):  # SHM Fence, SHM Sentinel, SHM two-sided
        wanted = np.array([int(color[i : i + 2], 16) for i in (0, 2, 4)])
        assert int((np.abs(pixels.astype(int) - wanted).max(axis=1) <= 2).sum()) > 500, color
