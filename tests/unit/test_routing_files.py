import hashlib
import zipfile

import numpy as np
import pandas as pd
import pytest

from epcross.harness.errors import InputError
from epcross.harness.workload.routing_files import content_sha256, read_matrix, read_trace

GOOD = np.array([[0, 1], [2, 3], [-1, 3], [1, -1], [-1, -1]])


@pytest.fixture
def trace(tmp_path):
    def write(suffix=".npz", name="t", **arrays):
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".npz":
            np.savez(path, **arrays)
        else:
            pd.DataFrame({k: list(v) for k, v in arrays.items()}).to_parquet(path)
        return str(path)

    return write


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_good_trace_is_read_as_it_is(trace, suffix):
    weights = np.linspace(0, 1, 10).reshape(5, 2)
    got = read_trace(trace(suffix, ids=GOOD, weights=weights), "", 4, 2)
    assert np.array_equal(got.ids, GOOD)
    assert got.ids.dtype == np.int32
    assert got.weights is not None
    assert np.array_equal(got.weights, weights.astype(np.float32))
    assert read_trace(trace(suffix, "bare", ids=GOOD), "", 4, 2).weights is None


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_ids_may_be_of_any_integer_type(trace, dtype):
    ids = np.array([[0, 1], [3, 2]], dtype)
    assert read_trace(trace(ids=ids), "", 4, 2).ids.tolist() == [[0, 1], [3, 2]]
    with pytest.raises(InputError, match="outside"):
        read_trace(trace(name="bad", ids=np.array([[0, 1], [3, np.iinfo(dtype).max]], dtype)), "", 4, 2)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"ids": np.array([[0, 4], [1, 9]])}, "2 ids are outside [-1, 4), the first is 4 at token 0, choice 1"),
        ({"ids": np.array([[0, 1], [-2, 1]])}, "1 ids are outside [-1, 4), the first is -2 at token 1, choice 0"),
        ({"ids": np.array([[0, 1, 2]])}, "this model needs [N, top_k=2]"),
        ({"ids": np.array([[0.0, 1.0]])}, "they must be integers"),
        ({"ids": np.array([[1, 1], [0, 1]])}, "1 token chooses an expert twice, the first is token 0 with [1, 1]"),
        ({"ids": np.full((5, 2), -1)}, "all ids are -1, so no token would be sent"),
        ({"ids": GOOD, "weights": np.array([[0, 1]] * 4 + [[0, np.nan]])}, "weight nan of token 4 is not finite"),
        ({"ids": GOOD, "weights": np.ones((5, 3))}, "they must be floats of shape (5, 2)"),
        ({"ids": GOOD, "weights": np.full((5, 2), 1e300)}, "do not fit float32"),
        ({"chosen": GOOD}, "no array or column `ids`"),
    ],
)
def test_a_bad_trace_says_where_and_what_is_allowed(trace, suffix, arrays, said):
    path = trace(suffix, **arrays)
    with pytest.raises(InputError) as caught:
        read_trace(path, "", 4, 2)
    assert said in str(caught.value)
    assert path in str(caught.value)


def test_all_problems_of_a_trace_are_reported_together(trace):
    with pytest.raises(InputError) as caught:
        read_trace(trace(ids=np.array([[0, 9], [1, 1]]), weights=np.ones(3)), "", 4, 2)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_an_empty_or_truncated_trace_is_an_input_error(trace, tmp_path, suffix):
    empty = trace(suffix, "empty", ids=np.zeros((0, 2), np.int64))
    with pytest.raises(InputError):
        read_trace(empty, "", 4, 2)
    nothing = tmp_path / f"nothing{suffix}"
    nothing.write_bytes(b"")
    with pytest.raises(InputError, match="cannot be read as"):
        read_trace(str(nothing), "", 4, 2)
    with open(trace(suffix, "whole", ids=np.tile(GOOD, (50, 1))), "rb") as file:
        whole = file.read()
    cut = tmp_path / f"cut{suffix}"
    for size in range(0, len(whole) - 1, 37):
        cut.write_bytes(whole[:size])
        read_trace.cache_clear()
        with pytest.raises(InputError):
            read_trace(str(cut), "", 4, 2)


def test_a_header_that_asks_for_too_much_memory_is_refused(tmp_path):
    path = tmp_path / "huge.npz"
    plain = tmp_path / "ids.npy"
    np.save(plain, GOOD)
    with zipfile.ZipFile(path, "w") as archive:  # its checksum is right, its header is not
        archive.writestr("ids.npy", plain.read_bytes().replace(b"(5, 2), }      ", b"(5, 2999999), }"))
    with pytest.raises(InputError, match=r"array ids of int64 \(5, 2999999\) does not fit its 208 bytes"):
        read_trace(str(path), "", 4, 2)


def test_the_content_hash_is_checked(trace):
    path = trace(ids=GOOD)
    with open(path, "rb") as file:
        assert content_sha256(path) == hashlib.sha256(file.read()).hexdigest()
    assert len(read_trace(path, content_sha256(path), 4, 2).ids) == 5
    with pytest.raises(InputError, match="changed after it was planned"):
        read_trace(path, "0" * 64, 4, 2)
    with pytest.raises(InputError, match="cannot read"):
        content_sha256(path + ".gone")


def test_unknown_types_are_refused_by_name(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("0 1")
    with pytest.raises(InputError, match=r"'.txt' is unknown here; use .npz or .parquet"):
        read_trace(str(path), "", 4, 2)


def test_a_matrix_is_read_from_csv_and_npz(tmp_path):
    csv, npz = tmp_path / "m.csv", tmp_path / "m.npz"
    csv.write_text("# comment\n0, 1.5\n\n2, 0\n")
    np.savez(npz, traffic=np.array([[0, 3], [4, 0]]))
    assert read_matrix(str(csv), "", 2).traffic.tolist() == [[0, 1.5], [2, 0]]
    assert read_matrix(str(npz), "", 2).traffic.tolist() == [[0, 3], [4, 0]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2\n3,-4\n", "-4.0 from rank 1 to rank 1 is not allowed"),
        ("1,nan\n3,4\n", "nan from rank 0 to rank 1"),
        ("1,inf\n3,4\n", "inf from rank 0 to rank 1"),
        ("1,2\n3\n", "its lines have [1, 2] numbers"),
        ("1,2\n", "this point needs numbers of shape [2, 2]"),
        ("0,0\n0,0\n", "all zero"),
        ("a,b\nc,d\n", "could not convert string to float"),
        ("", "its lines have [] numbers"),
    ],
)
def test_a_bad_matrix_says_where_and_what_is_allowed(tmp_path, text, said):
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_matrix(str(path), "", 2)
    assert said in str(caught.value)


def test_lists_of_other_lengths_and_columns_without_lists_are_refused(tmp_path):
    path = tmp_path / "ragged.parquet"
    pd.DataFrame({"ids": [[0, 1], [2]]}).to_parquet(path)
    with pytest.raises(InputError, match="they must all have the same"):
        read_trace(str(path), "", 4, 2)
    path = tmp_path / "flat.parquet"
    pd.DataFrame({"ids": [0, 1]}).to_parquet(path)
    with pytest.raises(InputError, match="one list per token"):
        read_trace(str(path), "", 4, 2)
