"""Readers of token-level traces and rank-to-rank traffic matrices.

Whatever the bytes, a reader returns a checked value or raises `InputError` with every problem it found.

Trace
    `.npz` with an integer array `ids` [N, top_k] and optionally a float array `weights` [N, top_k], or `.parquet` with
    columns of the same names that hold one list per token. Ids are logical experts; -1 is a dropped selection.
Matrix
    `.csv` with ep_size lines of ep_size comma-separated numbers ('#' starts a comment line), or `.npz` with an array
    `traffic` [ep_size, ep_size]. Row i says how the tokens of rank i divide over the ranks, as fractions or counts.
"""

import hashlib
import io
import math
import warnings
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import Float32, Int32
from epcross.harness.errors import InputError

MAX_ARRAY_BYTES = 4 * 2**30
"""Largest array a file may declare: a damaged header must not ask for all the memory of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Choices of real tokens. N tokens."""

    ids: Int32  # [N, top_k] logical experts, distinct per token, -1 = dropped
    weights: Float32 | None  # [N, top_k]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """How the tokens of each rank divide over the ranks."""

    traffic: NDArray[np.float64]  # [ep_size, ep_size], finite and not negative; a row of zeros sends nothing


def content_sha256(path: str) -> str:
    """SHA-256 of a file, in hex: the factor that a trace or matrix contributes to a point.

    Raises:
        InputError: the file cannot be read.
    """
    return hashlib.sha256(_content(path)).hexdigest()


@lru_cache(maxsize=4)
def read_trace(path: str, sha256: str, num_experts: int, top_k: int) -> Trace:
    """The trace at `path`, checked against the content hash a point was planned with ("" accepts any).

    Read once per process: a later change of the file is not seen.

    Raises:
        InputError: all problems of the file.
    """
    arrays = _arrays(path, sha256, (".npz", ".parquet"))
    found: list[str] = []
    ids = arrays.get("ids")
    if ids is None:
        raise InputError(f"trace {path} holds no array or column `ids` but {sorted(arrays)}; write ids [N, top_k]")
    if ids.dtype.kind not in "iu":
        found.append(f"trace {path}: ids are {ids.dtype}, they must be integers")
    if ids.ndim != 2 or ids.shape[1] != top_k:
        found.append(f"trace {path}: ids have shape {ids.shape}, this model needs [N, top_k={top_k}]; choose its model")
    elif len(ids) == 0:
        found.append(f"trace {path} holds no token; it needs at least one")
    if not found:
        found += _id_problems(path, ids, num_experts)
    weights = arrays.get("weights")
    if weights is not None:
        if weights.dtype.kind not in "fiu" or weights.shape != ids.shape:
            found.append(
                f"trace {path}: weights are {weights.dtype} {weights.shape}, they must be floats of shape {ids.shape}"
            )
        elif not np.isfinite(weights).all():
            row, column = np.argwhere(~np.isfinite(weights))[0]
            found.append(f"trace {path}: weight {weights[row, column]} of token {row} is not finite; remove the token")
        elif (np.abs(weights) > np.finfo(np.float32).max).any():
            found.append(f"trace {path}: weights do not fit float32")
    if found:
        raise InputError(found)
    return Trace(ids=ids.astype(np.int32), weights=None if weights is None else weights.astype(np.float32))


@lru_cache(maxsize=4)
def read_matrix(path: str, sha256: str, ep_size: int) -> Matrix:
    """The traffic matrix at `path`, checked against the content hash a point was planned with ("" accepts any).

    Read once per process: a later change of the file is not seen.

    Raises:
        InputError: all problems of the file.
    """
    traffic = _arrays(path, sha256, (".csv", ".npz")).get("traffic")
    if traffic is None:
        raise InputError(f"matrix {path} holds no array `traffic`; write traffic [ep_size, ep_size]")
    if traffic.dtype.kind not in "fiu" or traffic.shape != (ep_size, ep_size):
        raise InputError(
            f"matrix {path} is {traffic.dtype} {traffic.shape}, this point needs numbers of shape"
            f" [{ep_size}, {ep_size}]; choose its ep_size"
        )
    values = traffic.astype(np.float64)
    found = [
        f"matrix {path}: {traffic[i, j]} from rank {i} to rank {j} is not allowed; use finite numbers of 0 or more"
        for i, j in np.argwhere(~(np.isfinite(values) & (values >= 0)))[:10]
    ]
    if not found and not values.any():
        found.append(f"matrix {path} is all zero: no token would be sent; give at least one positive entry")
    if found:
        raise InputError(found)
    return Matrix(traffic=values)


