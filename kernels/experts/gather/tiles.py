"""How `gather_gemm` cuts its work: what may be chosen, what is where nothing is, and what cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from epcross.kernels.experts.formats import ExpertShape, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the work is cut. `per_sm` programs of a kernel share a multiprocessor, if its shared memory and its 65536
    registers suffice; else some of them wait for others to end."""

    block_t: int  # pairs of a tile, in both products
    block_n: int = 128  # GEMM1: columns of the intermediate, each of gate and up
    stages: int = 3
    warps: int = 4
    per_sm: int = 2
    down_block_n: int = 128  # GEMM2: columns of the output
    down_stages: int = 5
    down_warps: int = 4
    down_per_sm: int = 2
    prefetch: int = 0  # bytes of each row of GEMM2's first weights that a program fetches while GEMM1 ends
    balance: int = 0  # 1: GEMM1's sums are shared so that the last turn of the programs is full, not by powers of two;
    # 2: those of the last turn are, and others are not shared
    regs: int = 0  # registers that a thread of GEMM1 may take; 0 or 255: as many as the compiler likes
    down_regs: int = 0  # likewise of GEMM2
    tall: int = 0  # 1: tokens are the tall operand of GEMM1, not the wide one; from tiles of 64 pairs on
    in_turn: int = 0  # 1: GEMM1 sums all of gate, then all of up: a stage without one of its two blocks of weights; fp8
    down_tall: int = 0  # as `tall`, of GEMM2
    late: int = 0  # 1: GEMM1 scales products of up a step later, and tensor cores do not wait for that; fp8
    alone: int = 0  # 1: GEMM1 scales a product before it begins the next, so there are registers of one of them; fp8
    down_pair: int = 0  # 1: a unit of GEMM2 has two blocks of `down_block_n` columns; in fp8 their products are `alone`
    ahead: int = 0  # bytes of each row of GEMM1's first weights that a program fetches while the index is made
    finish_per_sm: int = 4
    finish_block_n: int = 1024  # columns of a row that are added at once
    rounded: int = 0  # 1: what GEMM2 makes of pairs whose row has others here is kept as bf16, not fp32
    early: int = 0  # 1: the index's kernel is brought up while the one before it ends, as the others always are
    specialised: int = 0  # 1: warps of both products copy or multiply, see gather/specialised.py; fp8


_BLOCKS, _WARPS, _COUNTS, _REGISTERS = (16, 32, 64, 128), (4, 8, 16), tuple(range(1, 17)), (64, 80, 96, 128, 168, 255)
_BYTES = (128, 256, 512, 1024, 2048)
_TALLEST = 64  # rows of the tensor cores' product, of the tall operand
_STAGE_ROW_BYTES = 128  # one swizzle of shared memory, in either format
_BLOCK_BYTES = 227 * 1024  # compute capability 9.0 and 10.0; CUDA Programming Guide, technical specifications
_ORDERS = ("in_turn", "late", "alone")  # of GEMM1's products and what scales them: one at most, of fp8
ALLOWED: dict[str, tuple[int, ...]] = {
    "block_t": _BLOCKS, "block_n": _BLOCKS, "stages": _COUNTS, "warps": _WARPS, "per_sm": _COUNTS,
    "down_block_n": _BLOCKS, "down_stages": _COUNTS, "down_warps": _WARPS, "down_per_sm": _COUNTS,
    "prefetch": _BYTES, "balance": (1, 2), "regs": _REGISTERS, "down_regs": _REGISTERS,
    "tall": (1,), "in_turn": (1,), "down_tall": (1,), "late": (1,), "alone": (1,), "down_pair": (1,), "ahead": _BYTES,
    "finish_per_sm": _COUNTS, "finish_block_n": (1024, 2048, 4096, 8192), "rounded": (1,), "early": (1,),
    "specialised": (1,),
}  # fmt: skip
"""What each field of `Tiles` may be, beside 0, its default: tiles divide 128, and warps in fours make a product."""

