"""Files that are run, not imported: as modules, for tests of their parts."""

import importlib.util
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """The module that the file at `path` makes, under the file's name; made anew each time."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
