"""The workspace layout, for any shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcross.kernels.formats import RowFormat, padded, row_size
from epcross.kernels.shm.layout import ESCAPE_BITS, LINE_BYTES, WORD_BYTES, ProtocolName, Shape, layout

shapes = st.builds(
    Shape,
    ep_size=st.integers(1, 72),
    capacity=st.integers(0, 1025),
    row_bytes=st.integers(1, 20000).map(padded),
    scale_bytes=st.integers(0, 500).map(padded),
    top_k=st.integers(1, 17),
    hidden=st.integers(1, 8193),
)


@given(shapes, st.sampled_from(ProtocolName))
def test_regions_lie_one_after_the_other_on_lines(shape: Shape, protocol: ProtocolName) -> None:
    placed = layout(protocol, shape)
    end = 0
    for region in placed.regions:
        assert region.offset == end
        assert region.offset % LINE_BYTES == 0
        end += region.size
    assert placed.total_bytes == end
    assert len({region.name for region in placed.regions}) == len(placed.regions)


@given(shapes)
def test_the_parts_of_a_record_follow_each_other_and_fit(shape: Shape) -> None:
    placed = layout(ProtocolName.SENTINEL, shape)
    assert placed.scale_at == shape.row_bytes
    assert placed.ids_at == placed.scale_at + shape.scale_bytes
    assert placed.weights_at == placed.ids_at + 4 * shape.top_k
    assert placed.header_at == placed.weights_at + 4 * shape.top_k
    assert placed.header_at % WORD_BYTES == 0
    assert placed.header_at + WORD_BYTES <= placed.record_bytes < placed.header_at + WORD_BYTES + LINE_BYTES
    assert placed.record_words * WORD_BYTES == placed.header_at + WORD_BYTES
    assert placed.metadata_bytes == 8 * shape.top_k
    assert placed.escape_bytes // WORD_BYTES * ESCAPE_BITS >= placed.header_at // WORD_BYTES
    assert 2 * shape.hidden <= placed.partial_bytes < 2 * shape.hidden + LINE_BYTES
    for stride in (placed.record_bytes, placed.escape_bytes, placed.partial_bytes):
        assert stride % LINE_BYTES == 0


@given(shapes, st.sampled_from(ProtocolName))
def test_every_slot_of_every_rank_lies_inside_its_region(shape: Shape, protocol: ProtocolName) -> None:
    placed = layout(protocol, shape)
    strides = {"records": placed.record_bytes, "partials": placed.partial_bytes, "escapes": placed.escape_bytes}
    for region in placed.regions:
        stem = region.name.removesuffix("_0").removesuffix("_1")
        if stem in strides:
            assert region.size == shape.ep_size * shape.capacity * strides[stem]
        else:
            assert region.size == (LINE_BYTES if stem == "control" else shape.ep_size * LINE_BYTES)


def test_a_deepseek_workspace_has_the_size_worked_out_by_hand() -> None:
    size = row_size(RowFormat.BF16, 7168)
    shape = Shape(
        ep_size=2,
        capacity=512,
        row_bytes=size.padded_row_bytes,
        scale_bytes=size.padded_scale_bytes,
        top_k=8,
        hidden=7168,
    )
    # record: 14336 row + 64 ids and weights + 8 header, on lines: 14464; partial: 14336
    assert layout(ProtocolName.FENCE, shape).total_bytes == 64 + 2 * 128 + 1024 * (14464 + 14336)
    # bitmap: 1800 words of payload, 32 to a word: 57 words, on lines: 512 bytes
    assert layout(ProtocolName.SENTINEL, shape).total_bytes == 64 + 2 * (128 + 1024 * (14464 + 14336 + 512))
    assert layout(ProtocolName.TWO_SIDED, shape).total_bytes == 64 + 3 * 128 + 1024 * (14464 + 14336)


def test_all_problems_of_a_shape_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"ep_size=0 must be at least 1; top_k=0 .*; row_bytes=24 .*multiple of 16"):
        Shape(ep_size=0, capacity=1, row_bytes=24, scale_bytes=0, top_k=0, hidden=8)
