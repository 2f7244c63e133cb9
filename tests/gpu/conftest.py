"""Everything here needs a GPU; without one each test is skipped with a sentence (see tests/conftest.py).

`tests` and, uninstalled, `epcross` are importable from wherever pytest starts, and in the processes that tests start.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


@pytest.fixture(autouse=True)
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests whose parameter `protocol` is "fence_row" have Fence take `row` at any size."""
    call = getattr(request.node, "callspec", None)
    if call is not None and call.params.get("protocol") == "fence_row":
        from tests.gpu._rounds import always

        always("fence_row", monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu(1))
