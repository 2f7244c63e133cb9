import ml_dtypes
import numpy as np
import pytest

from epcross.kernels.codecs import SCALE_BLOCK, bf16_to_float, decode, encode, float_to_bf16
from epcross.kernels.formats import RowFormat, row_size

EVERY_BYTE = np.arange(256, dtype=np.uint8)


def one_row(row_format, values, scales, hidden):
    size = row_size(row_format, hidden)
    row = np.zeros((1, size.padded_row_bytes), np.uint8)
    row[0, : len(values)] = values
    scale = np.zeros((1, size.padded_scale_bytes), np.uint8)
    scale[0, : len(scales)] = scales
    return decode(row_format, row, scale, hidden)[0]


def test_every_bf16_value_decodes_to_its_own_bits_shifted():
    bits = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(bf16_to_float(bits).view(np.uint32), bits.astype(np.uint32) << 16)
    back = float_to_bf16(bf16_to_float(bits))
    nan = np.isnan(bf16_to_float(bits))
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.isnan(bf16_to_float(back[nan])).all()


def test_bf16_rounds_to_nearest_even():
    ulp = 2.0**-7
    given = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2.0**-20, 3.4e38, -1 - ulp / 2], np.float32)
    assert bf16_to_float(float_to_bf16(given)).tolist() == [1, 1 + 2 * ulp, 1 + ulp, np.inf, -1]


@pytest.mark.parametrize("row_format", [RowFormat.FP8, RowFormat.MXFP8])
def test_every_e4m3_value_decodes_as_ml_dtypes_says(row_format):
    ones = np.ones(2, np.float32).view(np.uint8) if row_format is RowFormat.FP8 else np.full(8, 127, np.uint8)
    got = one_row(row_format, EVERY_BYTE, ones, 256)
    np.testing.assert_array_equal(got, EVERY_BYTE.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_every_pair_of_e2m1_values_decodes_low_bits_first():
    got = one_row(RowFormat.NVFP4, EVERY_BYTE, np.full(32, 0x38, np.uint8), 512)
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert table.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    np.testing.assert_array_equal(got[0::2], table[EVERY_BYTE & 15])
    np.testing.assert_array_equal(got[1::2], table[EVERY_BYTE >> 4])


def test_every_scale_multiplies_its_own_block():
    ones = np.full(256 * 32, 0x38, np.uint8)  # e4m3 1.0
    got = one_row(RowFormat.MXFP8, ones, EVERY_BYTE, 256 * 32).reshape(256, 32)
    want = np.ldexp(1.0, EVERY_BYTE[:255].astype(int) - 127)
    assert (got[:255] == want[:, None]).all()
    assert np.isnan(got[255]).all()
    got = one_row(RowFormat.NVFP4, np.full(256 * 8, 0x22, np.uint8), EVERY_BYTE, 256 * 16).reshape(256, 16)
    np.testing.assert_array_equal(got[:, 3], EVERY_BYTE.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    scales = np.array([0.1, 3e-5, 7e8], np.float32)
    got = one_row(RowFormat.FP8, ones[:300], scales.view(np.uint8), 300)
    assert np.array_equal(got, np.repeat(scales, 128)[:300])


@pytest.mark.parametrize("row_format", list(RowFormat))
@pytest.mark.parametrize("hidden", [256, 160, 66])
def test_encode_is_close_and_exact_on_what_it_has_decoded(row_format, hidden):
    values = np.random.default_rng(0).normal(size=(7, hidden)).astype(np.float32)
    values[2] = 0
    rows, scales = encode(row_format, values)
    size = row_size(row_format, hidden)
    assert rows.shape == (7, size.padded_row_bytes)
    assert scales.shape == (7, size.padded_scale_bytes)
    assert not rows[:, size.row_bytes :].any()
    assert not scales[:, size.scale_bytes :].any()
    got = decode(row_format, rows, scales, hidden)
    block = SCALE_BLOCK.get(row_format, 1)
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, hidden, block), axis=1)
    # half a step at the top of the block: 2**-9 of bf16, 2**-4 of e4m3 (mxfp8 may saturate 448 to 512), 1/6 of e2m1
    step = {RowFormat.BF16: 2.0**-8, RowFormat.FP8: 2.0**-4, RowFormat.MXFP8: 2.0**-3, RowFormat.NVFP4: 0.25}
    bound = np.repeat(largest, block, axis=1)[:, :hidden] * step[row_format]
    assert (np.abs(got - values) <= bound).all()
    assert not got[2].any()
    again = decode(row_format, *encode(row_format, got), hidden)
    if row_format in (RowFormat.BF16, RowFormat.MXFP8):
        assert np.array_equal(again, got)


def test_rows_of_another_size_are_refused():
    with pytest.raises(ValueError, match="are not padded rows of 256 and 0 bytes"):
        decode(RowFormat.BF16, np.zeros((1, 255), np.uint8), np.zeros((1, 0), np.uint8), 128)
