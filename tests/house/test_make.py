"""`make` on machines that lack something: one sentence with the next step, and nothing left half made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("awk", "bash", "cat", "cut", "head", "make", "rm", "sh", "sha256sum", "touch")
SUITABLE = "3.12"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout and, in `bin`, the only commands on PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (commands / tool).symlink_to(found)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    return tmp_path


def make(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(machine / "bin")}
    command = [str(machine / "bin" / "make"), *arguments]
    return subprocess.run(command, cwd=machine, env=env, capture_output=True, text=True, timeout=60, check=False)


def add_python(
    machine: Path, name: str, *, version: str = SUITABLE, ensurepip: bool = True, starts: bool = True
) -> Path:
    """A command that answers the Makefile's questions as such a Python would, and makes an empty venv."""
    code = "\n".join(
        [
            "#!/bin/sh",
            "exit 127" if not starts else "",
            f'[ "$1" = -V ] && {{ echo Python {version}; exit; }}',
            'case "$*" in',
            f"*ensurepip*) exit {int(version != SUITABLE or not ensurepip)};;",
            f"*version_info*) exit {int(version != SUITABLE)};;",
            f"*sys.version*) echo {version} {name};;",
            '"-m venv "*) echo "$0" >made-with;;',
            "esac",
        ]
    )
    path = machine / "bin" / name
    path.write_text(code)
    path.chmod(0o755)
    return path


def variable(machine: Path, name: str) -> str:
    shown = make(machine, "--eval", f"show: ; @echo $({name})", "show")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.strip()


def test_without_a_suitable_python(machine: Path) -> None:
    add_python(machine, "python3", version="3.9")
    ran = make(machine, "quickstart")
    assert ran.returncode != 0
    assert "No Python 3.11, 3.12 or 3.13 on PATH" in ran.stderr
    assert "make PYTHON=/path/to/python3" in ran.stderr


def test_without_venv_modules(machine: Path) -> None:
    add_python(machine, "python3.12", ensurepip=False)
    ran = make(machine, "setup")
    assert ran.returncode != 0
    assert "Python 3.12 has no venv or ensurepip module" in ran.stderr
    assert "apt install python3-venv" in ran.stderr
    assert not (machine / ".venv").exists()


def test_an_interpreter_that_was_named_and_cannot_serve(machine: Path) -> None:
    add_python(machine, "python3.12")
    add_python(machine, "old", version="3.9")
    ran = make(machine, "setup", "PYTHON=old")
    assert ran.returncode != 0
    assert "PYTHON=old does not start, is not Python 3.11 to 3.13" in ran.stderr
    assert not (machine / "made-with").exists()


def test_the_newest_that_starts_is_chosen(machine: Path) -> None:
    add_python(machine, "python3.13", starts=False)
    chosen = add_python(machine, "python3.12")
    add_python(machine, "python3.11")
    make(machine, ".venv/bin/python")
    assert (machine / "made-with").read_text().strip() == str(chosen)


def test_another_interpreter_makes_the_venv_anew_and_the_same_one_does_not(machine: Path) -> None:
    add_python(machine, "python3.12")
    other = add_python(machine, "python3.11")
    python = machine / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(machine / "bin" / "python3.12", python)
    make(machine, ".venv/bin/python", "PYTHON=python3.12")
    assert not (machine / "made-with").exists()
    make(machine, ".venv/bin/python", "PYTHON=python3.11")
    assert (machine / "made-with").read_text().strip() == str(other)


def test_when_the_kernels_cannot_be_built_it_says_what_still_works(machine: Path) -> None:
    python = machine / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no compiler >&2\nexit 1\n")
    python.chmod(0o755)
    (machine / variable(machine, "CORE")).touch()
    ran = make(machine, "quickstart")
    assert ran.returncode != 0
    assert "no compiler" in ran.stderr
    assert "What works without these kernels: .venv/bin/epcross plan sweep=quickstart" in ran.stderr


def test_an_edited_lock_installs_again(machine: Path) -> None:
    before = variable(machine, "CORE")
    assert variable(machine, "CORE") == before
    with (machine / "locks" / "core.lock").open("a") as lock:
        lock.write("# edited\n")
    assert variable(machine, "CORE") != before


def test_help_lists_every_target(machine: Path) -> None:
    listed = {line.split()[1] for line in make(machine).stdout.splitlines()}
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY: help"))
    assert listed == set(phony.split()[1:])


def test_every_locked_package_has_a_hash() -> None:
    for lock in (ROOT / "locks").glob("*.lock"):
        entries = [entry for entry in lock.read_text().split("\n") if entry and not entry.startswith((" ", "#"))]
        assert entries, lock
        assert all("==" in entry and entry.endswith("\\") for entry in entries), lock
        large = {entry.split("==")[0] for entry in entries if entry.startswith(("torch==", "nvidia-"))}
        assert large == ({"nvidia-cuda-nvrtc"} if lock.name == "nvrtc.lock" else set()), f"torch stays out of {lock}"


@pytest.mark.parametrize(("ci", "code", "outcome"), [("", 0, "2 skipped"), ("true", 1, "1 failed, 1 skipped")])
def test_a_skip_in_ci_is_a_failure_unless_a_gpu_is_missing(tmp_path: Path, ci: str, code: int, outcome: str) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_left_out.py").write_text(
        "import pytest\n"
        "def test_a(): pytest.skip('no such library')\n"
        "def test_b(): pytest.skip('needs a GPU')\n"
        "@pytest.mark.xfail(strict=True)\n"
        "def test_c(): assert False\n"
    )
    env = {**os.environ, "CI": ci}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, outcome in ran.stdout) == (code, True), ran.stdout
