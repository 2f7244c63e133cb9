"""Damaged traces and matrices are refused as such, or read as something that is whole."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _mutate import SECONDS, damaged, fuzz

from epcross.harness.errors import InputError
from epcross.harness.workload.routing_files import read_matrix, read_trace

IDS = np.array([[0, 1], [3, -1], [7, 2]])
WEIGHTS = np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])


def trace(folder: Path, suffix: str) -> Path:
    path = folder / f"trace{suffix}"
    if suffix == ".npz":
        np.savez(path, ids=IDS, weights=WEIGHTS)
    else:
        pq.write_table(pa.table({"ids": IDS.tolist(), "weights": WEIGHTS.tolist()}), path)
    return path


def matrix(folder: Path, suffix: str) -> Path:
    path = folder / f"matrix{suffix}"
    if suffix == ".npz":
        np.savez(path, traffic=np.array([[1, 2], [3, 4]]))
    else:
        path.write_text("# counts\n1,2\n3,4.5\n")
    return path


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_damaged_trace(tmp_path: Path, suffix: str, seconds: float) -> None:
    path = trace(tmp_path, suffix)
    good = path.read_bytes()
    assert read_trace(str(path), "", 8, 2).ids.tolist() == IDS.tolist()

    def case(drawn: random.Random) -> None:
        path.write_bytes(damaged(good, drawn, [b"PK\x05\x06", b"PAR1", b"NUMPY", b"<f8", b"|O", b"(99999999999,)"]))
        read_trace.cache_clear()
        found = read_trace(str(path), "", 8, 2)
        assert found.ids.shape[1] == 2
        assert ((found.ids >= -1) & (found.ids < 8)).all()
        assert found.weights is None or np.isfinite(found.weights).all()

    assert fuzz(seconds, case, (InputError,)) > 5
    read_trace.cache_clear()


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_damaged_matrix(tmp_path: Path, suffix: str, seconds: float) -> None:
    path = matrix(tmp_path, suffix)
    good = path.read_bytes()
    assert read_matrix(str(path), "", 2).traffic.shape == (2, 2)

    def case(drawn: random.Random) -> None:
        path.write_bytes(damaged(good, drawn, [b",", b",,", b"#", b"inf", b"-0", b"1_0", b"0x1", b";"]))
        read_matrix.cache_clear()
        found = read_matrix(str(path), "", 2)
        assert found.traffic.shape == (2, 2)
        assert (np.isfinite(found.traffic) & (found.traffic >= 0)).all()

    assert fuzz(seconds, case, (InputError,)) > 5
    read_matrix.cache_clear()
