"""What the kernels index against what the layout announces, and the grids: for every shape that may come."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.kernels.onesided.layout import (
    LANES,
    LINE_BYTES,
    MAX_CAPACITY,
    MAX_FLAGS,
    MAX_RANKS,
    VECTOR_BYTES,
    Layout,
    Protocol,
    Shape,
    layout,
)
from epcross.kernels.onesided.plan import ROW, Phase, kernel_names, least_blocks, resident_blocks, step, usable

small_shapes = st.builds(
    Shape,
    ep_size=st.integers(1, 9),
    capacity=st.integers(1, 5),
    row_bytes=st.integers(1, 80).map(lambda n: 16 * n),
    scale_bytes=st.integers(0, 20).map(lambda n: 16 * n),
    top_k=st.integers(1, 16),
    hidden=st.integers(1, 80).map(lambda n: 8 * n),
)
any_shapes = st.builds(
    Shape,
    ep_size=st.integers(1, MAX_RANKS),
    capacity=st.integers(1, 8192),
    row_bytes=st.integers(1, 1024).map(lambda n: 16 * n),
    scale_bytes=st.integers(0, 64).map(lambda n: 16 * n),
    top_k=st.integers(1, 16),
    hidden=st.integers(1, 1024).map(lambda n: 8 * n),
)
protocols = st.sampled_from(Protocol)


def indexed(at: Layout) -> Iterator[tuple[str, int, int]]:
    """Region, first byte and size of everything that a kernel touches in a workspace, each thing once.

    As the `*_at` functions of csrc/place.cuh have it, and not as layout.py computes it.
    """
    shape, start = at.shape, {region.name: region.offset for region in at.regions}
    records, partials = shape.record_vectors, shape.partial_vectors
    rows = shape.row_bytes // VECTOR_BYTES
    yield "control", start["control"], 20
    for rank in range(shape.ep_size):
        if at.protocol is Protocol.FENCE:
            yield "combine_flags", start["combine_flags"] + 8 * rank, 8
            for flag in range(256):
                yield "dispatch_flags", start["dispatch_flags"] + 8 * (rank * 256 + flag), 8
        for token in range(shape.capacity):
            row, entry = rank * shape.capacity + token, token * shape.ep_size + rank
            yield "sent", start["sent"] + 4 * entry, 4
            for parity in range(at.sets):
                headers, record = f"headers_{parity}", f"records_{parity}"
                yield headers, start[headers] + 8 * entry, 8
                for vector in range(records):
                    yield record, start[record] + row * at.record_stride + 16 * vector, 16
                if at.protocol is Protocol.SENTINEL:
                    escapes = f"escapes_{parity}"
                    for group in range(-(-rows // LANES) + -(-(records - rows) // LANES)):  # of the row, of its tail
                        yield escapes, start[escapes] + row * at.escape_stride + 16 * group, 16
            kinds = ("partials", "returns") if at.protocol is Protocol.SENTINEL else ("partials",)
            for kind in kinds:
                for vector in range(partials):
                    yield kind, start[kind] + row * at.partial_stride + 16 * vector, 16


@given(protocols, small_shapes)
def test_everything_indexed_lies_in_its_region_and_nothing_twice(protocol: Protocol, shape: Shape) -> None:
    at = layout(protocol, shape)
    touched = bytearray(at.total_bytes)
    for name, first, size in indexed(at):
        region = at[name]
        assert region.offset <= first
        assert first + size <= region.offset + region.size, name
        assert first % min(size, VECTOR_BYTES) == 0 or name == "control", "an access that is not aligned"
        assert not any(touched[first : first + size]), f"{name} shares bytes"
        touched[first : first + size] = b"x" * size


@given(protocols, any_shapes)
def test_regions_follow_one_another_and_every_row_begins_on_a_line(protocol: Protocol, shape: Shape) -> None:
    at = layout(protocol, shape)
    end = 0
    for region in at.regions:
        assert end <= region.offset < end + LINE_BYTES
        assert region.offset % LINE_BYTES == 0
        end = region.offset + region.size
    assert at.total_bytes == end
    assert at.record_stride % LINE_BYTES == at.partial_stride % LINE_BYTES == 0
    armed = {region.name for region in at.armed}
    polled = {"records_0", "records_1", "escapes_0", "escapes_1", "returns"}
    assert armed == (polled if protocol is Protocol.SENTINEL else set())


@given(protocols, any_shapes)
def test_a_larger_capacity_never_takes_less(protocol: Protocol, shape: Shape) -> None:
    more = replace(shape, capacity=shape.capacity + 1)
    assert layout(protocol, more).total_bytes > layout(protocol, shape).total_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ep_size": 97}, "ep_size=97 must be 1 to 96"),
        ({"top_k": 17}, "top_k=17 must be 1 to 16"),
        ({"capacity": 0}, "max_tokens_per_rank=0 must be 1"),
        (
            {"capacity": MAX_CAPACITY, "hidden": 16392},
            "max_tokens_per_rank=1048575 rows of 32784 bytes are more than 34359736320 bytes: at most 1048064",
        ),
        ({"row_bytes": 24}, "row_bytes=24 must be a multiple of 16"),
        ({"hidden": 12}, "hidden=12 must be a multiple of 8"),
    ],
)
def test_shapes_that_cannot_be_served_are_named_together(change: dict[str, int], words: str) -> None:
    good = {"ep_size": 2, "capacity": 1, "row_bytes": 16, "scale_bytes": 0, "top_k": 1, "hidden": 8}
    with pytest.raises(ValueError, match=words):
        Shape(**good | change)
    with pytest.raises(ValueError, match="scale_bytes=1 must") as caught:
        Shape(**good | change | {"scale_bytes": 1})
    assert words in str(caught.value)


def test_every_vector_of_the_rows_that_are_allowed_has_a_number_of_31_bits() -> None:
    """`token * row_vectors + first` of csrc/record.cuh and reduce.cuh, for lanes past the end of a row as well."""
    narrow = {"ep_size": 1, "scale_bytes": 0, "top_k": 1}
    for row_bytes, hidden in ((14336, 7168), (16, 16384), (1 << 20, 8), (1 << 20, 1 << 19)):
        widest = max(row_bytes, 2 * hidden)
        capacity = min(MAX_CAPACITY, ((1 << 31) - 4 * LANES) * VECTOR_BYTES // widest)
        Shape(**narrow, row_bytes=row_bytes, hidden=hidden, capacity=capacity)
        vectors = widest // VECTOR_BYTES
        assert (capacity - 1) * vectors + (vectors - 1) + 4 * LANES - 1 < 1 << 31
        if capacity < MAX_CAPACITY:
            with pytest.raises(ValueError, match="can be numbered"):
                Shape(**narrow, row_bytes=row_bytes, hidden=hidden, capacity=capacity + 1)


def items(grid_step: int, grid_blocks: int, count: int) -> list[int]:
    """What blocks at 0 to grid_blocks - 1 take of `count` things, each with steps of `grid_step`."""
    return sorted(i for block in range(grid_blocks) for i in range(block, count, grid_step))


@given(
    st.sampled_from(Phase),
    protocols,
    any_shapes,
    st.integers(0, 8192),
    st.integers(1, 72),
    st.integers(0, 5000),
)
def test_a_grid_stays_within_what_is_resident_and_takes_everything_once(
    phase: Phase, protocol: Protocol, shape: Shape, tokens: int, local_ranks: int, spare: int
) -> None:
    at = layout(protocol, shape)
    names = set(kernel_names(protocol).values())
    resident = dict.fromkeys(names, least_blocks(local_ranks) + spare)
    chosen = step(phase, at, tokens, resident, local_ranks)
    assert chosen.kernel in names
    assert str(phase) in chosen.kernel
    x, y, z = chosen.grid
    assert least_blocks(local_ranks) <= x * y * z == chosen.blocks <= resident[chosen.kernel]
    assert x == local_ranks * chosen.chunk_blocks
    assert 1 <= y <= max(shape.ep_size - 1, 1)
    # place.cuh: peers by steps of gridDim.y, tokens by steps of half the layers, or of all but the first
    if protocol is Protocol.FENCE:
        token_blocks = z - 1
        assert chosen.chunk_blocks * token_blocks <= MAX_FLAGS  # a flag for each block that sends to one destination
    else:
        assert z % 2 == 0
        token_blocks = z // 2
    assert 1 <= token_blocks <= max(tokens, 1)
    assert items(y, y, shape.ep_size) == list(range(shape.ep_size))
    assert items(token_blocks, token_blocks, shape.capacity) == list(range(shape.capacity))


def test_few_tokens_spread_over_the_gpu_and_many_take_wide_vectors() -> None:
    """An H200: 132 multiprocessors, eight or six blocks each."""
    shape = Shape(ep_size=8, capacity=512, row_bytes=14336, scale_bytes=0, top_k=8, hidden=7168)
    for protocol in Protocol:
        names = kernel_names(protocol)
        resident = dict.fromkeys(names.values(), 792) | {names[Phase.DISPATCH, "narrow"]: 1056}
        at = layout(protocol, shape)
        one, some, many = (step(Phase.DISPATCH, at, tokens, resident) for tokens in (1, 8, 350))
        assert one.kernel == f"{protocol}_dispatch_narrow"
        assert one.grid == (8, 7, 2)  # 28 warps of a row and one of its tail, by fours; every peer; both roles
        assert some.kernel == f"{protocol}_dispatch_mid"
        assert some.grid == ((4, 7, 16) if protocol is Protocol.SENTINEL else (4, 7, 9))
        assert many.kernel == f"{protocol}_dispatch_wide"
        assert many.grid == ((2, 1, 2 * 198) if protocol is Protocol.SENTINEL else (2, 3, 128 + 1))
        back = step(Phase.COMBINE, at, 8, resident)
        assert back.kernel == f"{protocol}_combine_narrow"
        assert back.grid[0] == (8 if protocol is Protocol.SENTINEL else 7)


def test_many_tokens_take_blocks_that_hold_a_row_where_a_gpu_has_one_rank() -> None:
    """An H200, one such block on each multiprocessor; 28 warps a row."""
    names = kernel_names(Protocol.FENCE)
    resident = {name: 132 if variant == ROW else 792 for (_, variant), name in names.items()}
    for ep_size, peers in ((2, 1), (8, 1)):
        shape = Shape(ep_size=ep_size, capacity=4096, row_bytes=14336, scale_bytes=0, top_k=8, hidden=7168)
        at = layout(Protocol.FENCE, shape)
        assert step(Phase.DISPATCH, at, 357, resident).kernel == "fence_dispatch_wide"
        assert step(Phase.DISPATCH, at, 358, resident).kernel == "fence_dispatch_row"
        assert step(Phase.DISPATCH, at, 4096, resident).grid == (1, peers, 132)  # one awaits, the others move rows
        shared = {name: blocks for name, blocks in resident.items() if not name.endswith("row")}
        assert step(Phase.DISPATCH, at, 4096, shared).kernel == "fence_dispatch_wide"
    assert [usable(ROW, ranks) for ranks in (1, 2)] == [True, False]


@pytest.mark.parametrize(
    ("row_bytes", "scale_bytes", "served"),
    [
        (14336, 0, "row"),
        (14336, 2048 - 64, "row"),  # with ids and weights, the most that the tail's warp holds
        (14336, 2048 - 48, "wide"),
        (14352, 0, "wide"),  # 14 KB and a vector
        (7168, 224, "row"),
    ],
)
def test_rows_that_no_block_holds_take_wide(row_bytes: int, scale_bytes: int, served: str) -> None:
    names = kernel_names(Protocol.FENCE)
    resident = {name: 132 if variant == ROW else 792 for (_, variant), name in names.items()}
    shape = Shape(ep_size=2, capacity=4096, row_bytes=row_bytes, scale_bytes=scale_bytes, top_k=8, hidden=7168)
    chosen = step(Phase.DISPATCH, layout(Protocol.FENCE, shape), 4096, resident)
    assert chosen.kernel == f"fence_dispatch_{served}"
    assert (chosen.chunk_blocks == 1) is (served == "row")


def test_processes_that_share_a_gpu_share_its_room_and_a_kernel_let_in_ahead_takes_some() -> None:
    assert resident_blocks(8, 132) == 1056
    assert resident_blocks(8, 132, dependent=False) == 1056
    assert resident_blocks(8, 132, ranks_per_gpu=4) == 132
    assert resident_blocks(8, 132, ranks_per_gpu=4, dependent=False) == 264
    assert resident_blocks(8, 132, num_sms=16) == 128
    assert resident_blocks(8, 132, num_sms=1000) == 1056
    assert resident_blocks(8, 132, ranks_per_gpu=8, num_sms=16) == 8
    assert [resident_blocks(2, 132, num_sms=sms, most_per_sm=1) for sms in (1, 16, 132)] == [2, 32, 132]
