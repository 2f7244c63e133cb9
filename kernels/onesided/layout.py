"""Where everything lies in a rank's workspace, and what a kernel is told: pure functions of the shapes.

The kernels are handed these offsets and compute none of their own beyond `Places` in csrc/place.cuh, so what is
announced is what is indexed. A *record* is what travels for one (token, destination rank):

    | row | scale row | ids int32[top_k] | weights fp32[top_k] | pad to 16 |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from epcross.kernels.errors import InvalidArguments

VECTOR_BYTES = 16
"""One vector access of a thread."""

LINE_BYTES = 128
"""Second-level cache line of the GPUs here: records, partials and regions begin on one."""

LANES = 32
MAX_RANKS = 96
"""Three 32-bit words of a rank mask. The largest NVLink domain today has 72 GPUs."""

MAX_LOCAL_RANKS = 72
MAX_TOP_K = 16
MAX_SLOTS = 4096
"""Experts with their replicas; the table of their ranks lies in shared memory."""

MAX_FLAGS = 256
"""`kMaxFlags` of csrc/fence.cuh: blocks of a rank that may each raise a flag at one destination."""

MAX_CAPACITY = (1 << 20) - 1
"""Tokens of a rank; a header holds the count in 20 bits."""

MAX_INPUT_VECTORS = (1 << 31) - LANES * 4
"""Of the rows of a rank, on their way in or out: kernels number vectors in 31 bits, four of a lane at a time."""

_HEADER_BYTES = 8
_FLAG_BYTES = 8
_CONTROL_BYTES = 128


class Protocol(StrEnum):
    """How receivers learn that rows are there."""

    FENCE = "fence"  # rows, then a release and a flag
    SENTINEL = "sentinel"  # every landing word is armed, receivers poll the data


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides the size of a workspace.

    Raises:
        InvalidArguments: a sentence for every value that is out of range.
    """

    ep_size: int
    capacity: int  # most tokens of any rank: max_tokens_per_rank
    row_bytes: int  # padded, a multiple of 16
    scale_bytes: int  # padded, a multiple of 16; 0 if the format has none
    top_k: int
    hidden: int  # values of a combine row (bf16); a multiple of 8

    def __post_init__(self) -> None:
        bounds = (
            ("ep_size", self.ep_size, 1, MAX_RANKS),
            ("max_tokens_per_rank", self.capacity, 1, MAX_CAPACITY),
            ("row_bytes", self.row_bytes, VECTOR_BYTES, 1 << 20),
            ("scale_bytes", self.scale_bytes, 0, 1 << 20),
            ("top_k", self.top_k, 1, MAX_TOP_K),
            ("hidden", self.hidden, 8, 1 << 19),
        )
        problems = [
            f"{name}={value} must be {low} to {high}" for name, value, low, high in bounds if not low <= value <= high
        ]
        problems += [
            f"{name}={value} must be a multiple of {unit}; pad it"
            for name, value, unit in (
                ("row_bytes", self.row_bytes, VECTOR_BYTES),
                ("scale_bytes", self.scale_bytes, VECTOR_BYTES),
                ("hidden", self.hidden, VECTOR_BYTES // 2),
            )
            if value % unit
        ]
        widest, most = max(self.row_bytes, self.scale_bytes, 2 * self.hidden), MAX_INPUT_VECTORS * VECTOR_BYTES
        if self.capacity * widest > most:
            problems.append(
                f"max_tokens_per_rank={self.capacity} rows of {widest} bytes are more than {most} bytes: at most "
                f"{most // widest} rows of this size can be numbered"
            )
        if problems:
            raise InvalidArguments(problems)

    @property
    def metadata_bytes(self) -> int:
        """Ids and weights of a record, padded."""
        return _up(8 * self.top_k, VECTOR_BYTES)

    @property
    def record_vectors(self) -> int:
        """Vectors of a record that carry something."""
        return (self.row_bytes + self.scale_bytes + self.metadata_bytes) // VECTOR_BYTES

    @property
    def partial_vectors(self) -> int:
        """Vectors of a combine row."""
        return 2 * self.hidden // VECTOR_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A named range of the workspace."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets and strides in bytes."""

    protocol: Protocol
    shape: Shape
    record_stride: int
    partial_stride: int
    escape_stride: int
    regions: tuple[Region, ...]
    total_bytes: int

    def __getitem__(self, name: str) -> Region:
        """The region of that name. Raises `KeyError`."""
        return next((region for region in self.regions if region.name == name), None) or _missing(name)

    @property
    def sets(self) -> int:
        """Landing sets that rounds take in turn."""
        return 2 if self.protocol is Protocol.SENTINEL else 1

    @property
    def armed(self) -> tuple[Region, ...]:
        """Regions that hold the armed word before the first round; everything else holds zero."""
        names = ("records_0", "records_1", "escapes_0", "escapes_1", "returns")
        return tuple(r for r in self.regions if self.protocol is Protocol.SENTINEL and r.name in names)


def layout(protocol: Protocol, shape: Shape) -> Layout:
    """The layout of one rank's workspace; every rank of a group has the same."""
    record = _up(shape.record_vectors * VECTOR_BYTES, LINE_BYTES)
    partial = _up(shape.partial_vectors * VECTOR_BYTES, LINE_BYTES)
    row_vectors = shape.row_bytes // VECTOR_BYTES
    groups = -(-row_vectors // LANES) + -(-(shape.record_vectors - row_vectors) // LANES)  # of the row, and of its tail
    escape = groups * VECTOR_BYTES  # a word for each half of 32 vectors
    rows = shape.ep_size * shape.capacity  # [source rank][token]
    headers = rows * _HEADER_BYTES  # [token][source]
    sizes = {"control": _CONTROL_BYTES, "sent": 4 * rows}
    match protocol:
        case Protocol.FENCE:
            flags = shape.ep_size * _FLAG_BYTES
            sizes |= {"dispatch_flags": flags * MAX_FLAGS, "combine_flags": flags, "headers_0": headers}
            sizes |= {"records_0": rows * record}
        case Protocol.SENTINEL:
            for parity in (0, 1):
                sizes |= {f"headers_{parity}": headers, f"records_{parity}": rows * record}
                sizes |= {f"escapes_{parity}": rows * escape}
            sizes |= {"returns": rows * partial}
    sizes |= {"partials": rows * partial}
    regions = tuple(_placed(sizes))
    return Layout(
        protocol=protocol,
        shape=shape,
        record_stride=record,
        partial_stride=partial,
        escape_stride=escape,
        regions=regions,
        total_bytes=regions[-1].offset + regions[-1].size,
    )


EXCHANGE = np.dtype(
    [
        ("workspace", "<u8", MAX_RANKS),
        ("slot_rank", "<u8"),
        ("failure", "<u8"),
        ("timeout_ns", "<u8"),
        ("control_at", "<i8"),
        ("sent_at", "<i8"),
        ("headers_at", "<i8", 2),
        ("records_at", "<i8", 2),
        ("escapes_at", "<i8", 2),
        ("returns_at", "<i8"),
        ("partials_at", "<i8"),
        ("dispatch_flags_at", "<i8"),
        ("combine_flags_at", "<i8"),
        ("record_stride", "<i8"),
        ("partial_stride", "<i8"),
        ("escape_stride", "<i8"),
        ("ep", "<i4"),
        ("first_rank", "<i4"),
        ("local_ranks", "<i4"),
        ("top_k", "<i4"),
        ("num_slots", "<i4"),
        ("capacity", "<i4"),
        ("row_vectors", "<i4"),
        ("scale_vectors", "<i4"),
        ("record_vectors", "<i4"),
        ("partial_vectors", "<i4"),
    ],
    align=True,
)
"""`Exchange` of csrc/params.cuh."""

CALL = np.dtype(
    [
        ("rows", "<u8"),
        ("scales", "<u8"),
        ("ids", "<u8"),
        ("weights", "<u8"),
        ("out", "<u8"),
        ("rows_stride", "<i8"),
        ("scales_stride", "<i8"),
        ("ids_stride", "<i8"),
        ("weights_stride", "<i8"),
        ("out_stride", "<i8"),
        ("chunk_blocks", "<i4"),
        ("tokens", "<i4", MAX_LOCAL_RANKS),
    ],
    align=True,
)
"""`Call` of csrc/params.cuh."""

FAILURE = np.dtype([("state", "<u4"), ("rank", "<u4"), ("peer", "<u4"), ("phase", "<u4"), ("epoch", "<u8")])
"""`Failure` of csrc/params.cuh, one for each local rank."""

CONTROL = np.dtype([("dispatch_epoch", "<u8"), ("combine_epoch", "<u8"), ("failed", "<u4")])
"""`Control` of csrc/params.cuh, at the begin of a workspace. `combine_epoch` is that of the last dispatch."""

COUNT_BITS = 20
EPOCH_SHIFT = COUNT_BITS + 1
"""Of a header (csrc/header.cuh): epoch << 21 | tokens of the source << 1 | whether the token came here. It counts only
if its epoch is that of the last dispatch."""

ARMED_WORD = 0xFFDB_7FB6_FFA5_7FE9
"""`kArmed` of csrc/words.cuh."""

ESCAPE_WORD = 0x7FB6_FFDB_7FE9_FFA5
"""`kEscape` of csrc/words.cuh."""


def exchange_values(
    at: Layout,
    *,
    workspaces: list[int],
    slot_rank: int,
    num_slots: int,
    failure: int,
    timeout_ns: int,
    first_rank: int,
    local_ranks: int,
) -> NDArray[np.void]:
    """The `Exchange` structure: `workspaces` are the bases of every rank's workspace as mapped here, `slot_rank` and
    `failure` device-visible addresses. One element of dtype `EXCHANGE`."""
    shape = at.shape
    values = np.zeros((), EXCHANGE)
    values["workspace"][: len(workspaces)] = workspaces
    values["slot_rank"], values["failure"], values["timeout_ns"] = slot_rank, failure, timeout_ns
    offset = {region.name: region.offset for region in at.regions}
    values["control_at"] = offset["control"]
    for name in ("headers", "records", "escapes"):
        values[f"{name}_at"] = [offset.get(f"{name}_{s}", 0) for s in (0, 1)]
    for name in ("sent", "returns", "partials", "dispatch_flags", "combine_flags"):
        values[f"{name}_at"] = offset.get(name, 0)
    values["record_stride"], values["partial_stride"] = at.record_stride, at.partial_stride
    values["escape_stride"] = at.escape_stride
    values["ep"], values["first_rank"], values["local_ranks"] = shape.ep_size, first_rank, local_ranks
    values["top_k"], values["num_slots"], values["capacity"] = shape.top_k, num_slots, shape.capacity
    values["row_vectors"], values["scale_vectors"] = shape.row_bytes // VECTOR_BYTES, shape.scale_bytes // VECTOR_BYTES
    values["record_vectors"], values["partial_vectors"] = shape.record_vectors, shape.partial_vectors
    return values


def _missing(name: str) -> Region:
    raise KeyError(name)


def _up(size_bytes: int, unit: int) -> int:
    return -(-size_bytes // unit) * unit


def _placed(sizes: dict[str, int]) -> Iterator[Region]:
    """One region after the other, each on a line of its own."""
    offset = 0
    for name, size in sizes.items():
        yield Region(name=name, offset=offset, size=size)
        offset = _up(offset + size, LINE_BYTES)
