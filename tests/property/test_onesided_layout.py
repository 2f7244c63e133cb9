"""What the kernels index against what the layout announces, and the grids: for every shape that may come."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.kernels.onesided.layout import LANES, LINE_BYTES, MAX_RANKS, VECTOR_BYTES, Layout, Protocol, Shape, layout
from epcross.kernels.onesided.plan import BLOCK_THREADS, Phase, chunks_of, kernel_names, resident_blocks, step

PER_LANE = {"wide": 4}

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

    As `Places`, `RankMask` and `Control` of csrc have it, and not as layout.py computes it.
    """
    shape, start = at.shape, {region.name: region.offset for region in at.regions}
    records, partials = shape.record_vectors, shape.partial_vectors
    yield "control", start["control"], 24
    for token in range(shape.capacity):
        for masks in ("sent_masks", "received_masks"):
            yield masks, start[masks] + 16 * token, 16
    for source in range(shape.ep_size):
        if at.protocol is Protocol.FENCE:
            for flags in ("dispatch_flags", "combine_flags"):
                yield flags, start[flags] + 8 * source, 8
        for token in range(shape.capacity):
            row = source * shape.capacity + token
            for parity in range(at.sets):
                headers, record = f"headers_{parity}", f"records_{parity}"
                yield headers, start[headers] + 8 * (token * shape.ep_size + source), 8
                for vector in range(records):
                    yield record, start[record] + row * at.record_stride + 16 * vector, 16
                if at.protocol is Protocol.SENTINEL:
                    escapes = f"escapes_{parity}"
                    for group in range(-(-records // LANES)):
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
    polled = {"headers_0", "headers_1", "records_0", "records_1", "escapes_0", "escapes_1", "returns"}
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
    st.integers(1, 5000),
)
def test_a_grid_stays_within_what_is_resident_and_its_items_cover_every_vector(
    phase: Phase, protocol: Protocol, shape: Shape, tokens: int, local_ranks: int, spare: int
) -> None:
    at = layout(protocol, shape)
    names = {name for pair in kernel_names(protocol, shape.ep_size).values() for name in pair}
    resident = dict.fromkeys(names, local_ranks + spare)
    chosen = step(phase, at, tokens, resident, local_ranks)
    assert chosen.kernel in names
    assert str(phase) in chosen.kernel
    assert local_ranks <= chosen.blocks <= resident[chosen.kernel]
    assert chosen.blocks % local_ranks == 0
    vectors = shape.record_vectors if phase is Phase.DISPATCH else shape.partial_vectors
    if phase is Phase.COMBINE and protocol is Protocol.SENTINEL:
        vectors = max(vectors, shape.record_vectors)  # which it arms
    width = LANES * PER_LANE.get(chosen.kernel.rpartition("_")[2], 1)
    assert (chosen.chunks - 1) * width < vectors <= chosen.chunks * width
    assert chosen.chunks == chunks_of(phase, at, chosen.kernel)
    warps = chosen.blocks // local_ranks * BLOCK_THREADS // LANES
    full = chosen.blocks // local_ranks == resident[chosen.kernel] // local_ranks
    assert warps >= tokens * chosen.chunks or full, "warps are left out although there is room"


@given(st.integers(1, 96))
def test_the_kernel_for_few_ranks_looks_at_all_peers(ep_size: int) -> None:
    small, wide = kernel_names(Protocol.SENTINEL, ep_size)[Phase.DISPATCH]
    variant = small.rpartition("_")[2]
    assert wide == "sentinel_dispatch_wide"
    if ep_size <= 8:
        assert ep_size - 1 <= int(variant.removeprefix("few"))
    else:
        assert variant == "many"


def test_processes_that_share_a_gpu_share_its_room_and_a_kernel_let_in_ahead_takes_some() -> None:
    assert resident_blocks(4, 132) == 528
    assert resident_blocks(4, 132, dependent=False) == 528
    assert resident_blocks(4, 132, ranks_per_gpu=4) == 66
    assert resident_blocks(4, 132, ranks_per_gpu=4, dependent=False) == 132
    assert resident_blocks(4, 132, num_sms=16) == 16
    assert resident_blocks(4, 132, ranks_per_gpu=8, num_sms=100) == 33
