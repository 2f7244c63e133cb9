"""The floor between real processes."""

from pathlib import Path

import pytest
from _files_group import FilesGroup
from _ranks import run_ranks

from epcross.harness.measuring.floor import FALLBACK_LLC_BYTES, last_cache_bytes, measure_floor
from epcross.kernels.shm import build

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def _floor(group: FilesGroup) -> dict[str, object]:
    return measure_floor(group, copy_bytes=1 << 20)


@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_the_floor_is_the_same_on_all_ranks(ep_size: int) -> None:
    build.build()
    floors = run_ranks(ep_size, _floor)
    assert all(floor == floors[0] for floor in floors)
    floor = floors[0]
    assert floor["ep_size"] == ep_size
    assert floor["copy_bytes_per_rank"] == 1 << 20
    assert 0.01 < floor["empty_pair_us"] < 1000
    assert 0.01 < floor["copy_gbps"] < 10_000
    assert len(floor["flag_pairs_us"]) == {1: 0, 2: 1, 3: 3}[ep_size]
    assert all(0.005 < flag_us < 1e5 for flag_us in floor["flag_pairs_us"])
    assert (floor["flag_one_way_us"] is None) == (ep_size == 1)


def test_the_last_cache_is_read_or_its_size_is_said_to_be_assumed(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == (FALLBACK_LLC_BYTES, "assumed: sysfs does not tell")
    import os

    cache = tmp_path / f"cpu{min(os.sched_getaffinity(0))}" / "cache"
    for index, size in enumerate(("64K", "2048K", "24M", "soon")):
        (cache / f"index{index}").mkdir(parents=True)
        (cache / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache_bytes(tmp_path) == (24 << 20, str(cache / "index2" / "size"))
