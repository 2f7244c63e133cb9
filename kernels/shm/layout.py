"""Where everything lies in a rank's workspace: one pure function of the shapes.

The C++ kernels are handed these offsets and compute none of their own, so what `plan` announces is what is mapped.

A *record* is what travels for one (token, destination rank):

    | row | scale row | ids int32[top_k] | weights fp32[top_k] | header u64 | pad to 64 |

The header's low half is the token's index on its source, its high half says whether words were escaped (Sentinel).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

LINE_BYTES = 64
"""Cache line of x86-64 and of the aarch64 servers: two ranks never write to the same one."""

WORD_BYTES = 8
"""What one store of a CPU writes whole: the unit that Sentinel polls."""

ESCAPE_BITS = 32
"""Bits used of a bitmap word, so that no bitmap word can equal the sentinel (its upper half is not zero)."""


class ProtocolName(StrEnum):
    """The three exchanges this package has."""

    FENCE = "fence"
    SENTINEL = "sentinel"
    TWO_SIDED = "two_sided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides the size of a workspace."""

    ep_size: int
    capacity: int  # most tokens of any rank
    row_bytes: int  # padded, a multiple of 16
    scale_bytes: int  # padded, a multiple of 16; 0 if the format has none
    top_k: int
    hidden: int  # values of a combine row (bf16)

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} must be at least {low}"
            for name, value, low in (
                ("ep_size", self.ep_size, 1),
                ("capacity", self.capacity, 0),
                ("row_bytes", self.row_bytes, 16),
                ("scale_bytes", self.scale_bytes, 0),
                ("top_k", self.top_k, 1),
                ("hidden", self.hidden, 1),
            )
            if value < low
        ]
        problems += [
            f"{name}={value} must be a multiple of 16; pad the row"
            for name, value in (("row_bytes", self.row_bytes), ("scale_bytes", self.scale_bytes))
            if value % 16
        ]
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A named range of the workspace."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets and strides in bytes. Strides are multiples of a cache line."""

    protocol: ProtocolName
    scale_at: int  # inside a record
    ids_at: int
    weights_at: int
    header_at: int
    record_bytes: int  # from one record to the next
    escape_bytes: int  # from one record's escape bitmap to the next
    partial_bytes: int  # from one combine row to the next
    regions: tuple[Region, ...]
    total_bytes: int

    @property
    def record_words(self) -> int:
        """Words of a record that carry something; the rest is padding and never written."""
        return self.header_at // WORD_BYTES + 1

    @property
    def metadata_bytes(self) -> int:
        """Ids and weights of one record."""
        return self.header_at - self.ids_at

    def offsets(self) -> dict[str, int]:
        """Every number the kernels need, by name: the fields, and the offset of each region."""
        names = ("scale_at", "ids_at", "weights_at", "header_at", "record_bytes", "escape_bytes", "partial_bytes")
        return {name: getattr(self, name) for name in names} | {region.name: region.offset for region in self.regions}


def layout(protocol: ProtocolName, shape: Shape) -> Layout:
    """The layout of one rank's workspace; every rank of a group has the same."""
    ids_at = shape.row_bytes + shape.scale_bytes
    weights_at = ids_at + 4 * shape.top_k
    header_at = weights_at + 4 * shape.top_k  # a multiple of 8: ids and weights together take 8 * top_k
    record_bytes = _lines(header_at + WORD_BYTES)
    payload_words = header_at // WORD_BYTES
    escape_bytes = _lines(-(-payload_words // ESCAPE_BITS) * WORD_BYTES)
    partial_bytes = _lines(2 * shape.hidden)

    slots = shape.ep_size * shape.capacity  # [source rank][slot]
    flags = shape.ep_size * LINE_BYTES  # one line per peer
    sizes: dict[str, int] = {"control": LINE_BYTES}
    match protocol:
        case ProtocolName.FENCE:
            sizes |= {"dispatch_flags": flags, "combine_flags": flags}
            sizes |= {"records": slots * record_bytes, "partials": slots * partial_bytes}
        case ProtocolName.SENTINEL:
            for parity in (0, 1):
                sizes |= {f"counts_{parity}": flags, f"records_{parity}": slots * record_bytes}
                sizes |= {f"escapes_{parity}": slots * escape_bytes, f"partials_{parity}": slots * partial_bytes}
        case ProtocolName.TWO_SIDED:
            sizes |= {"count_flags": flags, "dispatch_flags": flags, "combine_flags": flags}
            sizes |= {"records": slots * record_bytes, "partials": slots * partial_bytes}
    regions = tuple(_placed(sizes))
    return Layout(
        protocol=protocol,
        scale_at=shape.row_bytes,
        ids_at=ids_at,
        weights_at=weights_at,
        header_at=header_at,
        record_bytes=record_bytes,
        escape_bytes=escape_bytes,
        partial_bytes=partial_bytes,
        regions=regions,
        total_bytes=sum(region.size for region in regions),
    )


def _lines(size_bytes: int) -> int:
    return -(-size_bytes // LINE_BYTES) * LINE_BYTES


def _placed(sizes: dict[str, int]) -> Iterator[Region]:
    """One region after the other; each size is a multiple of a line, so each offset is too."""
    offset = 0
    for name, size in sizes.items():
        yield Region(name=name, offset=offset, size=size)
        offset += size
