"""Tiles of `gather_gemm` that `gpu_experts.py` measures. Each is the default of its shape, but for what it names.

They are what a sweep on an H200 found near the best, and the forms before those that proved best. One that is best by
now becomes a line of `DEFAULTS` in gather/tiles.py.
"""

from collections.abc import Iterator

from epcross.kernels.experts.formats import ExpertShape, WeightFormat
from epcross.kernels.experts.gather.tiles import chosen_tiles, default_tiles

Tiles = dict[str, int]

_SHORT = {"down_block_n": 128, "down_stages": 2, "down_per_sm": 4, "down_regs": 128}
_NARROW = {"down_block_n": 64, "down_stages": 4, "down_per_sm": 4, "down_regs": 128}
_DEEP = {"down_block_n": 128, "down_stages": 5, "down_per_sm": 2, "down_regs": 255}
_BALANCED, _LATE_TURN, _SOON = {"balance": 1}, {"balance": 2}, {"ahead": 256, "early": 1}
_TALL = {"block_t": 64, "tall": 1, "warps": 8, "per_sm": 1, "stages": 4}
_WHOLE = _TALL | {"block_t": 128}
_DOWN_TWO = {"down_tall": 1, "down_warps": 4, "down_per_sm": 2, "down_stages": 4, "down_regs": 255}
_DOWN_THREE = {"down_block_n": 64, "down_per_sm": 3, "down_stages": 4, "down_regs": 168}
_DOWN_PAIR = {"down_tall": 1, "down_pair": 1, "down_warps": 8, "down_per_sm": 1, "down_stages": 4, "down_regs": 255}
_DOWN_DEEP = {"down_tall": 1, "down_warps": 4, "down_per_sm": 2, "down_stages": 3, "down_regs": 255}
_LATE = _TALL | {"late": 1} | _LATE_TURN | _DOWN_TWO
_ALONE = _WHOLE | {"alone": 1} | _LATE_TURN | _DOWN_PAIR | {"rounded": 1, "finish_per_sm": 8}
_SPECIALISED = {"specialised": 1}

Rows = list[tuple[int, int, list[Tiles]]]  # least and most pairs of an expert
_FP8: Rows = [
    (1, 4, [_SHORT, _NARROW, _NARROW | _SOON, _DEEP | _SOON, {"ahead": 512, "early": 1}]),
    (5, 10, [_SHORT | _BALANCED, _NARROW | _BALANCED, _DEEP | _BALANCED, {"warps": 4, "per_sm": 1, "stages": 6}]),
    (11, 24, [_SHORT | _BALANCED, _DEEP | _BALANCED, _NARROW | _BALANCED, _SPECIALISED]),
    (25, 48, [_LATE, _LATE | _DOWN_THREE, _LATE | {"stages": 5}, _SPECIALISED]),
    (49, 100, [_LATE, _LATE | _DOWN_THREE, _ALONE, _SPECIALISED, _SPECIALISED | _BALANCED]),
    (101, 1 << 30, [
        _LATE, _ALONE, _SPECIALISED | {"finish_per_sm": 16, "finish_block_n": 1024},
        _SPECIALISED | {"finish_per_sm": 4, "finish_block_n": 8192},
    ]),
]  # fmt: skip
_BF16: Rows = [
    (1, 10, [
        _BALANCED, _BALANCED | _SOON, {"warps": 8, "per_sm": 2, "stages": 3, "regs": 128}, {"stages": 5, "per_sm": 1},
    ]),
    (11, 24, [_BALANCED, {"block_t": 16} | _BALANCED | _SOON, {"stages": 5}]),
    (25, 48, [_LATE_TURN | {"down_warps": 8}, {"block_t": 32, "warps": 8, "per_sm": 1}]),
    (49, 1 << 30, [
        _TALL | _LATE_TURN | _DOWN_DEEP, _WHOLE | _LATE_TURN | _DOWN_DEEP, _WHOLE | _LATE_TURN | _DOWN_PAIR,
    ]),
]  # fmt: skip


def choices(shape: ExpertShape) -> Iterator[Tiles]:
    """Programs that are to share a multiprocessor do, and no sum spills: a test holds all of these to that."""
    pairs = shape.expected_rows_per_expert or 1
    usual = default_tiles(shape)
    seen = {default_tiles(shape, specialised=True)}
    for least, most, found in _FP8 if shape.weight_format is WeightFormat.FP8 else _BF16:
        for tiles in found if least <= pairs <= most else ():
            asked = tiles if "specialised" in tiles else {"block_t": usual.block_t, **tiles}
            if (chosen := chosen_tiles(shape, asked)) not in seen:
                seen.add(chosen)
                yield asked
