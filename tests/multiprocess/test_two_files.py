"""CONTRIBUTING.md's baseline in two files: taken from the page as it stands, in the repository and out of it."""

import re
import shutil
from pathlib import Path

import pytest

from _command import epcross
from epcross.harness.running.find_point import runs_in
from epcross.harness.storing.store import open_run, read_units
from epcross.harness.verification.cases import cases

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.beside
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTION = PAGE[PAGE.index("## Add a baseline in two files") : PAGE.index("**On a GPU**")]
FILES = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
IN_REPOSITORY, OUT_OF_TREE = (
    block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
)


def test_the_page_opens_with_two_files() -> None:
    assert PAGE.startswith("# Contributing\n\n## Add a baseline in two files\n")
    assert list(FILES) == [
        "harness/backends/my_kernel.py",
        "conf/backend/my_kernel.yaml",
        "my_folder/backend/my_kernel.yaml",
    ]


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FILES[name])


def follow(lines: list[str], folder: Path, source: Path) -> None:
    """Run each line in `folder`, with the package of `source` in place of .venv's, and look at what it does."""
    assert [line.split()[1] for line in lines] == ["backends", "check", "run"]
    outputs = {}
    for line in lines:
        program, verb, *words = line.split()
        assert program == ".venv/bin/epcross"
        ended = epcross(folder, verb, *words, imports=str(source / "src"))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        outputs[verb] = ended.stdout
    assert re.search(r"my_kernel\s*│ my kernel\s*│ cpu\s*│ yes", outputs["backends"])
    assert f"{len(cases(2))} passed in" in outputs["check"]
    (run,) = runs_in(folder / "results" / "runs")
    rows = [record for unit in read_units(open_run(run))[0] for record in unit.records]
    assert {(row.backend, row.status) for row in rows} == {("my_kernel", "ok")}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a clone of the repository has."""
    clone = tmp_path / "clone"
    for name in ("harness", "kernels", "conf", "sweeps", "src"):
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=skip)
    return clone


def test_in_the_repository(clone: Path) -> None:
    put(clone, "harness/backends/my_kernel.py", "conf/backend/my_kernel.yaml")
    follow(IN_REPOSITORY, clone, clone)


def test_out_of_tree(tmp_path: Path) -> None:
    put(tmp_path, "my_folder/backend/my_kernel.yaml")
    (tmp_path / "my_folder" / "my_kernel.py").write_text(FILES["harness/backends/my_kernel.py"])
    follow(OUT_OF_TREE, tmp_path, ROOT)
