"""What tells points apart that would look alike in a list: the factors that vary among them, in words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.analysis.inputs import LAYOUT, STAGING, option_words

FACTORS = (
    "model", "options", "compute", "compute_options", "domain", "sharing", "scope", "num_experts", "num_slots", "top_k",
    "hidden", "intermediate", "token_spread", "capacity", "tokens_min", "tokens_total", "max_tokens_per_rank",
    "routing", "routing_params", "placement", "dispatch_format", "combine_format", "weight_format",
)  # fmt: skip
"""Columns in which points of one backend, phase, regime, EP size and number of tokens may differ: of rows, or of the
frame (`token_spread`, `capacity`); those that a list of points has not are passed over."""

_WORDS = {
    STAGING: "{}",
    LAYOUT: "layout {}",
    "dispatch_format": "{} out",
    "combine_format": "{} back",
    "weight_format": "{} weights",
}
_OF_MODEL = dict.fromkeys(("num_experts", "num_slots", "top_k", "hidden", "intermediate"), ("model",))
_OF_TOKENS = dict.fromkeys(("tokens_min", "tokens_total", "max_tokens_per_rank"), ("tokens_per_rank", "ep_size"))
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "options": ("backend",),
    "compute": ("backend",),
    "compute_options": ("backend", "compute"),
    **_OF_MODEL,
    **_OF_TOKENS,
}
"""What a factor differs with by nature; it is told only where it differs besides."""


def telling(points: Sequence[Mapping[str, Any]], more: Sequence[str] = ()) -> list[str]:
    """For each point the values of the factors that are not the same at all of them, such as "fp8 out"; empty where
    none varies. Shapes that follow from the model, and options that every backend has of its own, are not told.

    Args:
        points: with `backend`, `ep_size`, `tokens_per_rank` and those of `FACTORS` that there are.
        more: factors to look at besides, first.
    """
    told = [
        name
        for name in (*more, *FACTORS)
        if all(name in point for point in points) and not _follows(name, _FOLLOWS.get(name, ()), points)
    ]
    return [", ".join(filter(None, (_word(name, point[name]) for name in told))) for point in points]


def _follows(name: str, known: Sequence[str], points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether points that agree in `known` agree in `name` as well."""
    seen: dict[tuple[str, ...], str] = {}
    return all(
        seen.setdefault(tuple(str(point[each]) for each in known), str(point[name])) == str(point[name])
        for point in points
    )


def _word(name: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if name in _WORDS:
        return _WORDS[name].format(value)
    if name in ("options", "compute_options", "routing_params"):
        return ", ".join(option_words(key, each) for key, each in json.loads(value).items())
    return f"{name}={value}"
