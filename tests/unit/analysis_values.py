"""Simulated measurements with a known truth, as frames: what the tests of the analysis share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from store_values import CONTEXT, make_point, ok

from epcross.harness.analysis import frame
from epcross.harness.point import Point
from epcross.harness.record import Record
from epcross.harness.storing.parquet import rows_table, samples_table, write_tables
from epcross.harness.storing.rows import base_record
from epcross.harness.terms import Phase, Regime, Status

Curve = Callable[[int], float]


def point(backend: str, tokens: int, *, regime: Regime = Regime.STEADY, ep_size: int = 2) -> Point:
    return make_point(backend=backend, tokens=tokens, regime=regime, ep_size=ep_size)


def record(of: Point, latency_us: float = 10.0, phase: Phase = Phase.ROUND_TRIP, **columns: object) -> Record:
    """A row of `of`, ok unless `columns` say otherwise, with counts as if every token had both choices
    on different ranks, one of them its own."""
    tokens = sum(of.tokens)
    counted = replace(
        base_record(of, CONTEXT),
        phase=phase,
        boundary="transfer",
        backend_version="1",
        weights_by="experts",
        selections_sum=2 * tokens,
        pairs_sum=2 * tokens,
        pairs_remote_sum=tokens,
    )
    told = replace(ok(counted, latency_us), **columns)
    if told.status == Status.OK:
        return told
    return replace(told, latency_us=None, latency_min_us=None, latency_max_us=None, estimator=None)


def write(folder: Path, records: Sequence[Record]) -> Path:
    """A folder of tables with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder, rows_table(records), samples_table("run-a", []))
    return folder


def simulate(
    folder: Path,
    curves: Mapping[str, Curve],
    *,
    tokens: Sequence[int],
    repeats: tuple[int, int, int],
    spread: tuple[float, float, float],
    experiments: int = 1,
    rng_seed: int = 0,
    run_id: str = "run-a",
) -> pd.DataFrame:
    """Latencies `curve(tokens)` times the exponential of normal deviations of launch, seed and chain.

    Medians of the truth are the curves themselves. Half of a launch's variance is common to all its token counts, half
    is each point's own. Experiments are told apart by the column `model`.
    """
    rng = np.random.default_rng(rng_seed)
    launches, seeds, chains = repeats
    template = frame.load(write(folder, [record(point(name, t)) for name in curves for t in tokens]))
    index = template.set_index(["backend", "tokens_per_rank"]).index
    shape = (experiments, len(curves), len(tokens), launches, seeds, chains)
    common = rng.normal(size=(experiments, len(curves), 1, launches, 1, 1))
    own = rng.normal(size=(experiments, len(curves), len(tokens), launches, 1, 1))
    deviation = (
        spread[0] * (common + own) / np.sqrt(2)
        + spread[1] * rng.normal(size=(*shape[:-1], 1))
        + spread[2] * rng.normal(size=shape)
    )
    truth = np.array([[curve(t) for t in tokens] for curve in curves.values()])
    latency_us = truth[None, :, :, None, None, None] * np.exp(deviation)
    number = np.indices(shape).reshape(len(shape), -1)
    place = index.get_indexer(
        pd.MultiIndex.from_arrays([np.array(list(curves))[number[1]], np.array(tokens)[number[2]]])
    )
    rows = template.iloc[place].reset_index(drop=True)
    return rows.assign(
        model=np.array([f"m{i:04d}" for i in range(experiments)])[number[0]],
        point_id=rows["point_id"] + "-" + pd.Series(number[0]).astype(str),
        launch=number[3],
        seed=number[4],
        chain=number[5],
        repeat=(number[3] * seeds + number[4]) * chains + number[5],
        run_id=run_id,
        **dict.fromkeys(("latency_us", "latency_min_us", "latency_max_us"), latency_us.ravel()),
    )
