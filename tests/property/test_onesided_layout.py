"""What the kernels index against what the layout announces, and the grids: for every shape that may come."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.kernels.onesided.layout import (
    LANES,
    LINE_BYTES,
    MAX_FLAGS,
    MAX_RANKS,
    VECTOR_BYTES,
    Layout,
    Protocol,
    Shape,
    layout,
)
from epcross.kernels.onesided.plan import Phase, kernel_names, least_blocks, resident_blocks, step

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
                    row_vectors = shape.row_bytes // 16
                    for group in range(-(-row_vectors // LANES) + -(-(records - row_vectors) // LANES)):
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
        ({"capacity": 0}, "capacity=0 must be 1"),
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


@given(
    st.sampled_from(Phase),
    protocols,
    any_shapes,
    st.integers(0, 8192),
    st.integers(1, 72),
    st.integers(0, 5000),
)
def test_a_grid_stays_within_what_is_resident(
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
    assert 1 <= y <= shape.ep_size
    # csrc/place.cuh: Fence has a layer for flags, Sentinel one that receives for each that sends
    token_blocks = z - 1 if protocol is Protocol.FENCE else z // 2
    assert z == (token_blocks + 1 if protocol is Protocol.FENCE else 2 * token_blocks)
    assert 1 <= token_blocks <= max(tokens, 1)
    if protocol is Protocol.FENCE:  # a flag for each block that sends to one destination
        assert chosen.chunk_blocks * token_blocks <= MAX_FLAGS
    if not chosen.kernel.endswith("wide"):
        assert token_blocks == max(tokens, 1), "the next variant would have done"


def test_few_tokens_spread_over_the_gpu_and_many_take_wide_vectors() -> None:
    """An H200: 132 multiprocessors, eight or six blocks each."""
    shape = Shape(ep_size=8, capacity=512, row_bytes=14336, scale_bytes=0, top_k=8, hidden=7168)
    for protocol in Protocol:
        names = kernel_names(protocol)
        resident = {name: 792 if variant == "wide" else 1056 for (_, variant), name in names.items()}
        at = layout(protocol, shape)
        one, some, many = (step(Phase.DISPATCH, at, tokens, resident) for tokens in (1, 100, 512))
        assert one.kernel == f"{protocol}_dispatch_narrow"
        assert one.grid == (8, 8, 2)  # 28 + 1 warps for row and tail, four to a block; every peer; both roles
        if protocol is Protocol.FENCE:
            assert (some.kernel, some.grid) == ("fence_dispatch_wide", (2, 3, 101))
            assert (many.kernel, many.grid) == ("fence_dispatch_wide", (2, 3, 129))  # 256 flags
        else:
            assert (some.kernel, some.grid) == ("sentinel_dispatch_mid", (4, 1, 200))
            assert (many.kernel, many.grid) == ("sentinel_dispatch_wide", (2, 1, 396))
        assert step(Phase.COMBINE, at, 1, resident).grid[0] == (8 if protocol is Protocol.SENTINEL else 7)


def test_processes_that_share_a_gpu_share_its_room_and_a_kernel_let_in_ahead_takes_some() -> None:
    assert resident_blocks(8, 132) == 1056
    assert resident_blocks(8, 132, dependent=False) == 1056
    assert resident_blocks(8, 132, ranks_per_gpu=4) == 132
    assert resident_blocks(8, 132, ranks_per_gpu=4, dependent=False) == 264
    assert resident_blocks(8, 132, num_sms=16) == 128
    assert resident_blocks(8, 132, num_sms=1000) == 1056
    assert resident_blocks(8, 132, ranks_per_gpu=8, num_sms=16) == 8
