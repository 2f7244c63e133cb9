import shutil
import subprocess
from pathlib import Path

import pytest

from epcross.harness.storing import provenance
from epcross.harness.storing.provenance import (
    GitState,
    git_state,
    machine_hash,
    measure_hash,
    measured_sources,
    sources_of,
)

REPO = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("kernels/shm/ring.hpp", "kernels/formats.py", "harness/backends/base.py", *provenance.MEASURED_FILES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}")
    return tmp_path


def hash_of(tree: Path) -> str:
    return measure_hash(tree / "kernels", tree / "harness")


def test_each_measured_source_counts(tree: Path):
    hashes = {hash_of(tree)}
    sources = measured_sources(tree / "kernels", tree / "harness")
    assert list(sources) == sorted(
        ["kernels/shm/ring.hpp", "kernels/formats.py", "harness/backends/base.py", *provenance.MEASURED_FILES]
    )
    for path in sources.values():
        path.write_text(path.read_text() + " ")
        hashes.add(hash_of(tree))
    (tree / "kernels" / "new.cuh").write_text("")
    hashes.add(hash_of(tree))
    (tree / "kernels" / "new.cuh").rename(tree / "kernels" / "other.cuh")
    hashes.add(hash_of(tree))
    assert len(hashes) == len(sources) + 3


def test_what_cannot_change_a_number_does_not_count(tree: Path):
    before = hash_of(tree)
    for name in (
        "harness/cli.py",
        "kernels/README.md",
        "kernels/__pycache__/x.pyc",
        "kernels/shm/_shm.abi3.so",
        "kernels/shm/README.md",
        "kernels/model/README.md",
        "kernels/model/check.py",
        "kernels/model/fence.pml",
        "kernels/model/traces/fault.txt",
    ):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("x")
    assert hash_of(tree) == before


def test_only_the_folder_itself_is_left_out(tree: Path):
    before = hash_of(tree)
    (tree / "kernels" / "model.py").write_text("")
    beside = hash_of(tree)
    (tree / "kernels" / "models").mkdir()
    (tree / "kernels" / "models" / "check.py").write_text("")
    assert len({before, beside, hash_of(tree)}) == 3


def test_the_model_of_this_package_is_left_out():
    sources = measured_sources()
    assert (REPO / "kernels" / "model" / "check.py").is_file()
    assert not any(name.startswith("kernels/model/") for name in sources)
    assert {"kernels/onesided/csrc/send.cuh", "kernels/shm/csrc/sentinel.hpp", "kernels/formats.py"} <= set(sources)


def test_a_file_swallowed_by_the_one_before_it_is_another_hash(tree: Path):
    before = hash_of(tree)
    first, second = tree / "kernels/formats.py", tree / "kernels/shm/ring.hpp"
    first.write_text(first.read_text() + "kernels/shm/ring.hpp" + second.read_text())
    second.unlink()
    assert hash_of(tree) != before


def test_the_module_of_a_backend_of_the_user_counts(tree: Path, tmp_path: Path):
    mine = tmp_path / "mine"
    (mine / "packed" / "csrc").mkdir(parents=True)
    (mine / "alone.py").write_text("a = 1")
    (mine / "notes.py").write_text("no backend")
    (mine / "packed" / "csrc" / "kernel.cu").write_text("// one")
    backends = {
        "alone": {"target": "alone:Alone", "folder": str(mine)},
        "packed": {"target": "packed.backend:Packed", "folder": str(mine)},
        "ours": {"target": "epcross.harness.backends.gloo:Gloo", "folder": ""},
    }

    def hash_now() -> str:
        return measure_hash(tree / "kernels", tree / "harness", besides=sources_of(backends))

    assert list(sources_of(backends)) == ["alone/alone.py", "packed/packed/csrc/kernel.cu"]
    assert sources_of({"ours": backends["ours"]}) == {}
    hashes = {hash_of(tree), hash_now()}
    (mine / "notes.py").write_text("still none")
    assert hash_now() in hashes
    (mine / "alone.py").write_text("a = 2")
    hashes.add(hash_now())
    (mine / "packed" / "csrc" / "kernel.cu").write_text("// two")
    hashes.add(hash_now())
    assert len(hashes) == 4


def test_the_hash_is_the_same_from_a_copy(tmp_path: Path):
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kernels", "harness"):
        shutil.copytree(REPO / name, tmp_path / "site-packages" / "epcross" / name, ignore=ignore)
    installed = tmp_path / "site-packages" / "epcross"
    assert len(measure_hash()) == 64
    assert measure_hash() == measure_hash(installed / "kernels", installed / "harness")


def test_every_listed_file_exists():
    sources = measured_sources()
    assert set(provenance.MEASURED_FILES) <= set(sources)
    assert all(any(name.startswith(folder) for name in sources) for folder in provenance.MEASURED_FOLDERS)


def test_the_machine_hash_depends_on_facts_alone():
    assert machine_hash({"cpu": "a", "cores": 2}) == machine_hash({"cores": 2, "cpu": "a"})
    assert machine_hash({"cpu": "a", "cores": 2}) != machine_hash({"cpu": "a", "cores": 4})
    assert len(machine_hash({})) == 16


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_git_state_follows_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "harness" / "provenance.py"
    file.parent.mkdir()
    file.write_text("a")
    assert git_state(file) == GitState()
    git(tmp_path, "init", "-q")
    assert git_state(file) == GitState()  # inside a repository, not part of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    sha = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "results.txt").write_text("untracked")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert git_state(file) == GitState(sha=sha)
    file.write_text("b")
    assert git_state(file) == GitState(sha=sha, dirty=True)


def test_without_git_the_state_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == GitState()
