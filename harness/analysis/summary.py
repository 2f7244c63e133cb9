"""One line for each point: the median of its latencies with its interval, and what that rests on."""

from collections.abc import Iterable

import pandas as pd

from epcross.harness.analysis.frame import SERIES, headline
from epcross.harness.analysis.resample import RESAMPLES, RNG_SEED, Trials, ends, resampled_medians, support, widened
from epcross.harness.measuring.stats import IntervalKind
from epcross.harness.terms import Flag


def points(
    frame: pd.DataFrame,
    *,
    keep: Iterable[Flag | str] = (),
    resamples: int = RESAMPLES,
    rng_seed: int = RNG_SEED,
) -> pd.DataFrame:
    """One line for each series and number of tokens of `frame` (flagged rows are left out unless in `keep`).

    Columns: those of `SERIES`; `tokens_per_rank`; `median_us`; `low_us`, `high_us`, its 95 % interval, widened for few
    launches (see `resample`); `lowest_us`, `highest_us`, of the repeats; `launches`, `seeds`, `chains`, `trials`,
    `within_launch`, `interval`. `attrs["note"]` says what was left out.

    Raises:
        InputError: a flag is unknown.
    """
    rows, note, _ = headline(frame, keep)
    keys = [*SERIES, "tokens_per_rank"]
    lines = []
    for key, own in rows.groupby(keys, observed=True, sort=True):
        trials = Trials(own)
        base = support([trials])
        middle = trials.medians_us()
        (drawn,) = resampled_medians([trials], resamples=resamples, rng_seed=rng_seed)
        if base.kind is IntervalKind.BOOTSTRAP:
            drawn = widened(middle, drawn, base.launches)
        low, high = ends(drawn[0], base.kind)
        lines.append(
            dict(zip(keys, key, strict=True))
            | {"median_us": float(middle[0]), "low_us": low, "high_us": high}
            | {"lowest_us": float(own["latency_us"].min()), "highest_us": float(own["latency_us"].max())}
            | base.columns()
        )
    result = pd.DataFrame(lines, columns=None if lines else keys)
    result.attrs["note"] = note
    return result
