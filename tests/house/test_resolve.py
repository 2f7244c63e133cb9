"""What a user of GPUs installs resolves with pip where no GPU is: metadata is asked for, nothing installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)] + ["manylinux2014_x86_64"]


def resolve(target: Path, *words: str) -> str:
    """What pip would install for x86-64 and Python 3.12, without installing it."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "--no-input"),
            *("--only-binary", ":all:", "--python-version", "3.12", "--target", str(target), *platforms, *words),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def resolve_lock(name: str, target: Path) -> str:
    """Every file of a lock is there with its hash. Its versions were chosen for Python 3.12, which older pips that run
    under another Python would not take into account."""
    lock = ROOT / "locks" / "envs" / f"{name}.x86_64.lock"
    return resolve(target, "--no-deps", "--ignore-requires-python", "--require-hashes", "-r", str(lock))


def test_the_lock_of_an_environment_resolves_with_its_hashes(tmp_path: Path) -> None:
    report = resolve_lock("deepep_v2", tmp_path)
    assert '"name": "tokenspeed-deepep"' in report
    assert "nvidia_nccl_cu13-2.30.7" in report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepep_v1", "nccl_ep"])
def test_the_other_locks_too(name: str, tmp_path: Path) -> None:
    resolve_lock(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "brings"), [("gpu", "cuda-core"), ("flashinfer", "flashinfer-python")])
def test_an_extra_resolves(extra: str, brings: str, tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def of(name: str) -> list[str]:
        own = [word for word in extras[name] if not word.startswith("epcross[")]
        return own + [word for parent in extras[name] if parent.startswith("epcross[") for word in of(parent[8:-1])]

    assert f'"name": "{brings}"' in resolve(tmp_path, *of(extra), "torch==2.11.0").lower()
