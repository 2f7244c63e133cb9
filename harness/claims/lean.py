"""The columns of rows that judging reads, with text as Python's own.

Claims select rows some thousand times, and what a selection costs grows with the columns that it copies: most are not
asked for, and each of Arrow's text columns is copied by itself, where those of Python's objects are copied as one.
"""

from typing import TYPE_CHECKING

from epcross.harness.claims.claim_checks import FACTORS

if TYPE_CHECKING:
    import pandas as pd

_READ = (
    "status", "reason", "point_id", "run_id", "launch", "seed", "chain", "verified_rounds",
    "latency_us", "latency_min_us", "wire_bytes", "rank_bytes", "product", "allocation_id", "ids_hash", "enqueued",
    "started_at",
)  # fmt: skip
"""Beside what tells series apart (`frame.SERIES`) and the factors of a claim."""


def lean(rows: "pd.DataFrame") -> "pd.DataFrame":
    """`rows` of `frame.load` with `product`, as `judge` reads them: values and order are the same."""
    import pandas as pd

    from epcross.harness.analysis.frame import SERIES

    names = dict.fromkeys((*SERIES, *FACTORS, *_READ))
    kept = rows[[*names]]
    text = [name for name, kind in kept.dtypes.items() if kind != "category" and pd.api.types.is_string_dtype(kind)]
    return kept.astype(dict.fromkeys(text, object)).copy()
