"""Model shapes against their published configurations, read again here so that a typing error in a YAML shows."""

import pytest

from epcross.harness.planning.library import Library
from epcross.harness.point import Model
from epcross.harness.terms import RowFormat
from epcross.kernels.formats import row_size

# name: (experts, top-k, hidden, expert width, parameters of the whole model in 10^9, MoE layers)
PUBLISHED = {
    "deepseek_v3": (256, 8, 7168, 2048, 671, 58),
    "deepseek_v4_flash": (256, 6, 4096, 2048, 284, 43),
    "deepseek_v4_pro": (384, 6, 7168, 3072, 1600, 61),
    "qwen3_235b": (128, 8, 4096, 1536, 235, 94),
    "kimi_k2": (384, 8, 7168, 2048, 1040, 60),
    "gpt_oss_120b": (128, 4, 2880, 2880, 117, 36),
    "glm_4_5": (160, 8, 5120, 1536, 355, 89),
    "minimax_m2": (256, 8, 3072, 1536, 230, 62),
}


@pytest.mark.parametrize("name", Library().names("model"))
def test_every_model_has_a_source_and_rows_of_every_format(name: str):
    model: Model = Library().get("model", name)
    assert model.source.startswith("https://") or name.startswith("tiny")
    assert model.top_k <= model.num_experts
    assert name in PUBLISHED or name.startswith("tiny")
    for row_format in RowFormat:
        assert row_size(row_format, model.hidden).row_bytes > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_the_published_ones(name: str):
    experts, top_k, hidden, intermediate, _, _ = PUBLISHED[name]
    model: Model = Library().get("model", name)
    assert (model.num_experts, model.top_k, model.hidden, model.intermediate) == (experts, top_k, hidden, intermediate)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_agree_with_the_published_size(name: str):
    # three matrices per expert, summed over MoE layers, are nearly the whole model, whose size its card states: a wrong
    # expert count, row or width would miss it by a factor
    model: Model = Library().get("model", name)
    *_, billions, layers = PUBLISHED[name]
    counted = 3 * model.hidden * model.intermediate * model.num_experts * layers / 1e9
    assert 0.93 < counted / billions < 1.0


def test_tiny_odd_needs_padding_in_every_part():
    model: Model = Library().get("model", "tiny_odd")
    assert all(row_size(f, model.hidden).padded_bytes != row_size(f, model.hidden).row_bytes for f in RowFormat)
    assert model.top_k % 2 == 1
