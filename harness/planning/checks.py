"""What makes a point impossible for every backend: an error of the sweep, found before anything runs."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from epcross.harness.planning.known_issues import issue_problems
from epcross.harness.planning.schema import MARKERS, BackendConfig, ComputeConfig, Soak
from epcross.harness.planning.typed import suggest
from epcross.harness.point import Point, Timing
from epcross.harness.workload import placement, routing
from epcross.kernels.formats import row_size

ENGINES = ("vllm", "sglang", "tensorrt_llm", "none")
"""Serving engines that a backend's file may speak of; none: that none of them selects it."""

MAX_EP_SIZE = 1024
"""Ranks of a group; a guard against EP and expert counts swapped, far above any scale-up domain today."""

MAX_REPEATS = 100_000
"""Of a point; far beyond what an interval needs, and below what a plan can hold."""

MAX_CASES = 20_000
"""Points of one soak; a longer one soaks each of them longer."""

MAX_POINTS = 100_000
"""Points of a sweep; a guard against a mistyped range, which would eat all memory."""

MAX_TOKENS = 2**24
"""Capacity of a rank; sizes and indices of rows stay far inside the integers that kernels use."""

MAX_EXPERTS = 2**16
"""Of a model, and slots of a placement: every rank holds tables of them. Models of today have some hundreds."""

MAX_WIDTH = 2**20
"""Of hidden and intermediate; a row of it is 2 MiB. Models of today have some ten thousand."""

MAX_PAIRS, MAX_ITERATIONS, MAX_SETS = 10**9, 10**6, 1024
"""Of a series: its length, how many samples a rank keeps of it, and how many inputs it holds."""

MAX_WALL_S, MAX_SOAK_S = 7 * 86_400, 10**7
"""Of a unit, and of a soak; clocks and waits of a process take no number of seconds."""


def point_problems(point: Point, given: Mapping[str, Any] | None = None) -> list[str]:
    """Every reason why `point` makes no sense, as sentences; empty if it does. `given` are the factors that it was made
    of, for sentences in the words of whoever wrote them."""
    if not 1 <= point.ep_size <= MAX_EP_SIZE:
        return [f"ep_size={point.ep_size} must lie between 1 and {MAX_EP_SIZE}"]
    model = point.model
    problems = [
        f"model '{model.name}': {name}={value} must be at least 1"
        for name in ("num_experts", "top_k", "hidden", "intermediate")
        if (value := getattr(model, name)) < 1
    ]
    problems += [
        f"model '{model.name}': {name}={value} must be at most {most}"
        for name, most in (("num_experts", MAX_EXPERTS), ("hidden", MAX_WIDTH), ("intermediate", MAX_WIDTH))
        if (value := getattr(model, name)) > most
    ]
    if point.placement.num_slots > MAX_EXPERTS >= model.num_experts:
        problems.append(f"placement.num_slots={point.placement.num_slots} must be at most {MAX_EXPERTS}")
    if problems:
        return problems
    problems += _format_problems(point)
    shape = f"model '{model.name}': "
    problems += [shape + text for text in placement.problems(point.placement, model.num_experts, point.ep_size)]
    problems += [
        (shape if "top_k" in text else "") + text
        for text in routing.problems(
            point.routing, num_experts=model.num_experts, top_k=model.top_k, ep_size=point.ep_size
        )
    ]
    if point.routing.masked_fraction == 1.0:
        problems.append("routing.masked_fraction=1.0 drops every selection; there would be nothing to time")
    problems += _token_problems(point, given or {})
    return problems


def timing_problems(timing: Timing) -> list[str]:
    """Numbers of a timing that would time nothing, or never end."""
    least = {**dict.fromkeys(("launches", "seeds", "chains", "min_pairs", "iterations"), 1), "warmup_pairs": 0}
    problems = too_small("timing", timing, **least, warmup_ms=0)
    warmup_s = timing.warmup_ms * 1e-3 * timing.seeds
    if not problems and warmup_s > timing.wall_limit_s > 0:
        problems.append(
            f"timing.warmup_ms={timing.warmup_ms:g} for each of {timing.seeds} seeds takes {warmup_s:g} s, more than "
            f"wall_limit_s={timing.wall_limit_s:g} of a unit; lower the one or raise the other"
        )
    if not problems and timing.repeats > MAX_REPEATS:
        problems.append(
            f"timing has launches={timing.launches} x seeds={timing.seeds} x chains={timing.chains} repeats, more than "
            f"{MAX_REPEATS}; each leaves a row for every point and phase"
        )
    if timing.sets < 2:
        problems.append(
            f"timing.sets={timing.sets} must be at least 2: with one set, sums that a timed pair never wrote look right"
        )
    most = {**dict.fromkeys(("min_pairs", "max_pairs", "warmup_pairs"), MAX_PAIRS), "iterations": MAX_ITERATIONS}
    problems += too_large("timing", timing, **most, sets=MAX_SETS, wall_limit_s=MAX_WALL_S)
    problems += [
        f"timing.{name}={value} must be above 0"
        for name in ("chain_ms", "wall_limit_s")
        if not 0 < (value := getattr(timing, name)) < math.inf
    ]
    if timing.max_pairs < timing.min_pairs:
        problems.append(f"timing.max_pairs={timing.max_pairs} is below min_pairs={timing.min_pairs}")
    return problems


