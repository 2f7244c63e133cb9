"""Tiles of `gather_gemm` that `gpu_experts.py` measures: what a sweep on an H200 found within 2 % of the best, and what
none has had yet. Each is the default of its shape, but for what it names."""

from collections.abc import Iterator

from epcross.kernels.experts.formats import ExpertShape, WeightFormat
from epcross.kernels.experts.gather_gemm import default_tiles

Tiles = dict[str, int]

_LATE = {"block_t": 64, "tall": 1, "warps": 8, "per_sm": 1, "stages": 4, "late": 1}
_TALL_IN_TURN = {"block_t": 64, "tall": 1, "in_turn": 1, "warps": 4, "per_sm": 2, "stages": 4}
_TALL_DOWN = {"down_tall": 1, "down_warps": 4, "down_per_sm": 2, "down_stages": 4, "down_regs": 255}
_FP8: dict[int, list[Tiles]] = {
    16: [
        {"warps": 4, "per_sm": 1, "stages": 6},
        {"warps": 8, "per_sm": 2, "stages": 3, "regs": 128},
        {"in_turn": 1, "warps": 4, "per_sm": 3, "stages": 4, "regs": 128},
        {"prefetch": 1024},
        {"balance": 2},
    ],
    32: [
        {"warps": 8, "per_sm": 2, "stages": 3, "regs": 128},
        {"in_turn": 1, "warps": 4, "per_sm": 2, "stages": 4},
        {"down_warps": 8, "down_per_sm": 2, "down_stages": 5, "down_regs": 128},
        {"late": 1},
        _LATE | _TALL_DOWN,
        _TALL_IN_TURN | _TALL_DOWN,
    ],
    64: [
        {"balance": 1},
        {"stages": 5},
        {"down_per_sm": 3, "down_stages": 3, "down_regs": 168},
        {"in_turn": 1, "warps": 4, "per_sm": 2},
    ],
}
_MANY_DOWN = {"down_tall": 1, "down_block_n": 64, "down_warps": 8, "down_per_sm": 2, "down_stages": 4, "down_regs": 128}
_MANY = {"block_t": 128, "balance": 2, "tall": 1, "per_sm": 1}
_FP8_MANY: list[Tiles] = [  # from 64 pairs on
    _MANY | {"in_turn": 1, "warps": 8, "stages": 6} | _MANY_DOWN,
    _MANY | {"warps": 16, "stages": 4} | _MANY_DOWN,
]
_FEW_BF16: list[Tiles] = [
    {"warps": 4, "per_sm": 1, "stages": 5},
    {"warps": 8, "per_sm": 2, "stages": 3, "regs": 128},
    {"prefetch": 1024},
    {"balance": 1},
]
_BF16: dict[int, list[Tiles]] = {
    16: _FEW_BF16,
    32: [*_FEW_BF16, *({"block_t": 16} | tiles for tiles in _FEW_BF16)],
    64: [
        {"warps": 8, "per_sm": 1, "stages": 3},
        {"warps": 16, "per_sm": 1, "stages": 4},
        {"warps": 16, "per_sm": 1, "stages": 5},
        {"warps": 4, "per_sm": 1, "stages": 3},
        {"down_warps": 8, "down_per_sm": 2, "down_stages": 4, "down_regs": 128},
        {"down_warps": 8, "down_per_sm": 2, "down_stages": 3, "down_regs": 128},
        {"down_warps": 4, "down_per_sm": 2, "down_stages": 4},
        {"down_block_n": 64, "down_warps": 4, "down_per_sm": 3, "down_stages": 4},
        {"down_warps": 8, "down_per_sm": 1, "down_stages": 7},
        {"prefetch": 1024},
        *({"block_t": 32} | tiles for tiles in _FEW_BF16),
    ],
}


def choices(shape: ExpertShape) -> Iterator[Tiles]:
    """Programs that are to share a multiprocessor do, and no sum spills: a test holds all of these to that."""
    fp8, usual = shape.weight_format is WeightFormat.FP8, default_tiles(shape).block_t
    for tiles in (_FP8 if fp8 else _BF16)[usual]:
        yield {"block_t": usual, **tiles}
    if fp8 and shape.expected_rows_per_expert >= 64:
        yield from _FP8_MANY