def _id_problems(path: str, ids: NDArray[Any], num_experts: int) -> list[str]:
    found: list[str] = []
    outside = (ids < -1) | (ids >= num_experts)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        found.append(
            f"trace {path}: {outside.sum()} ids are outside [-1, {num_experts}), the first is {ids[row, column]} at"
            f" token {row}, choice {column}; choose the model the trace was taken from"
        )
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)).any(axis=1)
    if twice.any():
        row, count = int(np.argmax(twice)), int(twice.sum())
        choose = "1 token chooses" if count == 1 else f"{count} tokens choose"
        found.append(
            f"trace {path}: {choose} an expert twice, the first is token {row} with"
            f" {ids[row].tolist()}; choices of a token must be distinct"
        )
    if not found and not (ids >= 0).any():
        found.append(f"trace {path}: all ids are -1, so no token would be sent; it needs at least one choice")
    return found


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path!r}: {error}; give the path of a readable file") from error


def _arrays(path: str, sha256: str, suffixes: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    content = _content(path)
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{path} changed after it was planned (its SHA-256 is no longer {sha256[:16]}...); plan again")
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise InputError(f"{path}: the file type {suffix!r} is unknown here; use {' or '.join(suffixes)}")
    parse = {".npz": _parse_npz, ".parquet": _parse_parquet, ".csv": _parse_csv}[suffix]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parse(content)
    # Three parsers raise two dozen kinds of error on damaged bytes; to the user all of them mean one thing.
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{path} cannot be read as {suffix} ({len(content)} bytes): {reason}; write it again or fetch it again"
        ) from error


def _parse_npz(content: bytes) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name not in ("ids", "weights", "traffic"):
                continue
            if member.file_size > MAX_ARRAY_BYTES:
                raise ValueError(f"array {name} declares {member.file_size} bytes, more than {MAX_ARRAY_BYTES}")
            with archive.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                header = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                shape, column_major, dtype = header(stream)
                size_bytes = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or size_bytes > member.file_size:
                    raise ValueError(f"array {name} of {dtype} {shape} does not fit its {member.file_size} bytes")
                flat = np.frombuffer(stream.read(size_bytes), dtype)
                arrays[name] = flat.reshape(shape, order="F" if column_major else "C")
    return arrays


def _parse_parquet(content: bytes) -> dict[str, NDArray[Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(content))
    arrays: dict[str, NDArray[Any]] = {}
    for name in ("ids", "weights"):
        if name not in file.schema_arrow.names:
            continue
        lists = file.read([name]).column(name).combine_chunks()
        if not pa.types.is_nested(lists.type) or pa.types.is_struct(lists.type):
            raise ValueError(f"column {name} holds {lists.type}, it must hold one list per token")
        lengths = pc.call_function("list_value_length", [lists]).unique().to_pylist()
        if len(lengths) > 1:
            raise ValueError(f"the lists of column {name} have lengths {lengths[:5]}, they must all have the same")
        # a null becomes NaN, which no check lets through
        arrays[name] = lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), -1 if len(lists) else 0)
    return arrays


def _parse_csv(content: bytes) -> dict[str, NDArray[Any]]:
    lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    rows = [[float(cell) for cell in line.split(",")] for line in lines if line and not line.startswith("#")]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"its lines have {sorted({len(row) for row in rows})} numbers, they must all have the same")
    return {"traffic": np.array(rows, np.float64)}
