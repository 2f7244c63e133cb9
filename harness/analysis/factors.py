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
_JSON = ("options", "compute_options", "routing_params")
_ABSENT = object()  # an option that a point has not
_EVERYWHERE = ("model", "routing", "placement", "dispatch_format", "combine_format", "weight_format", "domain")
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
    none varies. Shapes that follow from the model, and options and stages that are the same wherever a backend was
    measured, are not told of it.

    Args:
        points: with `backend`, `ep_size`, `tokens_per_rank` and those of `FACTORS` that there are.
        more: factors to look at besides, first.
    """
    columns = varying(points, more).values()
    return [", ".join(filter(None, words)) for words in zip(*columns, strict=True)] if columns else [""] * len(points)


def varying(points: Sequence[Mapping[str, Any]], more: Sequence[str] = ()) -> dict[str, list[str]]:
    """What `telling` tells, factor by factor: the words of each point, empty where it has none to tell. Options are
    factors by themselves, such as `options.staging`."""
    found: dict[str, list[str]] = {}
    for name in (name for name in (*more, *FACTORS) if all(name in point for point in points)):
        if name not in _JSON:
            found[name] = _varied(name, points, [point[name] for point in points], name)
            continue
        options = [json.loads(point[name] or "{}") for point in points]
        for key in dict.fromkeys(key for each in options for key in each):
            found[f"{name}.{key}"] = _varied(name, points, [each.get(key, _ABSENT) for each in options], key)
    return {name: words for name, words in found.items() if any(words)}


def shared(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The values of the factors that are the same at all of `points`, in words; of what every run has, not of the
    options of one backend."""
    alike = [name for name in _EVERYWHERE if len({str(point.get(name)) for point in points}) == 1]
    return [word for name in alike if (word := _word(name, points[0].get(name)))]


def _varied(name: str, points: Sequence[Mapping[str, Any]], values: Sequence[Any], key: str) -> list[str]:
    places = [tuple(str(point[each]) for each in _FOLLOWS.get(name, ())) for point in points]
    seen: dict[tuple[str, ...], set[str]] = {}
    for place, value in zip(places, values, strict=True):
        seen.setdefault(place, set()).add(str(value))
    word = option_words if name in _JSON else _word
    return [
        word(key, value) if len(seen[place]) > 1 and value is not _ABSENT else ""
        for place, value in zip(places, values, strict=True)
    ]


def _word(name: str, value: Any) -> str:
    if value is None or value == "" or (value == "none" and name in ("compute", "weight_format")):
        return ""
    return _WORDS[name].format(value) if name in _WORDS else f"{name}={value}"
