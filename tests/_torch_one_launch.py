"""The stand-in exchange of tests/gpu/config, which the command line finds there by --config-dir."""

from pathlib import Path
from typing import Any

from tests._scripts import load

CONFIG = Path(__file__).parent / "gpu" / "config"


def torch_one_launch() -> Any:
    """The class; needs torch."""
    return load(CONFIG / "torch_one_launch.py").TorchOneLaunch
