"""Test files are imported by their base names, so two may not share one: pytest would refuse the second."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_files_share_a_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name not in ("__init__.py", "conftest.py"))
    assert [name for name, count in names.items() if count > 1] == []