# GEMM2's units are short: while one of four programs begins or ends its own, the others read
_SHORT = {"down_stages": 2, "down_per_sm": 4, "down_regs": 128}
_NARROW = _SHORT | {"down_block_n": 64, "down_stages": 4}  # as many programs have work where there are few experts
_TALL_DOWN = {"down_tall": 1, "down_stages": 4, "down_regs": 255}
_DOWN_BF16 = {"down_tall": 1, "down_warps": 4, "down_per_sm": 2, "down_stages": 3, "down_regs": 255}
_SOON = {"ahead": 256, "early": 1}
_MANY = {"rounded": 1, "finish_per_sm": 12, "finish_block_n": 2048}  # most rows have several pairs: 1 GB at 8192 rows
_LATE = Tiles(block_t=64, stages=4, warps=8, per_sm=1, tall=1, late=1, balance=2, **_TALL_DOWN, **_SOON)
_SPECIALISED = Tiles(block_t=128, stages=4, per_sm=1, balance=2, specialised=1, early=1, **_MANY)
_ANY = 1 << 30
DEFAULTS: dict[WeightFormat, list[tuple[int, int, Tiles]]] = {
    WeightFormat.FP8: [
        (1, _ANY, Tiles(block_t=16, warps=8, balance=1, **_SHORT)),  # some experts are not hit: turns are not full else
        (1, 8, Tiles(block_t=16, warps=8, balance=1, **_NARROW, **_SOON)),
        # about every expert is, so turns of one program are
        (5, _ANY, Tiles(block_t=16, stages=6, per_sm=1, balance=1, **_SHORT, **_SOON)),
        (11, _ANY, Tiles(block_t=32, stages=4, warps=8, per_sm=1, balance=1, **_NARROW, **_SOON)),
        (25, _ANY, _LATE),  # so many scales for each tile that tokens are the tall operand
        (49, _ANY, replace(_LATE, **_MANY)),
        (49, _ANY, _SPECIALISED),
        # a tile of each expert are 64 sums: shared, by programs of one tile
        (49, 4, replace(_LATE, down_block_n=64, down_per_sm=3, down_stages=4, down_regs=168, **_MANY)),
        (97, _ANY, replace(_LATE, **_MANY)),
        (97, _ANY, _SPECIALISED),
    ],
    WeightFormat.BF16: [
        (1, _ANY, Tiles(block_t=16, balance=1, **_SOON)),
        (5, _ANY, Tiles(block_t=16, stages=5, per_sm=1, balance=1, **_SOON)),
        (11, _ANY, Tiles(block_t=32, stages=4, warps=8, per_sm=1, balance=1, **_SOON)),
        (25, _ANY, Tiles(block_t=64, stages=4, warps=8, per_sm=1, tall=1, balance=2, **_DOWN_BF16, **_SOON)),
        (49, _ANY, Tiles(block_t=128, stages=4, warps=8, per_sm=1, tall=1, balance=2, **_DOWN_BF16, **_SOON, **_MANY)),
    ],
}
"""From how many pairs an expert on, and up to how many experts: the last row that a shape is within. Rows that follow
one of as many pairs round as it does, so what is right does not depend on which of them is served. What each brought is
in kernels/README.md."""
_OF_SPECIALISED = ("balance", "finish_per_sm", "finish_block_n", "rounded", "early", "specialised")
"""What may be asked of them; whoever asks for anything else means the other kernels."""


