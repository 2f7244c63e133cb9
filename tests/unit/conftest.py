"""Make `tests` importable from wherever pytest starts, and a run folder for the tests of the store."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from store_values import PLAN

from epcross.harness.storing.run_directory import RunDirectory, create_run
from epcross.harness.storing.run_owner import release


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Without units; this process's until the test ends."""
    created = create_run(tmp_path, "quickstart", PLAN, {"hostname": "here"})
    yield created
    release(created.path)
