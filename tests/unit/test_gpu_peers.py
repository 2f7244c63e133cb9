"""Vendors' libraries from a folder: unpacked, and found by the commands that stand where `make env-NAME` puts them."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import peers


def pack(archive: Path, *names: str) -> None:
    source = archive.parent / "source"
    with tarfile.open(archive, "w:xz") as opened:
        for name in names:
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("FOUND = __file__\n")
            opened.add(path, arcname=name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    given = tmp_path / "given"
    given.mkdir()
    pack(given / "flashinfer-0.7.4-sm90.tar.xz", "fi/flashinfer_here.py")
    pack(given / "deepep-2.1.0.tar.xz", "deepep/v2_wheel/both.py", "deepep/ncclep/nccl_here.py", "deepep/ncclsite/a.py")
    with zipfile.ZipFile(given / "tokenspeed_deepep-1.2.1.post1-cp312.whl", "w") as wheel:
        wheel.writestr("both.py", "FOUND = __file__\n")
    return given


def test_each_environment_finds_its_own_library(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/found/before")
    scratch, envs = tmp_path / "scratch", tmp_path / "envs"
    own = peers.prepare(folder, scratch, envs)
    assert own["PYTHONPATH"] == f"{scratch / 'fi'}:/found/before"
    assert own["NCCL_NVLS_ENABLE"] == "0"
    ask = "import both, os, sys; print(both.FOUND, os.environ.get('EP_NCCL_ROOT_DIR'), sys.argv[1], os.environ['KEPT'])"
    environment = {"PATH": os.environ["PATH"], "KEPT": "yes", "PYTHONPATH": str(tmp_path / "kept")}
    for name, imports, nccl in (
        ("deepep_v1", scratch / "deepep_v1", "None"),
        ("deepep_v2", scratch / "deepep" / "v2_wheel", str(scratch / "deepep" / "ncclsite" / "nvidia" / "nccl")),
    ):
        ran = subprocess.run(
            [envs / name / "bin" / "python", "-P", "-c", ask, "an argument"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ran.stdout == f"{imports / 'both.py'} {nccl} an argument yes\n"
    script = (envs / "nccl_ep" / "bin" / "python").read_text()
    assert "LD_PRELOAD" in script
    assert "v2_wheel" not in script


def test_an_empty_folder_makes_nothing(tmp_path: Path) -> None:
    assert peers.prepare(tmp_path, tmp_path / "scratch", tmp_path / "envs").keys() >= peers.SHARED_HOST.keys()
    assert not (tmp_path / "envs").exists()


def test_deepgemm_is_found_where_layers_run_and_its_fused_layers_in_an_environment_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name, module in (
        ("tokenspeed_deepgemm-2.5.0-cp312.whl", "deep_gemm.py"),
        ("sgl_deep_gemm-0.1.5-py3.whl", "deep_gemm.py"),
        ("apache_tvm_ffi-0.1.11-cp312.whl", "tvm_ffi.py"),
    ):
        with zipfile.ZipFile(folder / name, "w") as wheel:
            wheel.writestr(module, "FOUND = __file__\n")
    scratch, envs = tmp_path / "scratch", tmp_path / "envs"
    own = peers.prepare(folder, scratch, envs)
    assert own["PYTHONPATH"] == f"{scratch / 'fi'}:{scratch / 'gemm'}"
    for name, found in (("deepep_v1", "gemm"), ("deepep_v2", "gemm"), ("deepgemm", "mega")):
        ran = subprocess.run(
            [envs / name / "bin" / "python", "-P", "-c", "import deep_gemm; print(deep_gemm.FOUND)"],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ran.stdout == f"{scratch / found / 'deep_gemm.py'}\n"


def test_what_is_unpacked_stays_with_all_that_was_compiled_from_it(folder: Path, tmp_path: Path) -> None:
    """A second call on a machine must find what the first one compiled, by the same paths; other archives are new."""
    scratch, envs = tmp_path / "scratch", tmp_path / "envs"
    peers.prepare(folder, scratch, envs)
    compiled, library = scratch / "deepep_jit" / "kernel", scratch / "fi" / "flashinfer_here.py"
    compiled.parent.mkdir()
    compiled.write_text("compiled")
    library.write_text("as it was left")
    assert peers.prepare(folder, scratch, envs)["FLASHINFER_WORKSPACE_BASE"] == str(scratch / "flashinfer")
    assert (compiled.read_text(), library.read_text()) == ("compiled", "as it was left")
    pack(folder / "flashinfer-0.7.5-sm90.tar.xz", "fi/another.py")
    peers.prepare(folder, scratch, envs)
    assert library.read_text() == "as it was left"
    assert (scratch / "fi" / "another.py").exists()


def test_archives_that_come_one_after_another_are_found_together(folder: Path, tmp_path: Path) -> None:
    """They may be too large to travel at once; and none of them is unpacked again, which takes half a minute."""
    scratch, envs, later = tmp_path / "scratch", tmp_path / "envs", tmp_path / "later"
    later.mkdir()
    flashinfer = folder / "flashinfer-0.7.4-sm90.tar.xz"
    flashinfer.rename(later / flashinfer.name)
    peers.prepare(folder, scratch, envs)
    library = scratch / "deepep" / "v2_wheel" / "both.py"
    library.write_text("as it was left")
    own = peers.prepare(later, scratch, envs)
    assert own["PYTHONPATH"].split(os.pathsep)[0] == str(scratch / "fi")
    assert str(scratch / "deepep" / "v2_wheel") in (envs / "deepep_v2" / "bin" / "python").read_text()
    for given in (folder, later, tmp_path / "gone"):
        assert peers.prepare(given, scratch, envs).keys() == own.keys()
    assert library.read_text() == "as it was left"
