"""Points and choices of the script that measures tiles, without a GPU."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed, which the script is made of")

from epcross.kernels.experts.gather.tiles import chosen_tiles, default_tiles, tile_problem
from epcross.kernels.experts.gather_gemm import GatherGemm

from tests.benchmark.expert_choices import choices  # isort: skip
from tests.benchmark.expert_points import places_of  # isort: skip

POINTS = "fp8:2x512x64,fp8:2x4096x64,64x1,64x8,64x32,32x8,32x32,bf16:32x128"


def test_points_are_slices_of_a_rank() -> None:
    found = places_of(POINTS, "fp8,bf16")
    assert [str(place) for place in found if "experts" in str(place)] == [
        "formats fp8 EP 2 tokens 512 experts 64", "formats fp8 EP 2 tokens 4096 experts 64"
    ]  # fmt: skip
    shape = found[0].shape()
    assert (shape.num_local_experts, shape.capacity_rows, shape.expected_rows_per_expert) == (32, 1024, 128)
    assert sum(place.formats == "fp8" for place in found) == 7
    (last,) = (place for place in found if (place.ep, place.tokens) == (32, 128))
    assert (last.formats, last.shape().expected_rows_per_expert) == ("bf16", 128)


def test_every_choice_is_served_and_none_is_there_twice() -> None:
    for place in places_of(POINTS + ",64x128,16x128", "fp8,bf16"):
        shape, found = place.shape(), list(choices(place.shape()))
        assert found
        for tiles in found:
            assert GatherGemm(**tiles).option_problems() == [], tiles
            assert tile_problem(shape, tiles) is None, tiles
        seen = {chosen_tiles(shape, tiles) for tiles in found}
        assert len(seen) == len(found), json.dumps(found)
        assert default_tiles(shape, specialised=True) not in seen
