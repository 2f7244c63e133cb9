"""The stand-in exchange of tests/gpu/config, which the command line finds there by --config-dir."""

import importlib.util
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "gpu" / "config"


def torch_one_launch() -> Any:
    """The class; needs torch."""
    spec = importlib.util.spec_from_file_location("torch_one_launch", CONFIG / "torch_one_launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TorchOneLaunch
