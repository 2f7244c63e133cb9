"""Tiles of `gather_gemm` that `gpu_experts.py` measures. Each is the default of its shape, but for what it names.

`choices` has what a sweep on an H200 found within 2 % of the best, and what none had then; `newest` what none has had
yet. A form that proves best becomes a line of `DEFAULTS` in gather/tiles.py.
"""

from collections.abc import Iterator

from epcross.kernels.experts.formats import ExpertShape, WeightFormat
from epcross.kernels.experts.gather.tiles import default_tiles

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


_WHOLE = {"block_t": 128, "tall": 1, "warps": 8, "per_sm": 1, "stages": 4}  # GEMM1 of 128 pairs; fp8 needs `alone`
_ALONE = _WHOLE | {"alone": 1}
_DOWN_ONE = {"down_tall": 1, "down_warps": 8, "down_per_sm": 1, "down_stages": 6}
_DOWN_PAIR = {"down_tall": 1, "down_pair": 1, "down_warps": 8, "down_per_sm": 1, "down_stages": 4}
_DOWN_HALVES = {
    "down_pair": 1,
    "down_block_n": 64,
    "down_warps": 4,
    "down_per_sm": 2,
    "down_stages": 3,
    "down_regs": 255,
}
_DOWN_TWO_BF16 = {"down_tall": 1, "down_warps": 4, "down_per_sm": 2, "down_stages": 3, "down_regs": 255}
_NARROW_DOWN = {"down_block_n": 64, "down_per_sm": 3, "down_stages": 4, "down_regs": 168}
_DEEP_DOWN = {"down_per_sm": 2, "down_stages": 5}
_SOON = {"ahead": 256, "early": 1}
_NEWEST_FP8: list[tuple[int, int, int, list[Tiles]]] = [  # least and most pairs of an expert, most experts
    (1, 10, 4, [
        _DEEP_DOWN, {"down_stages": 3}, {"down_block_n": 64, "down_stages": 4}, {"ahead": 256}, _SOON | _DEEP_DOWN,
    ]),
    (5, 10, 8, [{"balance": 1}, {"balance": 1, **_SOON}, {"balance": 1, "down_stages": 3}]),
    (11, 24, 4, [
        {"balance": 1}, {"balance": 1, **_DEEP_DOWN}, {"balance": 1, "down_block_n": 64, "down_stages": 4},
        {"balance": 1, **_SOON, **_DEEP_DOWN},
    ]),
    (25, 48, 8, [_NARROW_DOWN, _SOON]),
    (49, 127, 16, [
        _ALONE | _DOWN_HALVES | {"balance": 1, "down_tall": 1}, _ALONE | _DOWN_ONE | {"balance": 2}, _NARROW_DOWN,
        _SOON,
    ]),
    (128, 1 << 20, 256, [
        _ALONE | _DOWN_PAIR | {"balance": 2, "rounded": 1, "finish_per_sm": 8},
        _ALONE | _DOWN_HALVES | {"balance": 2, "rounded": 1, "finish_per_sm": 8, "down_tall": 1},
        _ALONE | _DOWN_HALVES | {"balance": 2, "finish_per_sm": 8},
        _ALONE | _DOWN_ONE | {"balance": 2},
        _WHOLE | {"warps": 16, "balance": 2} | _DOWN_PAIR | {"down_warps": 16, "down_regs": 128},
    ]),
]  # fmt: skip
_NEWEST_BF16: list[tuple[int, int, int, list[Tiles]]] = [
    (25, 127, 4, [
        {"balance": 2}, {"balance": 2, "down_warps": 4, "down_per_sm": 2}, _WHOLE | _DOWN_TWO_BF16 | {"balance": 1},
        _WHOLE | _DOWN_TWO_BF16 | {"balance": 2},
    ]),
    (128, 1 << 20, 256, [
        {"balance": 2, "down_warps": 4, "down_per_sm": 2}, _WHOLE | _DOWN_TWO_BF16 | {"balance": 2},
        _WHOLE | _DOWN_PAIR | {"balance": 2},
    ]),
]  # fmt: skip


def newest(shape: ExpertShape) -> Iterator[Tiles]:
    """As `choices`, of forms that no GPU has run yet."""
    pairs, experts = shape.expected_rows_per_expert or 1, shape.num_local_experts
    rows = _NEWEST_FP8 if shape.weight_format is WeightFormat.FP8 else _NEWEST_BF16
    for least, most, most_experts, found in rows:
        if least <= pairs <= most and experts <= most_experts:
            for tiles in found:
                yield {"block_t": default_tiles(shape).block_t, **tiles}
