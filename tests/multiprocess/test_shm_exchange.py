"""The three exchanges between real processes, compared bit for bit with numpy."""

import time
from itertools import product

import numpy as np
import pytest
from _exchange_case import BACKENDS, Case, check_combined, round_trip, staged
from _files_group import FilesGroup
from _ranks import run_ranks

from epcross.harness.errors import WaitExpired
from epcross.harness.terms import RowFormat
from epcross.kernels.shm import build
from epcross.kernels.shm.segment import SHM_DIRECTORY

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

EP_SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.build()


def _prepared(group: FilesGroup, name: str, case: Case, seeds: tuple[int, ...]):  # noqa: ANN202
    backend = BACKENDS[name]({**BACKENDS[name].option_defaults(), **case.options})
    assert backend.unsupported(case.point) is None
    backend.prepare(case.point, case.shard(group.rank, seeds, build.load().ARMED), group)
    return backend


def _matrix(group: FilesGroup, name: str) -> int:
    """Every combination of counts, format and payload, two rounds of two sets each."""
    armed, ep = build.load().ARMED, group.size
    counts = ([3] * ep, [(rank * 2) % 5 for rank in range(ep)], [0] * ep)
    rounds = 0
    for tokens, row_format, payload in product(
        counts, (RowFormat.BF16, RowFormat.FP8, RowFormat.NVFP4), ("random", "ones", "armed", "mixed")
    ):
        case = Case(tokens=tuple(tokens), row_format=row_format, payload=payload)
        backend = _prepared(group, name, case, (1, 2))
        for set_index in (0, 1, 0, 1):
            round_trip(backend, case, group.rank, set_index, set_index + 1, armed)
            rounds += 1
        backend.close()
        backend.close()
    return rounds


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("name", BACKENDS)
def test_any_counts_formats_and_bits_arrive_exactly(name: str, ep_size: int) -> None:
    assert run_ranks(ep_size, _matrix, name) == [144] * ep_size
    assert not list(SHM_DIRECTORY.glob("epcross-*test-*")), "a segment was left behind"
