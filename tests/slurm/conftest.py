"""One Slurm for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _cluster import SlurmCluster, missing
from _shell import Shell

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="epcross-slurm-", ignore_cleanup_errors=True) as folder,
        SlurmCluster(Path(folder)) as started,
    ):
        yield started


@pytest.fixture
def shell(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Shell]:
    yield Shell(tmp_path, cluster)
    cluster.clear()
