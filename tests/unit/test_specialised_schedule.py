"""gather/specialised*.py on a model of the device: what products read, whoever comes first, and that all end."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: make triton")

from epcross.kernels.experts.gather import specialised_down_kernels as gemm2
from epcross.kernels.experts.gather import specialised_kernels as gemm1
from epcross.kernels.experts.gather.gemm_kernels import place_of, unit_of
from epcross.kernels.experts.gather.specialised import STAGES
from epcross.kernels.experts.gather.specialised_product_kernels import pass_by, stages_of, two_products

from tests._gluon_model import Device  # isort: skip

TILES, SPLITS, WHOLE = 0, 1, 4  # of the schedule
SCHEDULE, TILE, ARRIVALS, PAIRS, WEIGHTS, OTHER = 0, 8, 100, 1000, 40_000, 1 << 20  # places in memory


@dataclass(frozen=True)
class Case:
    """What the index made of some experts' pairs; hidden and intermediate in rounds of stages."""

    pairs: list[list[int]]  # of each expert: (row * top_k + selection) << 1 | whether the row has others here
    hidden: int
    inter: int
    top_k: int
    programs: int
    whole: int  # sums of GEMM1 that nobody shares
    splits: int
    seed: int

    @property
    def num_rows(self) -> int:
        return max((max(pairs) // 2 // self.top_k + 1 for pairs in self.pairs if pairs), default=1)

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Expert and number of the first pair of each."""
        return [(expert, first) for expert, pairs in enumerate(self.pairs) for first in range(0, len(pairs), 128)]

    def device(self) -> Device:
        memory = np.arange(OTHER)
        tiles, most = self.tiles, len(self.tiles) + 1
        memory[SCHEDULE : SCHEDULE + 5] = [len(tiles), self.splits, 0, 0, self.whole]
        memory[ARRIVALS:PAIRS] = 0
        for number, (expert, first) in enumerate(tiles):
            begin = [other for other, _ in tiles].index(expert)
            memory[TILE + number + most * np.arange(4)] = expert, first, len(self.pairs[expert]), begin
        for expert, pairs in enumerate(self.pairs):
            memory[PAIRS + expert * self.num_rows :][: len(pairs)] = pairs
        return Device(memory, self.seed)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    top_k = draw(st.sampled_from([1, 2, 8]))
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(1, 300)), min_size=1, max_size=3))
    seed = draw(st.integers(0, 1 << 30))
    random = np.random.default_rng(seed)
    pairs = []
    for expert, size in enumerate(sizes):
        row = expert * 320 + random.permutation(320)[:size]
        shared = 0 if top_k == 1 else random.integers(0, 2, size)
        pairs.append((((row * top_k + random.integers(0, top_k, size)) << 1) | shared).tolist())
    hidden, inter = draw(st.sampled_from([512, 1024, 1536])), draw(st.sampled_from([512, 1024]))
    sums = sum(-(-size // 128) for size in sizes) * (inter // 128)
    return Case(
        pairs, hidden, inter, top_k, draw(st.integers(1, 7)), draw(st.integers(0, sums)), draw(st.integers(1, 8)), seed
    )


def own_rows(case: Case, tile: int, group: int) -> list[int]:
    """Pairs of a group's half of a tile."""
    expert, first = case.tiles[tile]
    return case.pairs[expert][first : first + 128][group * 64 : group * 64 + 64]


@settings(max_examples=30, deadline=None)
@given(cases())
def test_gemm1(case: Case) -> None:
    """Each half of a tile with a pair leaves one block for each column: its own rows by gate and up, all steps in
    order, however many programs shared the sum. Arrivals are 0 again."""
    device, hidden, inter = case.device(), case.hidden, case.inter
    x, x_scale, w_scale, parts, h_scale = (OTHER * power for power in (10, 20, 30, 40, 50))
    arguments = [
        "w", w_scale, x, 0, hidden, x_scale, 0, hidden // 128, 0, PAIRS, case.num_rows, SCHEDULE, TILE,
        len(case.tiles) + 1, "h", h_scale, parts, ARRIVALS, hidden, inter, case.top_k, True, STAGES, False, True,
    ]  # fmt: skip
    called = [stages_of, place_of, unit_of, two_products, pass_by, gemm1._copy_gate_up, gemm1._multiply_gate_up]
    for program in np.random.default_rng(case.seed).permutation(case.programs).tolist():
        device.run(gemm1.gate_up_specialised_kernel, called, arguments, program=program, programs=case.programs)
    steps, expected = hidden // 128, {}
    for tile, (expert, _) in enumerate(case.tiles):
        for column in range(inter // 128):
            for group in range(2):
                rows = [pair // 2 // case.top_k for pair in own_rows(case, tile, group)]
                if rows:
                    at = "h", tile * 128 + group * 64, column * 128
                    expected[at] = [
                        [
                            (
                                group * 64, tuple(x + row * hidden + step * 128 for row in rows),
                                ("w", expert * 2 * inter + up * inter + column * 128, step * 128),
                                tuple(x_scale + row * steps + step for row in rows),
                                (w_scale + (expert * 2 * inter // 128 + up * inter // 128 + column) * steps + step,),
                            )
                            for step in range(steps)
                        ]
                        for up in range(2)
                    ]  # fmt: skip
    left = {
        at: [
            [(first, mine(xs, first), w, mine(scales, first), ws) for first, xs, w, scales, ws in of.terms]
            for of in both
        ]
        for at, both in device.left.items()
    }
    assert left == expected
    assert not device.memory[ARRIVALS:PAIRS].any()
    scaled = sorted(int(at) for places, _, mask in device.stored for at in places[mask])
    places = (len(case.tiles) + 1) * 128
    assert scaled == sorted(
        h_scale + column * places + tile * 128 + number
        for tile in range(len(case.tiles))
        for column in range(inter // 128)
        for number in range(len(own_rows(case, tile, 0) + own_rows(case, tile, 1)))
    )


@settings(max_examples=30, deadline=None)
@given(cases())
def test_gemm2(case: Case) -> None:
    """Each pair's columns go once to its row or among the parts, weighted by its own weight; nothing but weights is
    read before GEMM1 has ended."""
    device, hidden, inter = case.device(), case.hidden, case.inter
    h_scale, w_scale, out = (OTHER * power for power in (10, 20, 30))
    most, steps = len(case.tiles) + 1, inter // 128
    arguments = [
        "w", w_scale, "h", h_scale, WEIGHTS, 0, case.top_k, 0, PAIRS, case.num_rows, SCHEDULE, TILE, most, out, hidden,
        "parts", hidden, inter, case.top_k, STAGES, False, True,
    ]  # fmt: skip
    called = [stages_of, place_of, two_products, pass_by, gemm2._put, gemm2._copy_down, gemm2._multiply_down]
    for program in range(case.programs):
        device.run(gemm2.down_specialised_kernel, called, arguments, program=program, programs=case.programs)
    alone = {
        int(at): (of, number)
        for places, of, mask in device.stored
        for number, at in enumerate(places[:, 0])
        if mask[number, 0]
    }
    expected_alone, expected_parts = set(), set()
    for tile, (expert, _) in enumerate(case.tiles):
        for column in range(hidden // 128):
            for group in range(2):
                terms = [
                    (
                        group * 64, ("h", tile * 128, step * 128), ("w", expert * hidden + column * 128, step * 128),
                        tuple(h_scale + step * most * 128 + tile * 128 + number for number in range(128)),
                        (w_scale + (expert * hidden // 128 + column) * steps + step,),
                    )
                    for step in range(steps)
                ]  # fmt: skip
                for number, pair in enumerate(own_rows(case, tile, group)):
                    at = "parts", tile * 128 + group * 64, column * 128
                    if pair & 1:
                        expected_parts.add(at)
                        made = device.left[at]
                    else:
                        to = out + pair // 2 // case.top_k * hidden + column * 128
                        expected_alone.add(to)
                        made, found = alone[to]
                        assert found == number
                    assert list(made.terms) == terms
                    assert made.weight[number] == WEIGHTS + pair // 2
    assert set(alone) == expected_alone
    assert set(device.left) == expected_parts


def mine(told: tuple[int | None, ...], first: int) -> tuple[int, ...]:
    """Addresses of a group's own pairs."""
    return tuple(at for at in told[first : first + 64] if at is not None)
