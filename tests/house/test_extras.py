"""Every hint at an optional dependency is one command that works: epcross is on no package index."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from epcross.kernels.extras import Extra

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
READ = ("README.md", "ARTIFACT.md", "CONTRIBUTING.md", "Makefile", "conf", "containers", "docs", "harness", "kernels")
READ += ("notebooks", "results/README.md", "sweeps", "tests")


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of whatever may tell a user what to install."""
    for name in READ:
        place = ROOT / name
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in ("", ".md", ".py", ".yaml") and path.is_file() and path.parent != Path(__file__).parent:
                yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def test_no_hint_takes_epcross_from_an_index() -> None:
    assert [name for name, text in texts() if re.search(r"epcross\[\w+\]", text)] == []


def test_every_extra_that_is_named_is_there() -> None:
    named = {found[1] for _, text in texts() for found in re.finditer(r"""['"]\.\[(\w+)\]['"]""", text)}
    assert {"gpu", "flashinfer"} <= named <= EXTRAS
    assert set(Extra) <= EXTRAS
    for extra in Extra:
        assert extra.install == f"pip install -e '.[{extra}]' in a checkout of epcross"
