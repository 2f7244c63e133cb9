"""Triton's interpreter runs the experts' kernels on the CPU. It is chosen for a process, so it has one of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("torch", reason="torch is not installed")
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: make triton", allow_module_level=True)


@pytest.mark.parametrize("file", ["gather_cases.py", "permute_cases.py"])
def test_kernels_of_experts(file: str, tmp_path: Path) -> None:
    file = f"tests/interpreted/{file}"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
