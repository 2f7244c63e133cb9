"""Weights and quantisation of experts: the same bits however they are cut, and those of the formats' definitions."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

import torch

from epcross.kernels.codecs import encode
from epcross.kernels.experts import weights as made
from epcross.kernels.experts.formats import ExpertShape, WeightFormat
from epcross.kernels.experts.quantise import fp4_values, quantise_fp4, quantise_fp8_blocks, quantise_fp8_rows
from epcross.kernels.formats import RowFormat

from tests._experts import shape_of  # isort: skip

few = settings(max_examples=25, deadline=None)


def drawn(seed: int, rows: int, columns: int) -> np.ndarray:
    """Of many sizes, some blocks zero."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, columns)) * 2.0 ** generator.integers(-20, 20, (rows, 1))
    values[generator.random((rows, columns)) < 0.3] = 0
    values[0, : min(128, columns)] = 0
    return values.astype(np.float32)


@few
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_fp8_rows_are_those_that_travel(seed: int, rows: int, blocks: int) -> None:
    values = drawn(seed, rows, 128 * blocks)
    codes, scales = quantise_fp8_rows(torch.from_numpy(values))
    wanted, wanted_scales = encode(RowFormat.FP8, values)
    assert np.array_equal(codes.view(torch.uint8).numpy(), wanted[:, : 128 * blocks])
    assert np.array_equal(scales.numpy(), wanted_scales.view(np.float32)[:, :blocks])


@few
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 3), columns=st.integers(1, 3))
def test_fp8_blocks_share_the_largest_of_128_by_128(seed: int, rows: int, columns: int) -> None:
    values = drawn(seed, 128 * rows, 128 * columns)
    codes, scales = quantise_fp8_blocks(torch.from_numpy(values))
    for row in range(rows):
        for column in range(columns):
            part = np.s_[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            largest = np.abs(values[part]).max()
            scale = np.float32(largest / np.float32(448)) if largest > 0 else np.float32(1)
            assert scales[row, column] == scale
            wanted = (values[part] / scale).astype(ml_dtypes.float8_e4m3fn)
            assert np.array_equal(codes.view(torch.uint8).numpy()[part], wanted.view(np.uint8))


@few
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 6))
def test_fp4_is_what_the_mx_standard_says(seed: int, rows: int, blocks: int) -> None:
    values = drawn(seed, rows, 32 * blocks)
    packed, exponents = quantise_fp4(torch.from_numpy(values))
    parts = values.reshape(rows, blocks, 32)
    shared = np.clip(np.frexp(np.abs(parts).max(-1))[1] - 1 - 2, -126, 127)
    assert np.array_equal(exponents.numpy(), shared + 127)
    scaled = np.clip(np.ldexp(parts, -shared[..., None]), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    found = fp4_values(packed, torch.float32).numpy().reshape(parts.shape)
    assert np.array_equal(found, scaled.astype(np.float32))


def test_powers_of_two_are_the_next_above() -> None:
    values = torch.from_numpy(drawn(1, 4, 256))
    _, exact = quantise_fp8_rows(values)
    _, rounded = quantise_fp8_rows(values, power_of_two=True)
    assert torch.equal(rounded, torch.exp2(torch.log2(exact.double()).ceil()).float())


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_an_expert_is_the_same_whoever_holds_it(weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: ExpertShape = shape_of(RowFormat.FP8, weight_format, num_local_experts=3, first_slot=4)
    whole = made.make_weights(shape, seed=7, device="cpu", copies=2)
    assert len({tensor.data_ptr() for copy in whole.copies for tensor in copy.tensors()}) == 2 * len(
        whole.copies[0].tensors()
    )
    monkeypatch.setattr(made, "_CHUNK_VALUES", 128 * 256)  # made in many parts
    other = made.make_weights(replace(shape, num_local_experts=2, first_slot=5), seed=7, device="cpu")
    for copy in whole.copies:
        for all_of_it, part in zip(copy.tensors(), other.copies[0].tensors(), strict=True):
            assert torch.equal(all_of_it[1:].contiguous().view(torch.uint8), part.view(torch.uint8))
    changed = made.make_weights(shape, seed=8, device="cpu")
    assert not torch.equal(changed.copies[0].down.view(torch.uint8), whole.copies[0].down.view(torch.uint8))
    stored = sum(tensor.nbytes for tensor in whole.copies[0].tensors())
    assert stored == 3 * shape.bytes_per_expert


def test_values_are_spread_as_a_layer_wants_them() -> None:
    """Sums of `columns` products keep the size of what goes in; scales differ, so that a wrong one shows."""
    shape = shape_of(RowFormat.FP8, WeightFormat.FP8, hidden=1024, intermediate=512)
    copy = made.make_weights(shape, seed=1, device="cpu").copies[0]
    values = made.decoded(WeightFormat.FP8, copy.gate_up, copy.gate_up_scales, torch.float64)
    assert float((values.square().mean() * 1024).sqrt()) == pytest.approx(1, abs=0.1)
    assert abs(float(values.mean())) * 1024**0.5 < 0.01
    assert copy.gate_up_scales is not None
    assert copy.gate_up_scales.max() > 2.5 * copy.gate_up_scales.min()
    assert not torch.equal(copy.gate_up[0].view(torch.uint8), copy.gate_up[1].view(torch.uint8))


@pytest.mark.parametrize(
    ("read", "cache", "wanted"), [(100, 30, 1), (60, 30, 1), (59, 30, 2), (10, 30, 6), (0, 30, 60)]
)
def test_copies_pass_twice_the_cache(read: int, cache: int, wanted: int) -> None:
    assert made.copies_needed(read, cache) == wanted
    assert wanted * max(read, 1) >= 2 * cache or wanted == 1