def default_tiles(shape: ExpertShape, *, specialised: bool = False) -> Tiles:
    """By how many pairs an expert is expected to have: a tile that holds them, so that weights are read once. With
    `specialised` among what needs `gather/specialised.py`, too."""
    expected = shape.expected_rows_per_expert or max(1, shape.selections_bound // (4 * shape.num_local_experts))
    fp8 = shape.weight_format is WeightFormat.FP8
    rows = DEFAULTS[WeightFormat.FP8 if fp8 else WeightFormat.BF16]
    return [
        tiles
        for least, most_experts, tiles in rows
        if least <= expected
        and shape.num_local_experts <= most_experts
        and (not tiles.specialised or (specialised and not _odd_sizes(shape)))
    ][-1]


def chosen_tiles(shape: ExpertShape, asked: Mapping[str, int], *, specialised: bool = False) -> Tiles:
    """What is asked for; of the rest the defaults, without forms that were chosen for tiles of other sizes or that
    exclude what is asked for, and with no more stages than fit."""
    if asked.get("specialised"):
        return replace(_SPECIALISED, **asked)
    usual = default_tiles(shape, specialised=specialised and set(asked) <= set(_OF_SPECIALISED))
    if usual.specialised:
        return replace(usual, **asked)
    if asked.get("block_t", usual.block_t) != usual.block_t:
        usual = replace(usual, tall=0, balance=0, down_tall=0, down_pair=0, late=0, alone=0)
    if any(name in asked for name in _ORDERS):
        usual = replace(usual, **dict.fromkeys(_ORDERS, 0))
    tiles = replace(usual, **asked)
    most = {name: min(getattr(tiles, name), _BLOCK_BYTES // size) for name, size in _stage_bytes(tiles).items()}
    return replace(tiles, **{name: stages for name, stages in most.items() if name not in asked})


def tile_problem(shape: ExpertShape, asked: Mapping[str, int]) -> str | None:
    """Why the kernels cannot be had as asked for, in a sentence, or None."""
    fp8 = shape.weight_format is WeightFormat.FP8
    if asked.get("specialised") and not fp8:
        return "specialised=1 is for fp8 alone: leave it out"
    if fp8 and asked.get("block_n", 128) != 128:
        return f"block_n={asked['block_n']} must be 128 for fp8: the columns that share a scale"
    orders = [name for name in _ORDERS if name in asked]
    if orders and not fp8:
        return f"{orders[0]}=1 is for fp8 alone: leave it out"
    if len(orders) > 1:
        return f"{orders[0]}=1 and {orders[1]}=1 are two orders of the same products: leave it out, or {orders[1]}=1"
    tiles = chosen_tiles(shape, asked)
    if tiles.specialised:
        return _problem_of_specialised(shape, asked)
    for name, is_asked in (("tall", tiles.tall), ("down_tall", tiles.down_tall)):
        if is_asked and tiles.block_t < _TALLEST:
            return f"{name}=1 needs block_t={_TALLEST} or more, the rows of a product, and it is {tiles.block_t}"
    for name, stage_bytes in _stage_bytes(tiles).items():
        stages = getattr(tiles, name)
        if stages * stage_bytes > _BLOCK_BYTES:
            return (
                f"{name}={stages} of {stage_bytes} bytes take {stages * stage_bytes} bytes of shared memory, more than"
                f" the {_BLOCK_BYTES} of a block: take {_BLOCK_BYTES // stage_bytes} at most, or smaller tiles"
            )
    sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate}
    if wrong := [f"{name}={size}" for name, size in sizes.items() if size % 128]:
        many = "is not a multiple" if len(wrong) == 1 else "are not multiples"
        return f"{' and '.join(wrong)} {many} of 128, the width of a tile"
    if tiles.down_pair and shape.hidden % (2 * tiles.down_block_n):
        return (
            f"hidden={shape.hidden} is not a multiple of {2 * tiles.down_block_n}, the two blocks of down_pair=1: take"
            " a smaller down_block_n, or leave it out"
        )
    return None


def _odd_sizes(shape: ExpertShape) -> list[str]:
    """Sizes that are no whole rounds of four stages of 128 values."""
    sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate}
    return [f"{name}={size}" for name, size in sizes.items() if size % 512]


def _problem_of_specialised(shape: ExpertShape, asked: Mapping[str, int]) -> str | None:
    if others := [f"{name}={value}" for name, value in asked.items() if name not in _OF_SPECIALISED]:
        return (
            f"specialised=1 has its own tiles: leave out {', '.join(others)}, or it; beside it may be"
            f" {', '.join(name for name in _OF_SPECIALISED if name != 'specialised')}"
        )
    if wrong := _odd_sizes(shape):
        return (
            f"{' and '.join(wrong)}: with specialised=1 hidden and intermediate must be multiples of 512: leave it out"
        )
    return None


def _stage_bytes(tiles: Tiles) -> dict[str, int]:
    """Shared memory of one stage of GEMM1 and of GEMM2: 128 bytes of each row of a tile's operands."""
    gate_up_rows = tiles.block_n * (1 if tiles.in_turn else 2) + tiles.block_t
    rows = {"stages": gate_up_rows, "down_stages": tiles.down_block_n * (1 + tiles.down_pair) + tiles.block_t}
    return {name: _STAGE_ROW_BYTES * count for name, count in rows.items()}
