"""A command that plans stays off the GPU: it lives as long as the run does, beside ranks that are to be alone."""

import subprocess
import sys
from pathlib import Path

SWEEPS = sorted(file.stem for file in (Path(__file__).resolve().parents[2] / "sweeps").glob("*.yaml"))

PLAN = """
import os, sys
import pynvml
from epcross.harness.planning.build import build

pynvml.nvmlInit()
for sweep in sys.argv[1:]:
    build([f"sweep={sweep}"])
    for number in range(pynvml.nvmlDeviceGetCount()):
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(number))
        assert os.getpid() not in [process.pid for process in processes], f"planning {sweep} is on GPU {number}"
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), f"planning {sweep} started torch on a GPU"
"""


def test_plans_leave_the_gpu_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", PLAN, *SWEEPS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