def soak_problems(soak: Soak) -> list[str]:
    """Numbers of a soak that would draw nothing, or more than a plan can hold."""
    problems = [
        f"soak.{name}={value} must be above 0"
        for name in ("seconds", "case_s")
        if not (value := getattr(soak, name)) > 0
    ]
    problems += too_small("soak", soak, seed=0, only=0)
    if not problems and soak.seconds / soak.case_s > MAX_CASES:
        problems.append(
            f"soak.seconds={soak.seconds:g} at soak.case_s={soak.case_s:g} are over {MAX_CASES} cases; raise case_s"
        )
    elif not problems:
        problems += too_large("soak", soak, seconds=MAX_SOAK_S, case_s=MAX_SOAK_S)
    return problems


def too_small(group: str, values: object, **least: int) -> list[str]:
    """Numbers of `values`, which configuration calls `group`, that lie below the least given for each."""
    return [
        f"{group}.{name}={value} must be at least {lowest}"
        for name, lowest in least.items()
        if (value := getattr(values, name)) is not None and value < lowest
    ]


def too_large(group: str, values: object, **most: int) -> list[str]:
    """As `too_small`, of numbers above the most given for each."""
    return [
        f"{group}.{name}={value} must be at most {highest}"
        for name, highest in most.items()
        if (value := getattr(values, name)) > highest
    ]


def backend_problems(config: BackendConfig) -> list[str]:
    """What a backend's YAML says that cannot be used, besides wrong keys and types."""
    problems = [f"{name} is empty" for name in ("target", "label") if not getattr(config, name).strip()]
    if not re.fullmatch("#[0-9a-fA-F]{6}", config.color):
        problems.append(f'color is {config.color!r}, but must be written "#rrggbb", in quotes')
    if config.marker not in ("", *MARKERS):
        problems.append(f"marker is {config.marker!r}, but must be one of {' '.join(MARKERS)}, or left out")
    if config.computes:
        problems.append("computes is for the plan to fill in; name the usual expert stage with compute: NAME")
    for issue in config.known_issues:
        problems += issue_problems(issue)
    problems += [
        f"engines: unknown engine '{name}'{suggest(name, ENGINES)}"
        for name in config.engines or {}
        if name not in ENGINES
    ]
    return problems


def same_labels(configs: Iterable[BackendConfig]) -> list[str]:
    """Labels that several backends have: tables and figures tell them apart by nothing else."""
    named: dict[str, list[str]] = {}
    for config in configs:
        named.setdefault(config.label.strip(), []).append(config.name)
    return [
        f"label '{label}' is that of {' and '.join(names)}; give each backend one of its own"
        for label, names in named.items()
        if len(names) > 1
    ]


def compute_problems(config: ComputeConfig) -> list[str]:
    """As `backend_problems`, of an expert stage."""
    return [f"{name} is empty" for name in ("target", "label") if not getattr(config, name).strip()]


def _format_problems(point: Point) -> list[str]:
    problems: list[str] = []
    for name, row_format in (("dispatch_format", point.dispatch_format), ("combine_format", point.combine_format)):
        try:
            row_size(row_format, point.model.hidden)
        except ValueError as error:
            problems.append(f"model '{point.model.name}', {name}: {error}")
    return problems


def _token_problems(point: Point, given: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    asked = given.get("tokens_per_rank", point.tokens)
    tokens = f"tokens_per_rank={asked if isinstance(asked, int) else list(asked)}"
    if any(t < 0 for t in point.tokens):
        problems.append(f"{tokens}: a rank cannot have fewer than 0 tokens")
    elif not any(point.tokens):
        problems.append(f"{tokens}: no rank has any token, so there would be nothing to time")
    if point.max_tokens_per_rank > MAX_TOKENS:
        stretched = [
            f"{name}={given[name]}" for name in ("token_skew", "capacity_factor") if given.get(name, 1.0) != 1.0
        ]
        if "max_tokens_per_rank" not in given or given["max_tokens_per_rank"] is not None:
            words = f"max_tokens_per_rank={point.max_tokens_per_rank}"
        elif stretched:
            words = f"{tokens} with {' and '.join(stretched)}: the {point.max_tokens_per_rank} rows of a rank"
        else:
            words = tokens
        problems.append(f"{words} must be at most {MAX_TOKENS}")
    if len(point.tokens) == point.ep_size and max(point.tokens) > point.max_tokens_per_rank:
        problems.append(
            f"max_tokens_per_rank={point.max_tokens_per_rank} is less than the {max(point.tokens)} tokens of the "
            "fullest rank; raise it or leave it out"
        )
    return problems
