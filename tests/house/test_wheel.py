"""The package as a user gets it: built, installed into a clean environment, used from another folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGED = {".py", ".yaml", ".cpp", ".hpp", ".cu", ".cuh", ".csv", ".j2", ".pml"}
FOLDERS = {
    "harness": "harness",
    "kernels": "kernels",
    "conf": "conf",
    "sweeps": "sweeps",
    "reference": "results/reference",
}
"""In the package -> in the checkout."""
ENV = {"PATH": "/usr/bin:/bin"}  # no PYTHONPATH, no HOME

Epcross = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it. Built from a copy: setuptools writes beside the sources."""
    work = tmp_path_factory.mktemp("build")
    copy = work / "source"
    skip = shutil.ignore_patterns(".*", "measured", "runs", "tests", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skip)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(copy)]
    ran = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return work / "dist"


@pytest.fixture(scope="module")
def epcross(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Epcross:
    """The installed command, run from an empty folder."""
    work = tmp_path_factory.mktemp("clean")
    venv = work / "venv"
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], env=ENV, check=True)
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    ran = subprocess.run(install, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    # The dependencies are those of this environment; a plain path in a .pth file runs no other .pth file, so an
    # editable install of epcross in it stays unseen.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()

    def run(*arguments: str, program: str = "epcross") -> subprocess.CompletedProcess[str]:
        command = [str(venv / "bin" / program), *arguments]
        return subprocess.run(command, env=ENV, cwd=elsewhere, capture_output=True, text=True, timeout=240, check=False)

    where = run("-c", "import epcross; print(epcross.__file__)", program="python")
    assert Path(where.stdout.strip()).is_relative_to(site), where
    return run


def expected_files() -> set[str]:
    files = {
        f"epcross/{Path(top) / (Path(folder) / name).relative_to(ROOT / place)}"
        for top, place in FOLDERS.items()
        for folder, _, names in os.walk(ROOT / place, followlinks=True)  # conf may link to sweeps
        for name in names
        if Path(name).suffix in PACKAGED
    }
    return files | {"epcross/__init__.py", "epcross/py.typed", "epcross/claims.yaml"}


def test_the_wheel_is_pure_and_holds_exactly_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(metadata_name).decode()
    assert {name for name in names if ".dist-info/" not in name} == expected_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert any(line.startswith("Requires-Dist: numpy") for line in required)
    assert not any("torch" in line for line in required)


def test_the_sdist_holds_files_and_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    stem = sdist.name.removesuffix(".tar.gz")
    names = {member.name.removeprefix(f"{stem}/") for member in members if member.isfile()}
    assert {f"src/{name}" for name in expected_files()} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(member.issym() or member.islnk() for member in members)


def test_plan_works_from_another_folder(epcross: Epcross) -> None:
    ran = epcross("plan", "sweep=quickstart")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "shm_sentinel" in ran.stdout


def test_backends_lists_every_baseline_from_another_folder(epcross: Epcross) -> None:
    ran = epcross("backends")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for path in (ROOT / "conf" / "backend").glob("*.yaml"):
        assert path.stem in ran.stdout


def test_claims_and_published_values_come_along(epcross: Epcross) -> None:
    ran = epcross("claims", "--json")
    assert ran.returncode == 3, ran.stdout + ran.stderr
    found = {one["id"]: one["verdict"] for one in json.loads(ran.stdout)}
    assert found["P01"] == "not measured"
    assert found["B09"] == "inside"
