"""compute-sanitizer over the one-launch form: out-of-bounds accesses anywhere, races in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch for CUDA and a GPU")

PROGRAM = Path(__file__).with_name("_sanitized.py")
WRONG = 77


@pytest.mark.gpu(1)
@pytest.mark.timeout(560)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("needs a GPU with compute-sanitizer beside it, which comes with the CUDA toolkit")
    # torch's cache would hide what lies just past an allocation
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, f"--error-exitcode={WRONG}", "--kernel-name-exclude", "kns=at::"]
    options += ["--report-api-errors", "no"]  # cuda.bindings asks the driver for functions that older ones lack
    command = [sanitizer, *options, sys.executable, str(PROGRAM)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in ran.stdout or "0 hazards displayed (0 errors, 0 warnings)" in ran.stdout
