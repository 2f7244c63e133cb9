"""What judging reads of rows: the same values in the same order, and all that a claim may ask for."""

from pathlib import Path

import pandas as pd
from claims_values import TOKENS, measured

from epcross.harness.analysis.frame import SERIES
from epcross.harness.claims.claim_checks import FACTORS
from epcross.harness.claims.lean import lean


def test_values_and_order_are_those_of_the_rows(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": lambda _: 10.0, "deepep_ll": lambda _: 25.0})
    rows = rows.sample(frac=1, random_state=0)
    less = lean(rows)
    assert {*SERIES, *FACTORS} <= set(less.columns) < set(rows.columns)
    for name in less:
        assert less[name].tolist() == rows[name].tolist(), name
    assert sorted(less["tokens_per_rank"].unique()) == list(TOKENS)


def test_words_of_a_closed_list_stay_in_its_order(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": lambda _: 10.0})
    assert isinstance(lean(rows)["regime"].dtype, pd.CategoricalDtype)
    assert list(lean(rows)["regime"].cat.categories) == list(rows["regime"].cat.categories)
