"""Simulated GPU measurements with a known truth, and books of one claim: what the tests of claims share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from analysis_values import Curve, simulate

from epcross.harness.claims.book import Book, read_book
from epcross.harness.claims.claim import Claim, Way
from epcross.harness.claims.findings import Judgement
from epcross.harness.claims.judge import judge
from epcross.harness.claims.published import load
from epcross.harness.claims.sources import SHIPPED

TOKENS = (1, 8, 32, 128, 512)
BOOK = read_book([SHIPPED])
PUBLISHED = load([SHIPPED])
QUIET = (0.003, 0.001, 0.001)  # standard deviations of launch, seed and chain


def measured(
    folder: Path,
    curves: Mapping[str, Curve],
    *,
    tokens: Sequence[int] = TOKENS,
    repeats: tuple[int, int, int] = (6, 2, 2),
    spread: tuple[float, float, float] = QUIET,
    rng_seed: int = 0,
    product: str = "NVIDIA H200",
    **columns: Any,
) -> pd.DataFrame:
    """Rows of backends with these latencies, one rank per GPU, at DeepSeek-V3; `columns` replace any other."""
    rows = simulate(folder, curves, tokens=tokens, repeats=repeats, spread=spread, rng_seed=rng_seed)
    values = {"domain": "nvlink", "model": "deepseek_v3", "capacity": "as tokens", **columns}
    for name, value in values.items():
        kind = rows[name].dtype
        rows[name] = pd.Series([value] * len(rows), index=rows.index).astype(kind)
    return rows.assign(product=product)


def book_of(claim: Claim | str, **changes: Any) -> Book:
    """The shipped book with one claim, changed."""
    kept = BOOK.claim(claim) if isinstance(claim, str) else claim
    return replace(BOOK, claims=(replace(kept, **changes),))


def verdict_of(
    book: Book, first: pd.DataFrame, *more: pd.DataFrame, way: Way = Way.REPLICATES, **options: Any
) -> Judgement:
    """The judgement of the book's one claim, one way."""
    found = judge(book, pd.concat([first, *more], ignore_index=True), PUBLISHED, **options)
    (one,) = [judgement for judgement in found if judgement.way is way]
    return one
