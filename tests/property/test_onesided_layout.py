"""What the kernels index against what the layout announces, and the grids: for every shape that may come."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.kernels.onesided import plan
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
from epcross.kernels.onesided.plan import (
    BLOCKS,
    PUSH,
    ROW,
    VARIANTS,
    Phase,
    kernel_names,
    least_blocks,
    pushes,
    resident_blocks,
    step,
    workspace_layout,
)

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
forms = st.sampled_from((*Protocol, PUSH))


def chunks_of(shape: Shape) -> int:
    """As fence_combine_push counts them."""
    return -(-shape.partial_vectors // (LANES * BLOCKS[PUSH].per_lane))


def arranged(form: str, shape: Shape) -> Layout:
    """The layout of a protocol, or that of Fence with room for what is pushed."""
    return layout(Protocol.FENCE, shape, chunks_of(shape)) if form == PUSH else layout(Protocol(form), shape)


def pushing(above_warps: int = 0) -> Any:
    """While it is entered, Fence pushes what is above so many warps, whoever shares a launch."""
    rows = ((above_warps, "wide", "mid"), (None, "wide", PUSH)) if above_warps else ((None, "wide", PUSH),)
    return mock.patch.multiple(plan, VARIANTS={**VARIANTS, Protocol.FENCE: rows}, LONE_LOCAL_RANKS=72)


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
            for token in range(shape.capacity if at.push_chunks else 0):
                for chunk in range(chunks_of(shape)):
                    flag = (token * chunks_of(shape) + chunk) * shape.ep_size + rank
                    yield "pushed_flags", start["pushed_flags"] + 8 * flag, 8
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
            returns = at.protocol is Protocol.SENTINEL or at.push_chunks
            kinds = ("partials", "returns") if returns else ("partials",)
            for kind in kinds:
                for vector in range(partials):
                    yield kind, start[kind] + row * at.partial_stride + 16 * vector, 16


@given(forms, small_shapes)
def test_everything_indexed_lies_in_its_region_and_nothing_twice(form: str, shape: Shape) -> None:
    at = arranged(form, shape)
    touched = bytearray(at.total_bytes)
    for name, first, size in indexed(at):
        region = at[name]
        assert region.offset <= first
        assert first + size <= region.offset + region.size, name
        assert first % min(size, VECTOR_BYTES) == 0 or name == "control", "an access that is not aligned"
        assert not any(touched[first : first + size]), f"{name} shares bytes"
        touched[first : first + size] = b"x" * size


@given(forms, any_shapes)
def test_regions_follow_one_another_and_every_row_begins_on_a_line(form: str, shape: Shape) -> None:
    at = arranged(form, shape)
    end = 0
    for region in at.regions:
        assert end <= region.offset < end + LINE_BYTES
        assert region.offset % LINE_BYTES == 0
        end = region.offset + region.size
    assert at.total_bytes == end
    assert at.record_stride % LINE_BYTES == at.partial_stride % LINE_BYTES == 0
    armed = {region.name for region in at.armed}
    polled = {"records_0", "records_1", "escapes_0", "escapes_1", "returns"}
    assert armed == (polled if form == Protocol.SENTINEL else set())


@given(forms, any_shapes)
def test_a_larger_capacity_never_takes_less(form: str, shape: Shape) -> None:
    more = replace(shape, capacity=shape.capacity + 1)
    assert arranged(form, more).total_bytes > arranged(form, shape).total_bytes


@given(protocols, any_shapes, st.integers(1, 72), st.integers(1, 40_000))
def test_there_is_room_for_pushed_partials_only_where_a_round_may_push(
    protocol: Protocol, shape: Shape, local_ranks: int, above_warps: int
) -> None:
    warps_of_row = -(-shape.partial_vectors // LANES)
    with pushing(above_warps):
        at = workspace_layout(protocol, shape, local_ranks)
        may = protocol is Protocol.FENCE and shape.capacity * warps_of_row * local_ranks > above_warps
        assert at == (arranged(PUSH, shape) if may else layout(protocol, shape))
        for tokens in {0, shape.capacity // 2, shape.capacity}:
            assert pushes(at, tokens, local_ranks) == (may and tokens * warps_of_row * local_ranks > above_warps)
        with mock.patch.object(plan, "LONE_LOCAL_RANKS", local_ranks - 1):  # they share a GPU: nothing is pushed
            alone = workspace_layout(protocol, shape, local_ranks)
            assert alone == layout(protocol, shape)
            assert not pushes(alone, shape.capacity, local_ranks)


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


@given(any_shapes, st.integers(0, 8192), st.integers(1, 72), st.integers(0, 5000))
def test_a_grid_that_pushes_stays_within_what_is_resident_and_takes_everything_once(
    shape: Shape, tokens: int, local_ranks: int, spare: int
) -> None:
    with pushing():
        at = workspace_layout(Protocol.FENCE, shape, local_ranks)
        resident = dict.fromkeys(kernel_names(Protocol.FENCE).values(), least_blocks(local_ranks) + spare)
        chosen = step(Phase.COMBINE, at, tokens, resident, local_ranks)
    assert chosen.kernel == "fence_combine_push"
    x, y, z = chosen.grid
    assert least_blocks(local_ranks) <= x * y * z == chosen.blocks <= resident[chosen.kernel]
    assert x == local_ranks * chosen.chunk_blocks
    assert 1 <= y <= max(shape.ep_size - 1, 1)
    assert z % 2 == 0
    assert 1 <= z // 2 <= max(tokens, 1)
    # halves as in place.cuh: chunks by steps of a rank's warps, peers by gridDim.y, tokens by half the layers
    assert chosen.chunk_blocks == 1  # a row has one flag, so one block
    assert items(BLOCKS[PUSH].warps, BLOCKS[PUSH].warps, chunks_of(shape)) == list(range(chunks_of(shape)))
    assert items(y, y, shape.ep_size - 1) == list(range(shape.ep_size - 1))
    # fence_push.cuh: a warp pushes two tokens of a peer at a turn, and adds own tokens by steps of both
    pushed = [t + g * (z // 2) for first in range(z // 2) for t in range(first, tokens, z) for g in range(2)]
    assert sorted(t for t in pushed if t < tokens) == list(range(tokens))
    own = [t for token in range(z // 2) for peer in range(y) for t in range(token * y + peer, tokens, z // 2 * y)]
    assert sorted(own) == list(range(tokens))


def test_many_tokens_are_pushed_by_every_peer_first() -> None:
    """H200s: two ranks, and eight."""
    shape = Shape(ep_size=2, capacity=4096, row_bytes=14336, scale_bytes=0, top_k=8, hidden=7168)
    resident = dict.fromkeys(kernel_names(Protocol.FENCE).values(), 396)
    with pushing(30_000):
        at = workspace_layout(Protocol.FENCE, shape)
        assert at["returns"].size == at["partials"].size == 2 * 4096 * 14336
        assert at["pushed_flags"].size == 2 * 4096 * 7 * 8
        assert step(Phase.COMBINE, at, 4096, resident).grid == (1, 1, 2 * 198)
        assert step(Phase.COMBINE, at, 1071, resident).kernel == "fence_combine_mid"  # 28 warps a row
        assert step(Phase.COMBINE, at, 1072, resident).kernel == "fence_combine_push"
        eight = workspace_layout(Protocol.FENCE, replace(shape, ep_size=8))
        assert step(Phase.COMBINE, eight, 4096, resident).grid == (1, 7, 2 * 28)


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
        assert step(Phase.DISPATCH, at, 4096, resident, local_ranks=2).kernel == "fence_dispatch_wide"


def test_processes_that_share_a_gpu_share_its_room_and_a_kernel_let_in_ahead_takes_some() -> None:
    assert resident_blocks(8, 132) == 1056
    assert resident_blocks(8, 132, dependent=False) == 1056
    assert resident_blocks(8, 132, ranks_per_gpu=4) == 132
    assert resident_blocks(8, 132, ranks_per_gpu=4, dependent=False) == 264
    assert resident_blocks(8, 132, num_sms=16) == 128
    assert resident_blocks(8, 132, num_sms=1000) == 1056
    assert resident_blocks(8, 132, ranks_per_gpu=8, num_sms=16) == 8
