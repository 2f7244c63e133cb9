"""How much of the variance of a point comes from each level it was repeated at: launch, seed, chain."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from epcross.harness.measuring.stats import RepeatKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Variance components of the logarithm of the latency, so their roots are relative to it.

    A level that has one member everywhere cannot be told from the one above it and is None.
    """

    launch: float | None
    seed: float | None  # within a launch
    chain: float | None  # within a seed

    @property
    def total(self) -> float:
        """Variance of one repeat."""
        return sum(part for part in (self.launch, self.seed, self.chain) if part is not None)

    @property
    def spread_percent(self) -> float:
        """Standard deviation of one repeat in percent of its latency, for spreads that are small."""
        return 100 * float(np.sqrt(self.total))

    def shares(self) -> dict[str, float]:
        """Percent of the total at each level that can be told apart; empty if nothing varies."""
        parts = {name: getattr(self, name) for name in ("launch", "seed", "chain")}
        return {name: 100 * part / self.total for name, part in parts.items() if part is not None} if self.total else {}


def levels(values_us: Mapping[RepeatKey, float]) -> Levels:
    """Variance components of nested random effects by the method of moments; a negative one counts as 0.

    Unequal groups are weighted alike and their mean size is the harmonic one: exact for the balanced repeats that a
    run plans, an approximation where some are missing.

    Source: Searle, Casella and McCulloch, Variance Components (1992), section 3.6 and unweighted means in 5.6.
    """
    seeds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (launch, seed, _), value in sorted(values_us.items()):
        seeds[launch, seed].append(float(np.log(value)))
    launches: dict[int, list[float]] = defaultdict(list)
    for (launch, _), logs in seeds.items():
        launches[launch].append(float(np.mean(logs)))

    chain = _within(list(seeds.values()))
    per_seed = _harmonic([len(logs) for logs in seeds.values()])
    between_seeds = _within(list(launches.values()))
    seed = None if between_seeds is None else max(between_seeds - (chain or 0.0) / per_seed, 0.0)
    launch = None
    if len(launches) > 1:
        per_launch = _harmonic([len(means) for means in launches.values()])
        below = (seed or 0.0) / per_launch + (chain or 0.0) / (per_launch * per_seed)
        launch = max(float(np.var([np.mean(means) for means in launches.values()], ddof=1)) - below, 0.0)
    return Levels(launch=launch, seed=seed, chain=chain)


def _within(groups: list[list[float]]) -> float | None:
    """Pooled variance inside groups; None if no group has two members."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return None
    return sum(float(np.var(group)) * len(group) for group in groups) / freedom


def _harmonic(sizes: list[int]) -> float:
    return len(sizes) / sum(1 / size for size in sizes)
