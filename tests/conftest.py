"""What holds for every test: which run alone, which need GPUs, and when a skip is a failure."""

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ALONE = {"multiprocess", "model", "notebooks", "gpu"}
"""Folders whose tests keep all cores busy, by ranks that poll or by searches: beside others they would time out, or
disturb them. Tests there whose ranks wait asleep or for moments, with limits far off, are marked `beside`."""

if "PYTEST_XDIST_WORKER" in os.environ:
    # runs of tests beside each other are on the same cores and would flag each other's rows; commands inherit it
    os.environ["EPCROSS_LOCKS"] = tempfile.mkdtemp(prefix="epcross-locks-")
    atexit.register(shutil.rmtree, os.environ["EPCROSS_LOCKS"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if (folder in ALONE and not item.get_closest_marker("beside")) or item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.alone)


def gpu_count() -> int:
    """NVIDIA GPUs with a device file: asking a driver would load one."""
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in Path("/dev").iterdir())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if marker := item.get_closest_marker("gpu"):
        needed, present = (marker.args or (1,))[0], gpu_count()
        if present < needed:
            pytest.skip(f"needs {needed} GPU(s); this machine has {present}")


@pytest.fixture(autouse=True)
def own_modules() -> Generator[None]:
    """Folders of users' backends that a test put on Python's path, and what was imported from them, end with the test:
    another test's folder may hold modules of the same names."""
    before = list(sys.path)
    yield
    added = [folder for folder in sys.path if folder not in before]
    sys.path[:] = before
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if source and any(source.startswith(f"{folder}{os.sep}") for folder in added):
            del sys.modules[name]


@pytest.fixture
def one_thread() -> Generator[None]:
    """torch on one thread: beside matrices as small as these, threads that wait for each other take long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure under CI=true, unless it is for want of a GPU: what CI leaves out, nobody runs."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not re.search(r"\bGPUs?\b", reason):
        report.outcome = "failed"
        report.longrepr = f"CI=true, and a test was left out. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    forbid_skip(report)
    return report
